"""WebShop: find and buy what the instruction asks for, by searching and clicking.

It follows WebShop, https://arxiv.org/abs/2207.01206, with its actions and reward, over
a small catalogue of our own. The model answers with `search[words]` or `click[what]`.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from jaxrl.envs import reply_parsing
from jaxrl.envs.env_registry import Info, ResetOptions
from jaxrl.envs.games.web_shop_catalogue import Catalogue, Product, shared_catalogue

ACTION_HELP = 'Answer with one action: search[words] or click[what].'
PAGE_SIZE = 5  # goods on a page of results
_ACTION = re.compile(r'(search|click)\[([^\[\]]*)\]', re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ShoppingGoal:
  """What is to be bought.

  Attributes:
    kind: The kind of product.
    features: The required features.
    choices: The required choice of each group.
    price: The highest acceptable price in dollars.
  """

  kind: str
  features: tuple[str, ...]
  choices: Mapping[str, str]
  price: float

  def __str__(self) -> str:
    """Returns the goal as an instruction."""
    chosen = ', '.join(f'{group} {value}' for group, value in self.choices.items())
    return (
      f'Buy a {self.kind} that is: {", ".join(self.features)}; with {chosen}; for '
      f'{self.price:.2f} dollars or less.'
    )


class WebShopEnv:
  """Plays one shopping task, which is a pure function of the seed and the options.

  Buying ends the episode with `purchase_score`, from 0 to 1.

  Args:
    products: The number of products of the catalogue.
    catalogue_seed: The seed of the catalogue.
    invalid_reward: The reward of a reply that is not a possible action; it costs its
      turn.
    step_reward: The reward of any other reply that buys nothing.
    max_chars: The maximum number of characters of a search.

  Raises:
    ValueError: If the number of products is out of range.
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
      raise ValueError(f'products must be from 1 to 10000, not {products}')
    self._shop = shared_catalogue(catalogue_seed, products)
    self._invalid_reward = invalid_reward
    self._step_reward = step_reward
    self._max_chars = max_chars
    self._goal: ShoppingGoal | None = None
    self._start()

  def _start(self) -> None:
    self._results: list[Product] | None = None
    self._page = 0
    self._invalid = 0
    self._query = ''
    self._item: Product | None = None
    self._chosen: dict[str, str] = {}

  def reset(
    self, *, seed: int, options: ResetOptions | None = None
  ) -> tuple[str, Info]:
    """Draws the goal of `seed`."""
    self._goal = draw_goal(seed, self._shop)
    self._start()
    return f'{self._goal}\n\n{self._show()}', {'suffix': ACTION_HELP}

  def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
    """Searches, clicks or buys, as the reply says."""
    if self._goal is None:
      raise RuntimeError('call reset before step')
    try:
      bought = self._act(action)
    except ValueError as error:
      self._invalid += 1
      observation = f'{error}\n{self._show()}'
      return observation, self._invalid_reward, False, False, self._info(0.0)
    if not bought:
      return self._show(), self._step_reward, False, False, self._info(0.0)
    assert self._item is not None
    reward = purchase_score(self._goal, self._item, self._chosen)
    return 'Bought.', reward, True, False, self._info(reward)

  def _act(self, action: str) -> bool:
    """Does what the reply says; returns True if it buys. Raises ValueError."""
    actions = _ACTION.findall(reply_parsing.tagged_answer(action)[-1000:])
    if not actions:
      raise ValueError(f'That is no action. {ACTION_HELP}')
    verb, what = actions[-1][0].lower(), actions[-1][1].strip()
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
    self._query = query
    self._results = self._shop.search(query)
    self._page = 0
    self._item = None

  def _click(self, name: str) -> bool:
    if name == 'buy':
      return True
    if name in ('next', 'previous'):
      self._page += 1 if name == 'next' else -1
    elif name == 'back' and self._item:
      self._item = None
    elif name == 'back':
      self._results = None
    elif self._item is None:
      self._item = self._shop.by_id[name]
      self._chosen = {}
    else:
      groups = self._item.choices
      group = next(group for group in groups if name in groups[group])
      self._chosen[group] = name
    return False

  def _page_results(self) -> list[Product]:
    return (self._results or [])[self._page * PAGE_SIZE : (self._page + 1) * PAGE_SIZE]

  def _clickable(self) -> list[str]:
    """Returns what can be clicked on this page."""
    if self._item:
      offered = [value for values in self._item.choices.values() for value in values]
      return [*offered, 'buy', 'back']
    if self._results is None:
      return []
    names = [product.id for product in self._page_results()]
    names += ['next'] * (len(self._results) > (self._page + 1) * PAGE_SIZE)
    return [*names, *['previous'] * (self._page > 0), 'back']

  def _show(self) -> str:
    """Renders the page for the model, with all that can be done there."""
    if self._item:
      lines = [f'{self._item.title}, {self._item.price:.2f} dollars']
      lines += [f'features: {", ".join(self._item.features)}']
      for group, values in self._item.choices.items():
        chosen = self._chosen.get(group, 'none')
        lines += [f'{group}: {", ".join(values)} (chosen: {chosen})']
    elif self._results is None:
      lines = ['The shop. Search for something.']
    else:
      pages = max(1, -(-len(self._results) // PAGE_SIZE))
      lines = [f'Results for {self._query!r}, page {self._page + 1} of {pages}']
      lines += [
        f'{p.id}: {p.title}, {p.price:.2f} dollars' for p in self._page_results()
      ]
    possible = ['search[words]', *(f'click[{name}]' for name in self._clickable())]
    return '\n'.join([*lines, f'Possible: {", ".join(possible)}'])

  def _info(self, reward: float) -> Info:
    metrics = {'score': reward, 'invalid_actions': float(self._invalid)}
    metrics['accuracy'] = metrics['success'] = float(reward == 1)
    return {'suffix': ACTION_HELP, 'metrics': metrics}


def draw_goal(seed: int, shop: Catalogue) -> ShoppingGoal:
  """Draws a goal that some product of the shop fulfils.

  Args:
    seed: The seed.
    shop: The catalogue.

  Returns:
    The goal.
  """
  rng = np.random.default_rng([seed, len(shop.products)])
  product = shop.products[rng.integers(len(shop.products))]
  required = sorted(rng.permutation(len(product.features))[:2])
  return ShoppingGoal(
    kind=product.kind,
    features=tuple(product.features[i] for i in required),
    choices={
      group: values[rng.integers(len(values))]
      for group, values in product.choices.items()
    },
    price=float(5 * (product.price // 5 + 1)),
  )


def purchase_score(
  goal: ShoppingGoal, product: Product, chosen: Mapping[str, str]
) -> float:
  """Computes WebShop's reward: the share of wishes that a purchase fulfils.

  The wishes are the features, the choices and the price.

  Args:
    goal: The goal.
    product: The product that was bought.
    chosen: The choice of each group.

  Returns:
    A number from 0 to 1; 0 for a product of another kind.
  """
  if product.kind != goal.kind:
    return 0.0
  fulfilled = len(set(goal.features) & set(product.features))
  fulfilled += sum(chosen.get(group) == value for group, value in goal.choices.items())
  fulfilled += product.price <= goal.price
  return fulfilled / (len(goal.features) + len(goal.choices) + 1)
