"""Published models are trained, and `transformers` gets answers from what is exported.

docs/recipes/real_model.md shows a whole run of GRPO.
"""

import json
import os
import subprocess
import sys

import pytest

from jaxrl.data.arithmetic import arithmetic_rows
from tests import real
from tests.launch import runs
from tests.marks import TORCH

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.real, TORCH]
NUM_ASKED = 6


def train(*options):
  """Runs `launch.train` as users do; what it printed."""
  done = subprocess.run(
    [sys.executable, '-m', 'launch.train', *options],
    cwd=runs.ROOT,
    env={**os.environ, 'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def last_tokens(folder, questions):
  """The last token of the folder's reply to each question, of at most 24 tokens."""
  import torch
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  tokens = []
  for question in questions:
    chat = [{'role': 'user', 'content': question}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    ids = torch.tensor([rendered['input_ids']])
    # With the folder's own generation_config.json, which says what ends a reply.
    output = model.generate(ids, do_sample=False, max_new_tokens=24)
    tokens.append(tokenizer.convert_ids_to_tokens(int(output[0, -1])))
  return tokens


def test_a_base_model_learns_the_template_and_its_end_of_turn(tmp_path):
  folder = real.find(f'checkpoints/{real.GEMMA3}')
  chats = tmp_path / 'chats.jsonl'
  rows = [
    {'prompt': row['question'], 'response': f'The answer is {row["answer"]}.'}
    for row in arithmetic_rows('train', size=96, kinds=('add', 'sub'))
  ]
  chats.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  questions = [row['question'] for row in arithmetic_rows('test', size=NUM_ASKED)]
  assert '<end_of_turn>' not in last_tokens(folder, questions)
  printed = train(
    '--config=configs/sft.py',
    f'--config.model.checkpoint={folder}',
    f'--config.dataset.path={chats}',
    *('--config.batch.num_groups=8', '--config.batch.max_length=48'),
    *('--config.num_epochs=1', '--config.optimizer.learning_rate=3e-5'),
    *('--config.optimizer.warmup_steps=2', f'--workdir={tmp_path / "run"}'),
  )
  assert 'replies       end at <eos> (1), <end_of_turn> (106)' in printed
  exported = tmp_path / 'run' / 'export'
  assert last_tokens(exported, questions) == ['<end_of_turn>'] * NUM_ASKED


def test_the_config_of_the_readme_trains_and_its_export_answers(tmp_path):
  folder = real.find(f'checkpoints/{real.SMOLLM2}')
  printed = train(
    '--config=configs/smollm2.py',
    f'--config.model.checkpoint={folder}',
    *('--config.num_steps=1', '--config.batch.num_groups=2'),
    *('--config.eval.interval=0', f'--workdir={tmp_path / "run"}'),
  )
  assert 'Finished.' in printed
  questions = ['Which city is the capital of France? Answer in one word.', 'Say hello.']
  tokens = last_tokens(tmp_path / 'run' / 'export', questions)
  assert '<|im_end|>' in tokens
