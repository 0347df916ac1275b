"""A shop's goods, drawn from a seed, and a search among them."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

BRANDS = 'Alder Birchway Corvo Dunmore Elsin Fennick Garrow Hollin Iversk Juno'.split()
COLOURS = ('black', 'white', 'red', 'green', 'navy', 'grey', 'orange', 'teal')
SIZES = ('small', 'medium', 'large', 'extra large')
LENGTHS = ('1 metre', '2 metres', '3 metres', '5 metres')
VOLUMES = ('half litre', 'one litre', 'two litres')

# Kind of goods → features that it may have, choices that it may offer, usual price.
KINDS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]], float]] = {
  'shirt': (
    ('cotton', 'linen', 'slim fit', 'loose fit', 'long sleeves', 'machine washable'),
    {'colour': COLOURS, 'size': SIZES},
    30,
  ),
  'rain jacket': (
    ('waterproof', 'hooded', 'lined', 'two pockets', 'reflective', 'packable'),
    {'colour': COLOURS, 'size': SIZES},
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
  """One of the goods. choices: what a buyer may choose, by group. price: dollars."""

  id: str
  title: str
  kind: str
  features: tuple[str, ...]
  choices: Mapping[str, tuple[str, ...]]
  price: float

  @property
  def words(self) -> Counter[str]:
    offered = (value for values in self.choices.values() for value in values)
    return Counter(_words(' '.join((self.title, *self.features, *offered))))


def _words(text: str) -> list[str]:
  return re.findall(r'[a-z0-9]+', text.lower())


class Catalogue:
  """`size` goods drawn from `seed`; the same two give the same goods."""

  def __init__(self, seed: int, size: int):
    rng = np.random.default_rng([seed, size])
    self.products = tuple(_draw(rng, number) for number in range(size))
    self.by_id = {product.id: product for product in self.products}
    self._index = [set(product.words) for product in self.products]
    held = Counter(word for words in self._index for word in words)
    self._rarity = {word: math.log(1 + size / n) for word, n in held.items()}

  def search(self, query: str) -> list[Product]:
    """Goods with any of the query's words, those with most and rarest ones first."""
    wanted = sorted(set(_words(query)) & set(self._rarity))
    scored = [
      (-sum(self._rarity[word] for word in wanted if word in words), number)
      for number, words in enumerate(self._index)
    ]
    return [self.products[number] for score, number in sorted(scored) if score < 0]


@functools.cache
def catalogue(seed: int, size: int) -> Catalogue:
  """One catalogue for all who ask for the same; it is never written to."""
  return Catalogue(seed, size)


def _draw(rng: np.random.Generator, number: int) -> Product:
  kind = list(KINDS)[rng.integers(len(KINDS))]
  features, choices, usual = KINDS[kind]
  picked = _some(rng, features, 3)
  brand = BRANDS[rng.integers(len(BRANDS))]
  return Product(
    id=f'B{number:04d}',
    title=f'{brand} {kind}, {picked[0]}',
    kind=kind,
    features=picked,
    choices={
      group: _some(rng, values, min(3, len(values)))
      for group, values in choices.items()
    },
    price=round(usual * float(rng.uniform(0.6, 1.8)), 2),
  )


def _some(
  rng: np.random.Generator, values: tuple[str, ...], count: int
) -> tuple[str, ...]:
  """`count` of the values, in their own order."""
  return tuple(values[i] for i in sorted(rng.permutation(len(values))[:count]))
