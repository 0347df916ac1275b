"""The stage after an episode: sums, weights, metrics, and what a missing score does."""

import dataclasses
import math

import numpy as np
import pytest

from jaxrl.envs.graders.composite import make_grader_part
from jaxrl.envs.graders.grader_processes import GraderTimeout
from jaxrl.rollout.episodes.rollout_cache import RolloutCache, Turn
from jaxrl.rollout.rewards.reward_pipeline import (
  GraderReward,
  RewardInput,
  RewardOutput,
  RewardPipeline,
  RewardTerm,
)
from jaxrl.rollout.thread_pool import ThreadPool
from tests.rollout.fakes import (
  BadEnv,
  EchoEnv,
  FakeChat,
  FakeEngine,
  lease,
  play,
  world,
)


@dataclasses.dataclass
class Says:
  """A part that says what it is told to, and keeps what it was shown."""

  word: RewardOutput | Exception
  seen: list[RewardInput] = dataclasses.field(default_factory=list)

  async def __call__(self, played):
    self.seen.append(played)
    if isinstance(self.word, Exception):
      raise self.word
    return self.word


def stage(rewards, make_env=EchoEnv, rows=0, reply='ab'):
  engine = FakeEngine(lambda prompt, sampling: reply)
  return dataclasses.replace(world(make_env, engine, rows=rows), rewards=rewards)


async def test_parts_are_weighted_and_added_to_the_last_turn():
  parts = {
    'judge': RewardTerm(
      Says(RewardOutput(0.5, metrics={'unparsable': 1.0}, text='well')), weight=2.0
    ),
    'seen': RewardTerm(Says(RewardOutput(3.0)), weight=0.0),
  }
  rewards = RewardPipeline(parts, env_weight=0.5)
  (row,) = await play(stage(rewards, lambda: EchoEnv(turns=2)), max_steps=3)
  (where,) = np.nonzero(row.rewards)
  assert row.rewards[where].tolist() == [0.5 * 1, 0.5 * 2 + 2 * 0.5]
  metrics = {k: v for k, v in row.metrics.items() if k.startswith('reward/')}
  assert metrics == {
    'reward/env': 3,
    'reward/judge': 0.5,
    'reward/judge/unparsable': 1,
    'reward/judge/faults': 0,
    'reward/seen': 3,
    'reward/seen/faults': 0,
  }
  assert row.extras['rewards'] == {'judge': 'well'}
  # One by one, before their weights: the environment's own first.
  assert row.extras['reward_terms'] == [(3, 0.5), (0.5, 2.0), (3.0, 0.0)]
  assert (row.stop_reason, row.failed) == ('finish', False)


def say(*replies):
  """Returns an engine's reply that says one after the other."""
  rest = list(replies)
  return lambda prompt, sampling: rest.pop(0)


def by_steps(grade, replies, *, turns=1, manager=None, **options):
  """Plays with one term that scores steps of lines."""
  term = RewardTerm(grade, step_end='\n', **options)
  engine = FakeEngine(say(*replies))
  made = world(lambda: EchoEnv(turns=turns), engine)
  pipeline = RewardPipeline({'lines': term}, env_weight=0.0)
  made = dataclasses.replace(made, rewards=pipeline)
  return play(made, max_steps=turns + 1, **manager or {})


class CountsLetters:
  """Scores a conversation by the letters of its last reply."""

  def __init__(self):
    self.seen = []

  async def __call__(self, played):
    self.seen.append(played.reply)
    return RewardOutput(float(len(played.reply.replace('\n', ''))))


async def test_steps_are_rewarded_where_they_end():
  grade = CountsLetters()
  (row,) = await by_steps(grade, ['ab\ncde\n\nf\n'], weight=0.5)
  assert grade.seen == ['ab\n', 'ab\ncde\n', 'ab\ncde\n\n', 'ab\ncde\n\nf\n']
  first = int(np.flatnonzero(row.action_mask)[0])
  text = ''.join(chr(t) for t in row.tokens[first:-1])
  ends = [first + 2, first + 6, first + 7, len(row.tokens) - 1]
  assert text == 'ab\ncde\n\nf\n' and np.flatnonzero(row.rewards).tolist() == ends
  assert row.rewards[ends].tolist() == [1.0, 2.5, 2.5, 3.0]
  assert row.extras['step_ends'] == ends[:-1]
  assert row.metrics['reward/lines'] == 2 + 5 + 5 + 6
  assert row.metrics['reward/lines/steps'] == 4
  assert row.extras['reward_terms'][1] == (18.0, 0.5)


