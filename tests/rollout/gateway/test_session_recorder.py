"""Sessions as trees: what was said stands as the ids it was said in."""

import numpy as np
import pytest

from jaxrl.rollout.gateway.session_recorder import AgentSession
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.types import Completion
from tests.data.letters import END, letters

LEASE = EpisodeLease(0, 5, 0, 0, 0)


def user(text):
  return {'role': 'user', 'content': text}


def reply(text):
  return {'role': 'assistant', 'content': text}


def completion(text, finish='stop'):
  ids = np.array([ord(c) for c in text], np.int32)
  n = len(ids)
  logprobs = -np.arange(1, n + 1, dtype=np.float32) / 7
  return Completion(ids, logprobs, np.full(n, 3, np.int32), finish)


def text(tokens):
  return ''.join(map(chr, tokens))


def talk(session, messages, answer, name, tools=()):
  prompt = session.make_prompt(messages, tools)
  end = '' if answer.endswith('~') else END
  session.record(name, prompt, completion(answer.rstrip('~') + end), reply(answer))
  return prompt


def make():
  return AgentSession(letters(), LEASE, seed=9)


def test_a_conversation_that_goes_on_is_appended_to():
  session = make()
  first = talk(session, [user('a')], 'x', '0')
  assert text(first.tokens) == '<user:a><assistant:'
  second = talk(session, [user('a'), reply('x'), user('b')], 'y', '1')
  assert text(second.tokens) == '<user:a><assistant:x><user:b><assistant:'
  assert text(second.new_tokens) == '<user:b><assistant:'
  (row,) = session.trajectories()
  assert text(row.tokens) == '<user:a><assistant:x><user:b><assistant:y>'
  assert text(row.tokens[row.action_mask]) == 'x>y>'
  assert row.rollout_logprobs[row.action_mask].tolist() == [
    *completion('x>').logprobs,
    *completion('y>').logprobs,
  ]
  assert not row.rollout_logprobs[~row.action_mask].any()
  assert set(row.weights_version[row.action_mask]) == {3}
  assert row.messages == [user('a'), reply('x'), user('b'), reply('y')]
  assert (row.episode_id, row.episode_seed) == (5, 9)


def test_ids_stand_even_where_their_text_would_be_tokenised_otherwise():
  session = make()
  prompt = session.make_prompt([user('a')])
  session.record('0', prompt, completion('QQ>'), reply('told otherwise'))
  more = session.make_prompt([user('a'), reply('told otherwise'), user('b')])
  assert text(more.tokens) == '<user:a><assistant:QQ><user:b><assistant:'


def test_a_reply_cut_short_gets_its_end():
  session = make()
  talk(session, [user('a')], 'x~', '0')
  more = session.make_prompt([user('a'), reply('x~'), user('b')])
  assert text(more.new_tokens) == '><user:b><assistant:'


def test_a_fork_is_a_trajectory_and_every_reply_an_action_once():
  session = make()
  talk(session, [user('a')], 'x', '0')
  talk(session, [user('a'), reply('x'), user('b')], 'y', '1')
  talk(session, [user('a'), reply('x'), user('c')], 'z', '2')
  session.add_reward(1.0)
  session.add_reward(0.25, '0')
  one, two = session.trajectories(tag='t')
  assert text(one.tokens[one.action_mask]) == 'x>y>'
  assert text(two.tokens) == '<user:a><assistant:x><user:c><assistant:z>'
  assert text(two.tokens[two.action_mask]) == 'z>'
  assert (one.score, two.score) == (1.25, 1.0)
  assert one.rewards[one.tokens == ord('>')].tolist()[1] == 0.25
  assert one.trajectory_id != two.trajectory_id
  assert [len(r.tokens) for r in session.trajectories(row_format='step')] == [
    21,
    len(one.tokens),
    len(two.tokens),
  ]


@pytest.mark.parametrize(
  'messages',
  [
    [user('a'), reply('X'), user('b')],  # not what it said
    [user('A'), reply('x'), user('b')],
    [{'role': 'system', 'content': 's'}, user('a'), reply('x'), user('b')],
  ],
)
def test_a_history_that_was_rewritten_is_another_conversation(messages):
  session = make()
  talk(session, [user('a')], 'x', '0')
  prompt = session.make_prompt(messages)
  assert prompt.parent is None and prompt.new_tokens == prompt.tokens
  session.record('1', prompt, completion('y>'), reply('y'))
  assert [text(r.tokens[r.action_mask]) for r in session.trajectories()] == ['x>', 'y>']


def test_other_tools_are_another_conversation():
  session, tools = make(), [{'name': 'add'}]
  first = talk(session, [user('a')], 'x', '0', tools)
  assert text(first.tokens).startswith('<tools:add><user:a>')
  assert session.make_prompt([user('a'), reply('x'), user('b')]).parent is None
  assert (
    session.make_prompt([user('a'), reply('x'), user('b')], tools).parent is not None
  )


def test_of_replies_that_read_alike_the_latest_is_meant():
  session = make()
  prompt = session.make_prompt([user('a')])
  session.record('0', prompt, completion('P>'), reply('x'))
  session.record('1', prompt, completion('Q>'), reply('x'))
  more = session.make_prompt([user('a'), reply('x'), user('b')])
  assert text(more.tokens).startswith('<user:a><assistant:Q>')
  assert len(session.trajectories()) == 2


def test_bare_ids_go_on_from_ids():
  session = make()
  session.record('0', session.make_token_prompt([7, 8]), completion('ab'))
  session.record('1', session.make_token_prompt([7, 8, 97, 98, 9]), completion('c'))
  other = session.make_token_prompt([7, 8, 97, 99])
  assert other.parent is None
  (row,) = session.trajectories()
  assert row.tokens.tolist() == [7, 8, 97, 98, 9, 99]
  assert row.action_mask.tolist() == [False, False, True, True, False, True]


def test_errors():
  session = make()
  prompt = session.make_prompt([user('a')])
  with pytest.raises(ValueError, match='no token'):
    session.record('0', prompt, completion(''), reply(''))
  with pytest.raises(KeyError):
    session.add_reward(1.0, 'nobody')
  assert session.trajectories() == []


def test_bare_ids_go_on_from_the_longest_that_they_begin_with():
  session, ids = make(), [7]
  for i in range(4):  # each begins with the one before it
    prompt = session.make_token_prompt(ids)
    session.record(str(i), prompt, completion('ab'))
    ids = [*prompt.tokens, 97, 98, 9]
  session.record('other', session.make_token_prompt([7, 97]), completion('x' * 20))
  for count, (size, name) in enumerate([(1, None), (4, '0'), (7, '1'), (10, '2')]):
    prompt = session.make_token_prompt(ids[: 3 * count + 1])
    assert (len(prompt.tokens), prompt.parent and prompt.parent.name) == (size, name)
    assert prompt.new_tokens == ([9] if name else [7])
  assert session.make_token_prompt([*ids[:6], 5]).parent is session.replies['1']
  assert (
    session.make_token_prompt(ids[:3]).parent is None
  )  # not one token more than a reply
