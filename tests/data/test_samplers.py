"""Samplers: whole groups in order; files in seeded epochs that resume."""

import numpy as np
import pytest

from jaxrl.data.chat import Chat
from jaxrl.data.samplers import FifoSampler, FileSampler
from jaxrl.data.sources import DataError
from jaxrl.data.tokenizer import train_tokenizer

ROWS = [{'question': f'{i}+1?', 'solution': f'#### {i + 1}'} for i in range(10)]


@pytest.fixture(scope='module')
def chat():
  return Chat(train_tokenizer(['user assistant 1+1? #### 2'], 300))


def asked(groups):
  return [row.messages[0]['content'] for group in groups for row in group]


async def test_fifo_asks_the_queue_for_the_step():
  class Queue:
    def get_batch(self, size, step):
      return [size, step]

  assert await FifoSampler(Queue(), 4).next(7) == [4, 7]


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
  epochs = [asked(await sampler.next(0)) + asked(await sampler.next(1)) for _ in 'ab']
  for epoch in epochs:
    assert sorted(epoch) == sorted(row['question'] for row in ROWS)
  assert epochs[0] != epochs[1]
  again, other = (FileSampler(chat, ROWS, batch_size=10, seed=s) for s in (0, 1))
  assert asked(await again.next(0)) == epochs[0]
  assert asked(await other.next(0)) != epochs[0]


async def test_a_batch_may_span_epochs(chat):
  sampler = FileSampler(chat, ROWS[:3], batch_size=7)
  questions = asked(await sampler.next(0))
  assert len(questions) == 7
  assert len(set(questions[:3])) == len(set(questions[3:6])) == 3


async def test_it_resumes_where_it_was(chat):
  sampler = FileSampler(chat, ROWS, batch_size=4)
  await sampler.next(0)
  resumed = FileSampler(chat, ROWS, batch_size=4)
  resumed.load_state_dict(sampler.state_dict())
  for step in range(1, 5):
    assert asked(await sampler.next(step)) == asked(await resumed.next(step))
  with pytest.raises(DataError, match='9 conversations'):
    FileSampler(chat, ROWS[:9]).load_state_dict(sampler.state_dict())


async def test_messages_and_system(chat):
  messages = [
    {'role': 'user', 'content': 'a'},
    {'role': 'assistant', 'content': 'b'},
    {'role': 'user', 'content': 'c'},
    {'role': 'assistant', 'content': 'd'},
  ]
  sampler = FileSampler(chat, [{'messages': messages}], batch_size=1, system='be kind')
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
  with pytest.raises(DataError, match='no conversation fits in 100 tokens'):
    FileSampler(chat, long, max_length=100)


def test_rows_with_nothing_to_learn_are_errors(chat):
  with pytest.raises(DataError, match="neither messages nor 'question'"):
    FileSampler(chat, [{'prompt': 'x'}])
  with pytest.raises(DataError, match='no assistant message'):
    FileSampler(chat, [{'messages': [{'role': 'user', 'content': 'x'}]}])


def test_generated_problems_fit_a_small_model():
  from jaxrl.data.problems import arithmetic

  rows = arithmetic(size=400)
  texts = [f'user\n{r["question"]}\nassistant\n{r["solution"]}' for r in rows]
  chat = Chat(train_tokenizer(texts, 512))
  prompts = [
    chat.first_prompt([{'role': 'user', 'content': r['question']}]) for r in rows
  ]
  replies = [chat.encode(r['solution']) for r in rows]
  assert np.max([len(p) for p in prompts]) <= 40
  assert np.max([len(r) for r in replies]) <= 24
