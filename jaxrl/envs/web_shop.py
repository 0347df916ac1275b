"""A text shop: find and buy what the instruction asks for, by searching and clicking.

After WebShop, https://arxiv.org/abs/2207.01206, with its actions and its reward, over
a small catalogue of our own. The model answers with `search[words]` or `click[what]`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.envs import replies
from jaxrl.envs.catalogue import Catalogue, Product, catalogue

HELP = 'Answer with one action: search[words] or click[what].'
PAGE = 5  # goods on a page of results
_ACTION = re.compile(r'(search|click)\[([^\[\]]*)\]', re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Goal:
  """What is to be bought: a kind with features and choices, for at most `price`."""

  kind: str
  features: tuple[str, ...]
  choices: Mapping[str, str]
  price: float

  def __str__(self) -> str:
    chosen = ', '.join(f'{group} {value}' for group, value in self.choices.items())
    return (
      f'Buy a {self.kind} that is: {", ".join(self.features)}; with {chosen}; for '
      f'{self.price:.2f} dollars or less.'
    )


class WebShopEnv:
  """One errand in the shop. The errand is a pure function of the seed and options.

  products, catalogue_seed: the size of the catalogue and what it is drawn from.
  invalid_reward: for a reply that is no action or none possible here; it costs its
  turn. step_reward: for any other that buys nothing. max_chars: of a search. Buying
  ends the episode with `score`, from 0 to 1.
  """

  uses_dataset = False  # its tasks are seeds

  def __init__(
    self,
    *,
    products: int = 300,
    catalogue_seed: int = 0,
    invalid_reward: float = 0.0,
    step_reward: float = 0.0,
    max_chars: int = 200,
  ):
    if not 1 <= products <= 10_000:
      raise ValueError(f'products lie within 1 and 10000, not {products}')
    self._shop = catalogue(catalogue_seed, products)
    self._invalid_reward, self._step_reward = invalid_reward, step_reward
    self._max_chars = max_chars
    self._goal: Goal | None = None
    self._start()

  def _start(self) -> None:
    self._found: list[Product] | None = None
    self._page, self._invalid, self._query = 0, 0, ''
    self._item: Product | None = None
    self._chosen: dict[str, str] = {}

  def reset(
    self, *, seed: int, options: Mapping[str, Any] | None = None
  ) -> tuple[str, dict[str, Any]]:
    self._goal = draw_goal(seed, self._shop)
    self._start()
    return f'{self._goal}\n\n{self._show()}', {'suffix': HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    if self._goal is None:
      raise RuntimeError('call reset before step')
    try:
      bought = self._act(action)
    except ValueError as error:
      self._invalid += 1
      shown = f'{error}\n{self._show()}'
      return shown, self._invalid_reward, False, False, self._info(0.0)
    if not bought:
      return self._show(), self._step_reward, False, False, self._info(0.0)
    assert self._item is not None
    reward = score(self._goal, self._item, self._chosen)
    return 'Bought.', reward, True, False, self._info(reward)

  def _act(self, action: str) -> bool:
    """Does what the reply says; True if it buys. ValueError says what is wrong."""
    found = _ACTION.findall(replies.answer(action)[-1000:])
    if not found:
      raise ValueError(f'That is no action. {HELP}')
    verb, what = found[-1][0].lower(), found[-1][1].strip()
    if verb == 'search':
      self._search(what)
      return False
    names = {name.lower(): name for name in self._clickable()}
    if what.lower() not in names:
      raise ValueError(f'There is no {what[:40]!r} to click here.')
    return self._click(names[what.lower()])

  def _search(self, query: str) -> None:
    if not query or len(query) > self._max_chars:
      raise ValueError(f'A search has 1 to {self._max_chars} characters.')
    self._query, self._found = query, self._shop.search(query)
    self._page, self._item = 0, None

  def _click(self, name: str) -> bool:
    if name == 'buy':
      return True
    if name in ('next', 'previous'):
      self._page += 1 if name == 'next' else -1
    elif name == 'back' and self._item:
      self._item = None
    elif name == 'back':
      self._found = None
    elif self._item is None:
      self._item, self._chosen = self._shop.by_id[name], {}
    else:
      groups = self._item.choices
      group = next(group for group in groups if name in groups[group])
      self._chosen[group] = name
    return False

  def _results(self) -> list[Product]:
    return (self._found or [])[self._page * PAGE : (self._page + 1) * PAGE]

  def _clickable(self) -> list[str]:
    """What can be clicked on this page."""
    if self._item:
      offered = [value for values in self._item.choices.values() for value in values]
      return [*offered, 'buy', 'back']
    if self._found is None:
      return []
    names = [product.id for product in self._results()]
    names += ['next'] * (len(self._found) > (self._page + 1) * PAGE)
    return [*names, *['previous'] * (self._page > 0), 'back']

  def _show(self) -> str:
    """The page as the model sees it, with all that can be done there."""
    if self._item:
      lines = [f'{self._item.title}, {self._item.price:.2f} dollars']
      lines += [f'features: {", ".join(self._item.features)}']
      for group, values in self._item.choices.items():
        chosen = self._chosen.get(group, 'none')
        lines += [f'{group}: {", ".join(values)} (chosen: {chosen})']
    elif self._found is None:
      lines = ['The shop. Search for something.']
    else:
      pages = max(1, -(-len(self._found) // PAGE))
      lines = [f'Results for {self._query!r}, page {self._page + 1} of {pages}']
      lines += [f'{p.id}: {p.title}, {p.price:.2f} dollars' for p in self._results()]
    possible = ['search[words]', *(f'click[{name}]' for name in self._clickable())]
    return '\n'.join([*lines, f'Possible: {", ".join(possible)}'])

  def _info(self, reward: float) -> dict[str, Any]:
    metrics = {'score': reward, 'invalid_actions': float(self._invalid)}
    metrics['accuracy'] = metrics['success'] = float(reward == 1)
    return {'suffix': HELP, 'metrics': metrics}


def draw_goal(seed: int, shop: Catalogue) -> Goal:
  """An errand that some product of the shop fulfils."""
  rng = np.random.default_rng([seed, len(shop.products)])
  product = shop.products[rng.integers(len(shop.products))]
  kept = sorted(rng.permutation(len(product.features))[:2])
  return Goal(
    kind=product.kind,
    features=tuple(product.features[i] for i in kept),
    choices={
      group: values[rng.integers(len(values))]
      for group, values in product.choices.items()
    },
    price=float(5 * (product.price // 5 + 1)),
  )


def score(goal: Goal, product: Product, chosen: Mapping[str, str]) -> float:
  """WebShop's reward: the share of wishes fulfilled; 0 for goods of another kind.

  Its wishes are the features, the choices and the price.
  """
  if product.kind != goal.kind:
    return 0.0
  kept = len(set(goal.features) & set(product.features))
  kept += sum(chosen.get(group) == value for group, value in goal.choices.items())
  kept += product.price <= goal.price
  return kept / (len(goal.features) + len(goal.choices) + 1)
