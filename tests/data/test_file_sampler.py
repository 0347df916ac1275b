"""Files of conversations as expert rows, in seeded epochs that resume."""

import dataclasses

import numpy as np
import pytest

from jaxrl.data.chat_tokenizer import ChatTokenizer
from jaxrl.data.file_sampler import FileSampler
from jaxrl.data.row_sources import DataError
from jaxrl.data.tokenizer import train_tokenizer
from jaxrl.options import ConfigError
from tests.data.letters import letters
from tests.rollout import fakes

ROWS = [{'question': f'{i}+1?', 'solution': f'#### {i + 1}'} for i in range(10)]

USER = {'role': 'user', 'content': 'Hi'}
REPLY = {'role': 'assistant', 'content': 'Ho'}


@pytest.fixture(scope='module')
def chat():
  return ChatTokenizer(train_tokenizer(['user assistant 1+1? #### 2'], 300))


def prompts_of(groups):
  return [row.messages[0]['content'] for group in groups for row in group]


async def test_rows_become_expert_trajectories(chat):
  sampler = FileSampler(chat, ROWS, batch_size=10)
  groups = await sampler.next(0)
  assert [len(group) for group in groups] == [1] * 10
  for (row,) in groups:
    written = chat.tokenizer.decode(row.tokens[row.action_mask])
    assert written == row.messages[1]['content'] + '<|im_end|>'
    assert row.is_expert
    assert not row.rollout_logprobs.any()


async def test_epochs_are_shuffled_by_seed_and_complete(chat):
  sampler = FileSampler(chat, ROWS, batch_size=5)
  epochs = [
    prompts_of(await sampler.next(0)) + prompts_of(await sampler.next(1)) for _ in 'ab'
  ]
  for epoch in epochs:
    assert sorted(epoch) == sorted(row['question'] for row in ROWS)
  assert epochs[0] != epochs[1]
  again, other = (FileSampler(chat, ROWS, batch_size=10, seed=s) for s in (0, 1))
  assert prompts_of(await again.next(0)) == epochs[0]
  assert prompts_of(await other.next(0)) != epochs[0]


async def test_a_batch_may_span_epochs(chat):
  sampler = FileSampler(chat, ROWS[:3], batch_size=7)
  questions = prompts_of(await sampler.next(0))
  assert len(questions) == 7
  assert len(set(questions[:3])) == len(set(questions[3:6])) == 3


async def test_it_resumes_where_it_was(chat):
  sampler = FileSampler(chat, ROWS, batch_size=4)
  await sampler.next(0)
  resumed = FileSampler(chat, ROWS, batch_size=4)
  resumed.load_state_dict(sampler.state_dict())
  for step in range(1, 5):
    assert prompts_of(await sampler.next(step)) == prompts_of(await resumed.next(step))
  with pytest.raises(DataError, match='9 conversations'):
    FileSampler(chat, ROWS[:9]).load_state_dict(sampler.state_dict())


async def test_messages_and_system(chat):
  messages = [
    {'role': 'user', 'content': 'a'},
    {'role': 'assistant', 'content': 'b'},
    {'role': 'user', 'content': 'c'},
    {'role': 'assistant', 'content': 'd'},
  ]
  sampler = FileSampler(
    chat, [{'messages': messages}], batch_size=1, system_prompt='be kind'
  )
  ((row,),) = await sampler.next(0)
  assert row.messages[0] == {'role': 'system', 'content': 'be kind'}
  assert chat.tokenizer.decode(row.tokens[row.action_mask]) == (
    'b<|im_end|>d<|im_end|>'
  )


async def test_rows_that_are_too_long_are_left_out_and_counted(chat):
  long = [{'question': 'x' * 400, 'solution': '1'}]
  sampler = FileSampler(chat, ROWS + long, batch_size=11, max_length=100)
  assert sampler.skipped == 1
  groups = await sampler.next(0)
  assert max(len(row.tokens) for group in groups for row in group) <= 100
  with pytest.raises(DataError, match='no row fits in 100 tokens'):
    FileSampler(chat, long, max_length=100)


