"""The text shop: errands that can be fulfilled, pages, and the score of a purchase."""

import dataclasses
import threading

import pytest

from jaxrl.envs.env_registry import env_factory
from jaxrl.envs.games.web_shop_catalogue import (
  PRODUCT_KINDS,
  Catalogue,
  shared_catalogue,
)
from jaxrl.envs.games.web_shop_env import (
  ACTION_HELP,
  PAGE_SIZE,
  WebShopEnv,
  draw_goal,
  purchase_score,
)

SHOP = shared_catalogue(0, 300)


def fits(goal):
  """The goods that fulfil an errand wholly."""
  return [
    product
    for product in SHOP.products
    if purchase_score(goal, product, goal.choices) == 1
    and all(value in product.choices[group] for group, value in goal.choices.items())
  ]


def test_the_catalogue_follows_from_its_seed():
  assert Catalogue(0, 50).products == Catalogue(0, 50).products
  assert Catalogue(1, 50).products != Catalogue(0, 50).products
  assert {product.kind for product in SHOP.products} == set(PRODUCT_KINDS)
  assert shared_catalogue(0, 300) is SHOP
  for features, choices, _ in PRODUCT_KINDS.values():
    assert len(set(features)) == 6
    offered = [value for values in choices.values() for value in values]
    assert len(set(offered)) == len(offered)  # so that a click names one choice


def test_search_puts_the_most_and_rarest_words_first():
  products = SHOP.search('waterproof BACKPACK, with hip belt')
  best = products[0]
  assert best.kind == 'backpack'
  assert {'waterproof', 'hip belt'} <= set(best.features)
  assert SHOP.search('zzz') == SHOP.search('') == []
  words = {'waterproof', 'backpack', 'with', 'hip', 'belt'}
  assert all(words & set(product.words) for product in products)


def test_every_errand_is_fulfilled_by_shopping():
  """A shopper who looks at every fitting result buys what was asked for."""
  for seed in range(40):
    env = WebShopEnv()
    shown, info = env.reset(seed=seed)
    goal = draw_goal(seed, SHOP)
    assert shown.startswith(str(goal))
    assert info['suffix'] == ACTION_HELP
    wanted = {product.id for product in fits(goal)}
    shown, *_ = env.step(f'search[{goal.kind} {" ".join(goal.features)}]')
    while not any(name in shown for name in wanted):
      shown, *_ = env.step('click[next]')
    shown, *_ = env.step(f'click[{next(n for n in sorted(wanted) if n in shown)}]')
    for value in goal.choices.values():
      shown, *_ = env.step(f'click[{value}]')
      assert f'(chosen: {value})' in shown
    shown, reward, terminated, truncated, info = env.step('click[buy]')
    assert (shown, reward, terminated, truncated) == ('Bought.', 1.0, True, False)
    assert info['metrics'] == {
      'score': 1,
      'accuracy': 1,
      'success': 1,
      'invalid_actions': 0,
    }


def test_errands_follow_from_the_seed_under_threads():
  alone = [WebShopEnv().reset(seed=seed)[0] for seed in range(50)]
  per_thread = []

  def draw():
    per_thread.append([WebShopEnv().reset(seed=seed)[0] for seed in range(50)])

  threads = [threading.Thread(target=draw) for _ in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert per_thread == [alone] * 16
  assert len(set(alone)) > 40


def test_the_score_is_the_share_of_wishes():
  goal = draw_goal(0, SHOP)
  product = fits(goal)[0]
  wishes = len(goal.features) + len(goal.choices) + 1
  assert purchase_score(goal, product, goal.choices) == 1
  assert purchase_score(goal, product, {}) == pytest.approx(
    1 - len(goal.choices) / wishes
  )
  dear = dataclasses.replace(product, price=goal.price + 0.01)
  assert purchase_score(goal, dear, goal.choices) == pytest.approx(1 - 1 / wishes)
  plain = dataclasses.replace(product, features=())
  assert purchase_score(goal, plain, goal.choices) == pytest.approx(1 - 2 / wishes)
  other = dataclasses.replace(product, kind='other')
  assert purchase_score(goal, other, goal.choices) == 0


def test_pages():
  env = WebShopEnv()
  env.reset(seed=0)
  count = len(SHOP.search('shirt'))
  last = -(-count // PAGE_SIZE)
  assert last > 2
  first = env.step('I will look.\nsearch[shirt]')[0]
  assert f"Results for 'shirt', page 1 of {last}" in first
  assert 'click[previous]' not in first
  second = env.step('<answer>CLICK[Next]</answer>')[0]
  assert f'page 2 of {last}' in second
  item = env._page_results()[0]
  page = env.step(f'click[{item.id.lower()}]')[0]
  assert page.startswith(f'{item.title}, {item.price:.2f} dollars\nfeatures: ')
  assert 'click[buy]' in page
  assert env.step('click[back]')[0] == second
  assert env.step('click[previous]')[0] == first
  for _ in range(last - 1):
    shown = env.step('click[next]')[0]
  assert 'click[next]' not in shown
  assert len(env._page_results()) == count - PAGE_SIZE * (last - 1)
  shown = env.step('click[back]')[0]
  assert shown == 'The shop. Search for something.\nPossible: search[words]'
  assert 'page 1 of 1' in env.step('search[zzz]')[0]


@pytest.mark.parametrize(
  'reply, why',
  [
    ('hello', 'no action'),
    ('buy it', 'no action'),
    ('click[buy]', "no 'buy' to click here"),
    ('click[B0001]', "no 'B0001' to click here"),
    ('search[]', '1 to 20 characters'),
    ('search[' + 'a' * 21 + ']', '1 to 20 characters'),
  ],
)
def test_what_is_not_possible_costs_a_turn_and_says_what_is(reply, why):
  env = WebShopEnv(invalid_reward=-0.2, step_reward=-0.01, max_chars=20)
  env.reset(seed=0)
  shown, reward, terminated, truncated, info = env.step(reply)
  assert why in shown
  assert shown.endswith('Possible: search[words]')
  assert (reward, terminated, truncated) == (-0.2, False, False)
  assert info['metrics']['invalid_actions'] == 1
  assert env.step('search[shirt]')[1] == -0.01


def test_errors():
  with pytest.raises(ValueError, match='products'):
    WebShopEnv(products=0)
  with pytest.raises(RuntimeError, match='reset'):
    env_factory('web_shop')().step('click[buy]')