async def test_the_gain_of_steps_adds_up_to_the_last_score():
  (row,) = await by_steps(
    CountsLetters(), ['ab\ncde', 'x', 'a\nbcd'], turns=3, gain=True
  )
  # 2, 5 | 1 | 1, 4: the score starts anew with each reply, and the gains tell.
  assert row.rewards[row.rewards != 0].tolist() == [2, 3, -4, 3]
  assert row.score == 4
  with pytest.raises(ValueError, match='needs step_end'):
    RewardTerm(CountsLetters(), gain=True)


async def test_steps_in_rows_of_turns():
  rows = await by_steps(
    CountsLetters(), ['a\nb', 'cd\ne'], turns=2, manager={'row_format': 'step'}
  )
  assert [row.rewards[row.rewards != 0].tolist() for row in rows] == [[1, 2], [2, 3]]
  for row in rows:
    (end,) = row.extras['step_ends']
    assert row.action_mask[end] and row.rewards[end]


async def test_replies_that_a_prompt_shows_as_examples_are_no_steps():
  chat, reply = FakeChat(), 'a\nbc'
  texts = [('user', '1?'), ('assistant', 'x\ny'), ('user', '2?'), ('assistant', reply)]
  messages = [{'role': role, 'content': text} for role, text in texts]
  cache = RolloutCache(lease(), 0, chat=chat, messages=messages)
  cache.append_observation(chat.encode('12'))
  start, size = len(cache.tokens), len(reply)
  cache.tokens += chat.encode(reply)
  cache.turns = [Turn(start, start + size, 0)]
  grade = CountsLetters()
  term = RewardTerm(grade, step_end='\n')
  await RewardPipeline({'lines': term}).apply(cache, 'name', 0, ThreadPool(1))
  assert grade.seen == ['a\n', reply]
  assert cache.turns[0].step_rewards == {start + 1: 1.0} and cache.turns[0].reward == 3


async def test_a_step_without_a_score():
  missing = Says(RewardOutput(None, 'the judge said nothing'))
  (row,) = await by_steps(missing, ['a\nb'])
  assert row.failed and 'lines: the judge said nothing' in row.extras['error']
  (row,) = await by_steps(missing, ['a\nb'], otherwise=0.25)
  assert row.rewards[row.rewards != 0].tolist() == [0.25, 0.25]
  assert row.metrics['reward/lines/faults'] == 1


async def test_a_reply_has_at_most_so_many_steps():
  grade = CountsLetters()
  (row,) = await by_steps(grade, ['\n'.join('a' * 100)])
  assert len(grade.seen) == 64 and row.metrics['reward/lines/steps'] == 64
  assert grade.seen[-1] == '\n'.join('a' * 100)


def test_more_terms_than_can_be_told_apart_are_refused():
  parts = {str(i): RewardTerm(Says(RewardOutput(0.0))) for i in range(8)}
  with pytest.raises(ValueError, match='at most 7 can be told apart'):
    RewardPipeline(parts)


async def test_the_role_that_an_environment_gives():
  class Seated(EchoEnv):
    def __init__(self, role):
      super().__init__()
      self._role = role

    def reset(self, **options):
      observation, info = super().reset(**options)
      return observation, info | {'role': self._role}

  (row,) = await play(stage(None, lambda: Seated(3)), max_steps=3)
  assert row.extras['role'] == 3
  (row,) = await play(stage(None, lambda: Seated(8)), max_steps=3)
  assert row.failed and 'must be 0 to 7' in row.extras['error']