def test_rows_with_nothing_to_learn_are_errors(chat, tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "x"}\n')
  with pytest.raises(DataError, match=r'rows\.jsonl, row 1: .* Its keys are prompt'):
    FileSampler(chat, path=str(file))
  assert FileSampler(chat, path=str(file), limit=1).size == 1
  for bad in ([USER], [USER, REPLY | {'train': False}]):
    with pytest.raises(DataError, match=r'rows, row 0: .*no assistant message'):
      FileSampler(chat, [{'messages': bad}])
  with pytest.raises(DataError, match='row 0: two assistant messages follow'):
    FileSampler(chat, [{'messages': [USER, REPLY, REPLY]}])
  with pytest.raises(DataError, match='row 0: the conversation begins with an'):
    FileSampler(chat, [{'messages': [REPLY, USER, REPLY]}])
  with pytest.raises(DataError, match=r'set dataset\.columns\.response=KEY'):
    FileSampler(chat, [{'question': 'x', 'answer': 'y'}])
  with pytest.raises(DataError, match='row 1: the text is empty'):
    FileSampler(chat, [{'text': 'x'}, {'text': ''}], data_format='text')
  with pytest.raises(ConfigError, match="data_format: no data format 'mesages'"):
    FileSampler(chat, ROWS, data_format='mesages')


def marked(row):
  """What a row of letters says, with what is learned in brackets."""
  shown, learned = '', False
  for token, action in zip(row.tokens, row.action_mask, strict=True):
    shown += ('[' if action else ']') * bool(action != learned) + chr(token)
    learned = bool(action)
  return shown + ']' * learned


async def rows_of(rows, **options):
  sampler = FileSampler(letters(), rows, batch_size=99, **options)
  batches = [await sampler.next(step) for step in range(3)]
  assert {len(groups) for groups in batches} == {99}
  unique = {id(row): (i, row) for g in batches[0] for i, row in enumerate(g)}
  return sorted(unique.values(), key=lambda pair: (pair[1].env_group, pair[0]))


async def test_every_reply_of_a_conversation_is_learned_and_nothing_else():
  """By hand: `<role:text>` is a message, `>` its end."""
  system, tool = ({'role': r, 'content': r[0]} for r in ('system', 'tool'))
  messages = [system, USER, REPLY, tool, REPLY, USER, REPLY | {'train': False}]
  ((_, row),) = await rows_of([{'messages': messages}])
  assert marked(row) == (
    '<system:s><user:Hi><assistant:[Ho>]<tool:t><assistant:[Ho>]<user:Hi><assistant:Ho>'
  )
  assert not row.action_mask[0]
  ((_, row),) = await rows_of([{'messages': [*messages[:3], USER]}])
  assert marked(row) == '<system:s><user:Hi><assistant:[Ho>]'


async def test_tools_are_announced_and_their_calls_learned():
  call = {'role': 'assistant', 'content': None, 'tool_calls': [{'name': 'add'}]}
  row = {'messages': [USER, call], 'tools': [{'name': 'add'}]}
  ((_, row),) = await rows_of([row])
  assert marked(row) == '<tools:add><user:Hi><assistant:[call add>]'


async def test_a_pair_is_a_group_of_two_the_chosen_first():
  rows = [{'prompt': 'Hi', 'chosen': 'Yes', 'rejected': 'No'}]
  (_, chosen), (_, rejected) = await rows_of(rows, data_format='preference')
  assert marked(chosen) == '<user:Hi><assistant:[Yes>]'
  assert marked(rejected) == '<user:Hi><assistant:[No>]'
  assert (chosen.sample_index, rejected.sample_index) == (0, 1)
  assert chosen.rewards.tolist() == [*[0] * (len(chosen.tokens) - 1), 1]
  assert not rejected.rewards.any()


async def test_a_pair_is_left_out_if_either_answer_is_too_long():
  rows = [
    {'prompt': 'Hi', 'chosen': 'Yes', 'rejected': long} for long in ('No', 'N' * 9)
  ]
  sampler = FileSampler(letters(), rows, data_format='preference', max_length=25)
  assert (sampler.size, sampler.skipped, sampler.num_rows) == (1, 1, 128)


