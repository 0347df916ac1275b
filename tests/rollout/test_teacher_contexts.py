"""Contexts of a self-teacher: what it is shown, in which tokens, and what has none."""

import numpy as np
import pytest

from jaxrl.options import ConfigError
from jaxrl.rollout.queue import teacher_contexts
from jaxrl.rollout.queue.teacher_contexts import TeacherPrompts
from jaxrl.types import TASK_KEY, TEACHER_PROMPT_KEY, SelfTeacher, Trajectory
from tests.calls import make_reward_shaper
from tests.data import letters

CHAT = letters.letters()
QUESTION = 'what is 1+1?'
SYSTEM = {'role': 'system', 'content': 'be short'}


def row(sample, reply, score, *, messages=None, **fields):
  before = [SYSTEM, {'role': 'user', 'content': QUESTION}]
  prompt = CHAT.encode_prompt(before)
  written = CHAT.encode(reply)
  size = len(prompt) + len(written)
  mask = np.arange(size) >= len(prompt)
  return Trajectory(
    tokens=np.array([*prompt, *written], np.int32),
    action_mask=mask,
    rollout_logprobs=np.zeros(size, np.float32),
    rewards=np.float32(score) * (np.arange(size) == size - 1),
    weights_version=np.where(mask, 0, -1).astype(np.int32),
    sample_index=sample,
    messages=messages or [*before, {'role': 'assistant', 'content': reply}],
    **fields,
  )


def prompts(context, shaper=None):
  return TeacherPrompts(SelfTeacher(context), letters.letters, shaper)


def questions(context, group):
  """What each row's teacher is asked, in the conversation that the student saw."""
  asked = []
  for each in prompts(context)(group):
    ids = each.extras.get(TEACHER_PROMPT_KEY)
    asked.append(None if ids is None else CHAT.decode_all(ids))
  return asked


def test_a_solution_and_a_demonstration_come_from_the_data_set():
  group = [
    row(0, '2', 1, extras={TASK_KEY: {'worked': 'one and one'}}),
    row(1, '3', 0),
  ]
  for context in ('solution', 'demonstration'):
    one, other = questions(f"{context}(key='worked')", group)
    assert 'be short' in one and one.index(QUESTION) < one.index('one and one')
    assert other is None
    group[0].extras.pop(TEACHER_PROMPT_KEY)
  # A demonstration stands there without a word more.
  assert one == CHAT.decode_all(
    CHAT.encode_prompt(
      [SYSTEM, {'role': 'user', 'content': f'{QUESTION}\n\none and one'}]
    )
  )
  assert teacher_contexts.task_keys('solution') == ('solution',)
  assert teacher_contexts.task_keys('sibling') == ()


def test_the_reply_and_its_tokens_stay_as_they_are():
  group = [row(0, 'two', 1, extras={TASK_KEY: {'solution': '2'}})]
  before = group[0].tokens.copy()
  (after,) = prompts('solution')(group)
  np.testing.assert_array_equal(after.tokens, before)
  assert after.extras[TEACHER_PROMPT_KEY].dtype == np.int32


def test_a_sibling_is_another_sample_that_succeeded():
  """The first of them; a lone success has none, unless it may be shown its own."""
  group = [row(0, 'five', 0), row(1, 'two', 1), row(2, 'three', 0.5)]
  asked = questions('sibling', group)
  assert 'two' in asked[0] and asked[1] is None and 'two' in asked[2]
  asked = questions('sibling(use_self=True)', [row(0, 'two', 1), row(1, 'six', 0)])
  assert 'two' in asked[0] and 'two' in asked[1]
  asked = questions('sibling(min_reward=0.5)', [row(0, 'three', 0.5), row(1, 'two', 1)])
  assert 'two' in asked[0] and 'three' in asked[1]
  greedy = [row(0, 'two', 1, is_greedy=True), row(1, 'six', 0)]
  assert questions('sibling', greedy) == [None, None]


def test_feedback_is_shown_where_no_sample_succeeded():
  said = {'columns': {'feedback': 'too large'}}
  failed = [row(0, 'five', 0, **said), row(1, 'nine', 0)]
  asked = questions("sibling(feedback='feedback')", failed)
  assert 'too large' in asked[0] and asked[1] is None
  mixed = [row(0, 'five', 0, **said), row(1, 'two', 1)]
  asked = questions("sibling(feedback='feedback')", mixed)
  assert 'two' in asked[0] and 'too large' not in asked[0]
  asked = questions('feedback', [row(0, 'five', 0, **said), row(1, 'two', 1)])
  assert 'too large' in asked[0] and asked[1] is None
  assert questions('sibling', [row(0, 'five', 0, **said)]) == [None]


def test_the_environments_own_rewards_count():
  """Shapers come afterwards: here one that makes all samples fail."""
  shaper = make_reward_shaper('reward(multiply=0)')
  group = prompts('sibling', shaper)([row(0, 'five', 0), row(1, 'two', 1)])
  assert [each.score for each in group] == [0, 0]
  assert [TEACHER_PROMPT_KEY in each.extras for each in group] == [True, False]


def test_rows_of_another_form_are_refused_by_name():
  turn = {'role': 'assistant', 'content': 'a'}
  ask = {'role': 'user', 'content': QUESTION}
  for messages, told in (
    ([ask, turn, ask, turn], 'has 2 replies in 4 messages'),
    ([{'role': 'tool', 'content': 'b'}, turn], 'not a text of the user'),
    ([{**ask, 'content': 'another'}, turn], 'do not give the tokens of its prompt'),
  ):
    with pytest.raises(ValueError, match=rf'row _0_0_0_0_0.*{told}'):
      prompts('sibling')([row(0, 'two', 1, messages=messages)])


def test_unknown_contexts_and_options_are_told():
  with pytest.raises(ConfigError, match="Did you mean 'sibling'"):
    teacher_contexts.task_keys('siblings')
  with pytest.raises(ConfigError, match='min_rewards'):
    teacher_contexts.TEACHER_CONTEXTS.build(
      SelfTeacher('sibling(min_rewards=1)').context
    )
