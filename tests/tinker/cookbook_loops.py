"""Runs the basic loops of tinker-cookbook 0.6.1 against a server, and reports figures.

`python -m tests.tinker.cookbook_loops sl --model=FOLDER --data=FILE` starts a server of
the folder and runs `recipes/sl_loop.py` as it is; `rl` runs `recipes/rl_loop.py`.
Replaced are the data set and a table of the package that says how a model's
conversations are written, which does not know every model. The file has a JSON object
with 'question' and 'answer' on each line, as GSM8K has them; without one the rows are
capitals, or answers to be repeated. What is printed is measured before and after the
loop: the loss of a token in rows that the loop does not see, or the mean reward of
samples.
"""

import argparse
import itertools
import json
import os
import pathlib
import tempfile
from typing import Any

import datasets
import numpy as np
import tinker
from tinker import types
from tinker_cookbook import model_info, renderers
from tinker_cookbook.recipes import rl_loop, sl_loop
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tests.tinker import tiny

RENDERER = 'qwen3_instruct'  # <|im_start|>ROLE … <|im_end|>, as SmolLM2 has it
CAPITALS = {
  'France': 'Paris',
  'Italy': 'Rome',
  'Japan': 'Tokyo',
  'Egypt': 'Cairo',
  'Spain': 'Madrid',
  'Norway': 'Oslo',
  'Peru': 'Lima',
  'Cuba': 'Havana',
}
LIMITS = ('--max_length=512', '--step_tokens=512', '--max_tenants=4', '--max_rank=8')
LIMITS = (*LIMITS, '--max_samplers=2', '--max_num_seqs=32')
# As the loop for RL asks.
SUFFIX = ' Provide a numerical answer without units, written inside \\boxed{}.'
EXAMPLE = (
  f"How many r's are in strawberry?{SUFFIX}",
  "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b "
  "7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)


def read_rows(path: str, loop: str, size: int) -> list[dict[str, str]]:
  """Returns the first rows of a file, or rows of our own."""
  if path:
    with pathlib.Path(path).open() as file:
      return [json.loads(line) for line in itertools.islice(file, size)]
  rows = []
  for i in range(size):
    country, city = list(CAPITALS.items())[i % len(CAPITALS)]
    number = 1 + i % 9  # what the model can repeat, now and then
    question = f'The answer is \\boxed{{{number}}}. Repeat the answer.'
    answer = f'#### {number}'
    if loop == 'sl':  # a manner of answering that is quickly learned
      question = f'What is the capital of {country}?'
      answer = f'Capital of {country}, as asked: {city}!'
    rows.append({'question': question, 'answer': answer})
  return rows


def messages(row: dict[str, str]) -> list[Any]:
  """Returns a row as a conversation, as HuggingFaceH4/no_robots has them."""
  turns = ('user', row['question']), ('assistant', row['answer'])
  return [{'role': role, 'content': content} for role, content in turns]


class Measure:
  """Measures what a checkpoint can do with rows, through clients of its own."""

  def __init__(self, flags: argparse.Namespace, url: str, rows: list[dict[str, str]]):
    self.service = tinker.ServiceClient(base_url=url)
    self.model, self.rows, self.flags = flags.model, rows, flags
    self.renderer = renderers.get_renderer(RENDERER, get_tokenizer(flags.model))

  def loss(self, state: str | None) -> float:
    """Returns the mean loss of a token of the answers."""
    make = self.service.create_lora_training_client(self.model, rank=8)
    if state is not None:
      make = self.service.create_training_client_from_state(state)
    what = renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES
    data = [
      conversation_to_datum(messages(row), self.renderer, self.flags.max_length, what)
      for row in self.rows
    ]
    client = make.result()
    output = client.forward(data, 'cross_entropy').result()
    weights = [np.asarray(x.loss_fn_inputs['weights'].data) for x in data]
    logprobs = [np.asarray(x['logprobs'].data) for x in output.loss_fn_outputs]
    total = sum(float(w @ x) for w, x in zip(weights, logprobs, strict=True))
    return -total / sum(float(w.sum()) for w in weights)

  def reward(self, sampler: str | None, number: int = 8) -> float:
    """Returns the mean reward of `number` samples for each row."""
    client = self.service.create_sampling_client(
      model_path=sampler, base_model=None if sampler else self.model
    ).result()
    stop = self.renderer.get_stop_sequences()
    params = types.SamplingParams(max_tokens=self.flags.max_tokens, stop=stop, seed=1)
    example = [
      {'role': role, 'content': content}
      for role, content in zip(('user', 'assistant'), EXAMPLE, strict=True)
    ]
    futures, rewards = [], []
    for row in self.rows:
      question = {'role': 'user', 'content': row['question'] + SUFFIX}
      prompt = self.renderer.build_generation_prompt([*example, question])
      futures.append(client.sample(prompt, number, params))
    for row, future in zip(self.rows, futures, strict=True):
      for sequence in future.result().sequences:
        reply, _ = self.renderer.parse_response(sequence.tokens)
        text = renderers.get_text_content(reply)
        rewards.append(rl_loop.get_reward(text, row['answer']))
    return sum(rewards) / len(rewards)


def run_loop(
  flags: argparse.Namespace, rows: list[dict[str, str]], url: str, folder: str
) -> tuple[list[dict], dict]:
  """Runs a loop; returns the metrics of its steps, and its last checkpoint."""
  model_info.get_recommended_renderer_name = lambda name: RENDERER
  table = [row | {'messages': messages(row)} for row in rows]
  split = datasets.DatasetDict(train=datasets.Dataset.from_list(table))
  datasets.load_dataset = lambda *args, **options: split
  common: dict[str, Any] = {'base_url': url, 'log_path': folder, 'save_every': 0}
  common |= {'model_name': flags.model, 'max_steps': flags.steps, 'lora_rank': 8}
  common |= {'batch_size': flags.batch_size, 'learning_rate': flags.learning_rate}
  if flags.loop == 'sl':
    sl_loop.main(sl_loop.Config(**common, max_length=flags.max_length))
  else:
    options = {'group_size': 8, 'max_tokens': flags.max_tokens}
    rl_loop.main(rl_loop.Config(**common, **options, loss_fn=flags.loss))
  steps, saved = (
    [json.loads(line) for line in pathlib.Path(folder, name).read_text().splitlines()]
    for name in ('metrics.jsonl', 'checkpoints.jsonl')
  )
  return steps, saved[-1]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('loop', choices=('sl', 'rl'))
  parser.add_argument('--model', required=True)
  parser.add_argument('--data', default='')
  parser.add_argument('--rows', type=int, default=400, help='that the loop trains on')
  parser.add_argument('--measured', type=int, default=16, help='rows to measure with')
  parser.add_argument('--steps', type=int, default=6)
  parser.add_argument('--batch_size', type=int, default=8)
  parser.add_argument('--learning_rate', type=float, default=1e-3)
  parser.add_argument('--max_length', type=int, default=256, help='of a row, for sl')
  parser.add_argument('--max_tokens', type=int, default=20, help='of a reply, for rl')
  parser.add_argument('--loss', default='importance_sampling', help='for rl')
  parser.add_argument(
    '--server', nargs='*', default=[], help='more flags of the server'
  )
  flags = parser.parse_args()
  flags.model = str(pathlib.Path(flags.model).resolve())
  os.environ['TINKER_API_KEY'] = tiny.KEY
  rows = read_rows(flags.data, flags.loop, flags.rows + flags.measured)
  seen, measured = rows[: flags.rows], rows[flags.rows :]
  with tempfile.TemporaryDirectory() as folder:
    limits = (*LIMITS, *flags.server)
    server = tiny.ServerProcess(flags.model, f'{folder}/store', *limits, wait=300)
    try:
      measure = Measure(flags, server.url, measured)
      is_sl = flags.loop == 'sl'
      before = measure.loss(None) if is_sl else measure.reward(None)
      print(f'before: {before:.3f}', flush=True)
      steps, saved = run_loop(flags, seen, server.url, f'{folder}/log')
      path = saved['state_path' if is_sl else 'sampler_path']
      after = measure.loss(path) if is_sl else measure.reward(path)
    finally:
      server.stop()
  name = 'train_mean_nll' if is_sl else 'reward/total'
  print(name, [round(step[name], 3) for step in steps])
  print(f'before {before:.3f}, after {after:.3f}')


if __name__ == '__main__':
  main()