@pytest.mark.parametrize('length', range(1, 15))
async def test_of_a_text_every_token_but_the_first_is_learned_once(length):
  text = 'abcdefghijklmn'[:length]
  text_rows = [
    row for _, row in await rows_of([{'text': text}], data_format='text', max_length=5)
  ]
  assert sum(len(row.tokens) - 1 for row in text_rows) == length
  assert max(len(row.tokens) for row in text_rows) <= 5
  learned = [chr(t) for row in text_rows for t in row.tokens[row.action_mask]]
  assert ''.join(sorted(learned)) == ''.join(sorted([*text[1:], '>']))
  for row in text_rows:
    assert not row.action_mask[0] and row.action_mask[1:].all()
    assert ''.join(map(chr, row.tokens)) in text + '>'


async def test_rated_rows_of_one_prompt_are_a_group():
  rows = [
    {'prompt': prompt, 'response': str(i), 'reward': i / 2}
    for i, prompt in enumerate(['a', 'b', 'a', 'a'])
  ]
  sampler = FileSampler(letters(), rows, rated=True, batch_size=2)
  groups = sorted(await sampler.next(0), key=len)
  assert [[row.score for row in group] for group in groups] == [[0.5], [0, 1, 1.5]]
  assert [row.sample_index for row in groups[1]] == [0, 1, 2]
  assert groups[1][2].rewards.nonzero()[0].tolist() == [len(groups[1][2].tokens) - 1]
  assert (sampler.size, sampler.num_rows) == (2, 4)
  with pytest.raises(DataError, match=r"row 0: .*reward: 'reward'"):
    FileSampler(letters(), [{'prompt': 'a', 'response': 'b'}], rated=True)


@pytest.mark.parametrize('size, batch', [(10, 4), (10, 10), (3, 7), (7, 3), (1, 5)])
async def test_an_epoch_has_every_row_once(size, batch):
  rows = [{'text': chr(97 + i)} for i in range(size)]
  sampler = FileSampler(letters(), rows, data_format='text', batch_size=batch, seed=3)
  steps = sampler.num_steps(2)
  assert steps == -(-2 * size // batch)
  taken = [row.env_group for s in range(steps) for (row,) in await sampler.next(s)]
  assert sorted(taken[:size]) == sorted(taken[size : 2 * size]) == list(range(size))
  assert len(taken) < 2 * size + batch
  assert sampler.num_steps(0.5) == -(-size // (2 * batch))


async def test_no_batch_has_more_rows_than_announced():
  rows = [
    {'prompt': prompt, 'response': 'x', 'reward': 1}
    for prompt in ['a'] * 5 + ['b'] * 2 + ['c']
  ]
  for batch in (1, 2, 4, 7):
    sampler = FileSampler(letters(), rows, rated=True, batch_size=batch)
    counts = [
      sum(len(group) for group in await sampler.next(step)) for step in range(400)
    ]
    assert max(counts) == sampler.num_rows


async def test_conversations_are_what_a_rollout_would_have_written():
  """The engine says what the file says; tokens, mask and reward are the same."""
  chat = ChatTokenizer(train_tokenizer(['user assistant seed 7 Ho\n'], 300))
  reply = fakes.completion([*chat.encode('Ho'), chat.end_id])
  engine = fakes.FakeEngine(lambda prompt, sampling: reply)
  world = fakes.world(lambda: fakes.EchoEnv(turns=3), engine)
  (played,) = await fakes.play(dataclasses.replace(world, chat=chat))
  sampler = FileSampler(chat, [{'messages': played.messages}], batch_size=1)
  ((written,),) = await sampler.next(0)
  np.testing.assert_array_equal(written.tokens, played.tokens)
  np.testing.assert_array_equal(written.action_mask, played.action_mask)


def test_generated_problems_fit_a_small_model():
  from jaxrl.data.arithmetic import arithmetic_rows

  rows = arithmetic_rows(size=400)
  texts = [f'user\n{r["question"]}\nassistant\n{r["solution"]}' for r in rows]
  chat = ChatTokenizer(train_tokenizer(texts, 512))
  prompts = [
    chat.encode_prompt([{'role': 'user', 'content': r['question']}]) for r in rows
  ]
  replies = [chat.encode(r['solution']) for r in rows]
  assert np.max([len(p) for p in prompts]) <= 40
  assert np.max([len(r) for r in replies]) <= 24