async def test_what_a_part_is_shown():
  parts = {
    'one': RewardTerm(Says(RewardOutput(1.0))),
    'two': RewardTerm(Says(RewardOutput(1.0))),
  }
  context = stage(RewardPipeline(parts), rows=9)
  rows = [(await play(context, member=member))[0] for member in (0, 1)]
  seen = [term.function.seen for term in parts.values()]
  seeds = {played.seed for one in seen for played in one}
  assert len(seeds) == 4  # members and parts differ
  again = stage(RewardPipeline({'one': RewardTerm(Says(RewardOutput(1.0)))}), rows=9)
  await play(again)
  assert again.rewards.terms['one'].function.seen[0].seed == seen[0][0].seed
  played = seen[0][0]
  assert played.question == rows[0].messages[0]['content'] == played.item['question']
  assert (played.reply, played.item['answer']) == ('ab', played.question[1:])
  assert played.conversation == f'user: {played.question}\n\nassistant: ab'
  called = {'role': 'assistant', 'content': None, 'tool_calls': [{'name': 'f'}]}
  assert RewardInput([called], {}, 0, '', context.pool).reply == '[{"name": "f"}]'


async def test_a_missing_score_fails_the_attempt_and_is_not_a_zero():
  for word in (
    RewardOutput(None, 'no verdict'),
    RuntimeError('gone'),
    RewardOutput(float('nan')),
    RewardOutput(-math.inf),
    RewardOutput(1e300),
    RewardOutput(10**400),
    RewardOutput('high'),  # type: ignore[arg-type]
  ):
    parts = {
      'judge': RewardTerm(Says(word)),
      'other': RewardTerm(Says(RewardOutput(1.0))),
    }
    (row,) = await play(stage(RewardPipeline(parts)))
    assert (row.stop_reason, row.failed) == ('reward_failed', True)
    assert row.extras['error'].startswith('judge: ')
    from_code = isinstance(word, Exception)
    assert ('test_reward_pipeline.py, line ' in row.extras['error']) is from_code
    assert 'reward/judge' not in row.metrics
    assert row.metrics['reward/judge/faults'] == 1
    assert row.metrics['reward/other'] == 1


async def test_weights_that_make_rewards_too_large_fail_the_attempt():
  for weights in ({'weight': 1e300}, {'weight': math.inf}, {'otherwise': math.nan}):
    score = None if 'otherwise' in weights else 2.0
    parts = {'judge': RewardTerm(Says(RewardOutput(score)), **weights)}
    (row,) = await play(stage(RewardPipeline(parts)))
    assert (row.stop_reason, row.score) == ('reward_failed', 0)
    assert 'its rewards sum up to' in row.extras['error']
  (row,) = await play(stage(RewardPipeline({}, env_weight=1e300)))
  assert (row.stop_reason, row.score) == ('reward_failed', 0)


async def test_a_score_of_the_users_may_stand_in_for_it_and_is_counted():
  parts = {
    'judge': RewardTerm(
      Says(RewardOutput(None, 'no verdict')), weight=2.0, otherwise=0.25
    )
  }
  (row,) = await play(stage(RewardPipeline(parts, env_weight=0.0)))
  assert (row.stop_reason, row.score) == ('finish', 0.5)
  assert row.metrics['reward/judge/faults'] == 1
  assert row.metrics['reward/judge'] == 0.25


async def test_failed_episodes_are_not_rewarded():
  part = Says(RewardOutput(1.0))
  context = stage(
    RewardPipeline({'judge': RewardTerm(part)}), lambda: BadEnv(fault='step raises')
  )
  (row,) = await play(context)
  assert (row.stop_reason, row.score, part.seen) == ('env_error', 0, [])


async def test_rules_are_parts_and_what_gets_them_stuck_scores_zero():
  def stuck(reply, item):
    raise GraderTimeout('no answer within 1 s')

  parts = {
    'exact': RewardTerm(GraderReward(make_grader_part('exact', {}))),
    'stuck': RewardTerm(GraderReward(stuck)),
  }
  (row,) = await play(stage(RewardPipeline(parts, env_weight=0.0), rows=1, reply='0'))
  assert (row.score, row.metrics['reward/exact']) == (1, 1)
  assert (row.metrics['reward/stuck'], row.metrics['reward/stuck/faults']) == (0, 1)
  (row,) = await play(stage(RewardPipeline(parts), reply='7'))  # no item, so no answer
  assert row.stop_reason == 'reward_failed'
  assert 'the task has no answer' in row.extras['error']
