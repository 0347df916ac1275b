"""Catalogue draws the products of a shop from a seed and searches them."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

BRANDS = 'Alder Birchway Corvo Dunmore Elsin Fennick Garrow Hollin Iversk Juno'.split()
COLOURS = ('black', 'white', 'red', 'green', 'navy', 'grey', 'orange', 'teal')
CLOTHING_SIZES = ('small', 'medium', 'large', 'extra large')
LENGTHS = ('1 metre', '2 metres', '3 metres', '5 metres')
VOLUMES = ('half litre', 'one litre', 'two litres')

# For each kind of product: possible features, choices on offer, usual price in dollars.
PRODUCT_KINDS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]], float]] = {
  'shirt': (
    ('cotton', 'linen', 'slim fit', 'loose fit', 'long sleeves', 'machine washable'),
    {'colour': COLOURS, 'size': CLOTHING_SIZES},
    30,
  ),
  'rain jacket': (
    ('waterproof', 'hooded', 'lined', 'two pockets', 'reflective', 'packable'),
    {'colour': COLOURS, 'size': CLOTHING_SIZES},
    90,
  ),
  'running shoes': (
    ('cushioned', 'lightweight', 'wide fit', 'vegan', 'trail sole', 'breathable'),
    {'colour': COLOURS, 'size': ('38', '40', '42', '44')},
    80,
  ),
  'backpack': (
    ('waterproof', 'padded straps', 'laptop pocket', 'hip belt', 'foldable', 'vegan'),
    {'colour': COLOURS, 'volume': ('15 litres', '25 litres', '40 litres')},
    60,
  ),
  'water bottle': (
    ('insulated', 'leakproof', 'steel', 'glass', 'dishwasher safe', 'with straw'),
    {'colour': COLOURS, 'volume': VOLUMES},
    20,
  ),
  'kettle': (
    ('electric', 'whistling', 'steel', 'glass', 'cordless', 'keeps warm'),
    {'colour': COLOURS, 'volume': VOLUMES},
    40,
  ),
  'desk lamp': (
    (
      'dimmable',
      'rechargeable',
      'foldable',
      'clamp base',
      'warm light',
      'touch control',
    ),
    {'colour': COLOURS},
    35,
  ),
  'charging cable': (
    ('braided', 'fast charging', 'magnetic', 'right angled', 'with tie', 'tangle free'),
    {'colour': COLOURS, 'length': LENGTHS},
    12,
  ),
  'yoga mat': (
    ('non slip', 'extra thick', 'natural rubber', 'cork', 'with strap', 'foldable'),
    {'colour': COLOURS, 'length': LENGTHS[:2]},
    30,
  ),
  'notebook': (
    ('ruled', 'dotted', 'hardcover', 'recycled paper', 'pen loop', 'numbered pages'),
    {'colour': COLOURS, 'size': ('A4', 'A5', 'A6')},
    10,
  ),
}


@dataclasses.dataclass(frozen=True)
class Product:
  """A product of the shop.

  Attributes:
    id: The id by which it is clicked.
    title: The title on the page.
    kind: The kind of product.
    features: What it is like.
    choices: What a buyer may choose, by group.
    price: The price in dollars.
  """

  id: str
  title: str
  kind: str
  features: tuple[str, ...]
  choices: Mapping[str, tuple[str, ...]]
  price: float

  @property
  def words(self) -> Counter[str]:
    """Returns the words by which the product is found."""
    offered = (value for values in self.choices.values() for value in values)
    return Counter(_words(' '.join((self.title, *self.features, *offered))))


def _words(text: str) -> list[str]:
  return re.findall(r'[a-z0-9]+', text.lower())


class Catalogue:
  """Holds `size` products drawn from `seed`; equal arguments give equal products.

  Args:
    seed: The seed.
    size: The number of products.

  Attributes:
    products: All products.
    by_id: The products by id.
  """

  def __init__(self, seed: int, size: int):
    rng = np.random.default_rng([seed, size])
    self.products = tuple(_draw(rng, number) for number in range(size))
    self.by_id = {product.id: product for product in self.products}
    self._index = [set(product.words) for product in self.products]
    num_products_with = Counter(word for words in self._index for word in words)
    self._rarity = {
      word: math.log(1 + size / n) for word, n in num_products_with.items()
    }

  def search(self, query: str) -> list[Product]:
    """Returns the products that match any word of a query.

    Args:
      query: The words.

    Returns:
      The products, those with the most and rarest words first.
    """
    wanted = sorted(set(_words(query)) & set(self._rarity))
    scored = [
      (-sum(self._rarity[word] for word in wanted if word in words), number)
      for number, words in enumerate(self._index)
    ]
    return [self.products[number] for score, number in sorted(scored) if score < 0]


@functools.cache
def shared_catalogue(seed: int, size: int) -> Catalogue:
  """Returns one read-only catalogue for all callers with equal arguments.

  Args:
    seed: The seed.
    size: The number of products.

  Returns:
    The catalogue.
  """
  return Catalogue(seed, size)


def _draw(rng: np.random.Generator, number: int) -> Product:
  kind = list(PRODUCT_KINDS)[rng.integers(len(PRODUCT_KINDS))]
  features, choices, usual_price = PRODUCT_KINDS[kind]
  features_drawn = _sample(rng, features, 3)
  brand = BRANDS[rng.integers(len(BRANDS))]
  return Product(
    id=f'B{number:04d}',
    title=f'{brand} {kind}, {features_drawn[0]}',
    kind=kind,
    features=features_drawn,
    choices={
      group: _sample(rng, values, min(3, len(values)))
      for group, values in choices.items()
    },
    price=round(usual_price * float(rng.uniform(0.6, 1.8)), 2),
  )


def _sample(
  rng: np.random.Generator, values: tuple[str, ...], count: int
) -> tuple[str, ...]:
  """Returns `count` of the values, in their original order."""
  return tuple(values[i] for i in sorted(rng.permutation(len(values))[:count]))
