"""Reward models: a batch gives the bits that each row has alone; faults are told."""

import asyncio
import threading

import numpy as np
import pytest

from jaxrl.device_thread import DeviceThread
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.rewards.reward_model import RewardModel, RewardModelTerm, score_rows
from jaxrl.rollout.rewards.reward_pipeline import RewardInput, ScoringError
from jaxrl.rollout.thread_pool import ThreadPool
from tests.models import small


class Chat:
  """Numbers as tokens."""

  def encode_conversation(self, messages):
    return [int(word) for m in messages for word in m['content'].split()]


@pytest.fixture(scope='module')
def scorer():
  model, params = small.model_and_params(value_head=True)
  device_thread = DeviceThread()
  yield RewardModel(
    model,
    params,
    Chat(),
    device_thread=device_thread,
    pad_id=0,
    max_length=64,
    batch_size=4,
  )
  device_thread.close()


def says(*tokens):
  return [{'role': 'assistant', 'content': ' '.join(map(str, tokens))}]


async def test_a_score_does_not_depend_on_what_it_is_scored_with(scorer):
  rows = [list(small.tokens(n, seed=n)) for n in (3, 40, 9, 31, 64, 12, 5, 7, 33)]
  rows = [[max(t, 1) for t in row] for row in rows]
  alone = [await scorer.score(says(*row)) for row in rows]
  assert len(set(alone)) == len(rows)
  for order in (range(9), reversed(range(9))):
    order = list(order)
    scores = await asyncio.gather(*(scorer.score(says(*rows[i])) for i in order))
    assert scores == [alone[i] for i in order]
  model, params = small.model_and_params(value_head=True)
  plain = score_rows(
    TransformerLM(model.config), params, np.array(rows[:1], np.int32), np.array([3])
  )
  np.testing.assert_allclose(alone[0], float(plain[0]), atol=1e-5)


async def test_padding_at_the_end_is_not_looked_at(scorer):
  assert await scorer.score(says(5, 6, 0, 0)) == await scorer.score(says(5, 6))


async def test_one_too_long_is_refused_and_costs_no_other(scorer):
  long = asyncio.gather(
    scorer.score(says(*range(1, 66))), scorer.score(says(5)), return_exceptions=True
  )
  wrong, fine = await long
  assert isinstance(wrong, ValueError) and 'max_length=64' in str(wrong)
  assert isinstance(fine, float)


async def test_who_gives_up_waiting_holds_up_no_one(scorer):
  first = asyncio.create_task(scorer.score(says(5)))
  await asyncio.sleep(0)
  first.cancel()
  assert await scorer.score(says(6)) != await scorer.score(says(7))
  assert first.cancelled()


async def test_a_device_that_fails_is_told_to_all_who_wait():
  model, params = small.model_and_params()  # no head
  device_thread = DeviceThread()
  scorer = RewardModel(model, params, Chat(), device_thread=device_thread)
  errors = await asyncio.gather(
    *(scorer.score(says(n)) for n in (1, 2)), return_exceptions=True
  )
  device_thread.close()
  assert all(isinstance(error, AttributeError) for error in errors)


async def test_who_waits_too_long_has_no_score():
  model, params = small.model_and_params(value_head=True)
  device_thread, free = DeviceThread(), threading.Event()
  options = {'device_thread': device_thread, 'timeout': 0.05}
  scorer = RewardModel(model, params, Chat(), **options)
  busy = asyncio.create_task(device_thread.run(free.wait))
  with pytest.raises(ScoringError, match=r'took more than 0\.05 s'):
    await scorer.score(says(5))
  free.set()
  await busy
  device_thread.close()


async def test_as_a_part():
  class Told:
    async def score(self, messages):
      return {'low': -800.0, 'mid': 0.0, 'high': 3.0}[messages[0]['content']]

  pool = ThreadPool(1)
  inputs = {
    text: RewardInput([{'role': 'user', 'content': text}], {}, 0, '', pool)
    for text in ('low', 'mid', 'high')
  }
  plain, squashed = RewardModelTerm(Told()), RewardModelTerm(Told(), sigmoid=True)
  assert [(await plain(one)).score for one in inputs.values()] == [-800, 0, 3]
  scores = [(await squashed(one)).score for one in inputs.values()]
  assert scores == pytest.approx([0, 0.5, 0.9525741])
  pool.close()
