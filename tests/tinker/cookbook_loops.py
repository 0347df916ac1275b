"""Runs the basic loops of tinker-cookbook 0.6.1 against a server, and reports figures.

`python -m tests.tinker.cookbook_loops sl --model=FOLDER` starts a server of the folder
and runs `recipes/sl_loop.py` as it is; `rl` runs `recipes/rl_loop.py`. Replaced are the
data set, by rows of this file, and a table of the package that says how a model's
conversations are written, which does not know every model.
"""

import argparse
import json
import os
import pathlib
import tempfile

import datasets

from tests.tinker import tiny

RENDERER = 'qwen3_instruct'  # <|im_start|>ROLE … <|im_end|>, as SmolLM2 has it
# A manner of answering that is quickly learned.
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
LIMITS = ('--max_length=512', '--step_tokens=512', '--max_tenants=1', '--max_rank=8')
LIMITS = (*LIMITS, '--max_samplers=1', '--max_num_seqs=16')


def conversations(number: int) -> datasets.DatasetDict:
  """Rows as HuggingFaceH4/no_robots has them."""
  rows = []
  for i in range(number):
    country, city = list(CAPITALS.items())[i % len(CAPITALS)]
    question = f'What is the capital of {country}?'
    answer = f'Capital of {country}, as asked: {city}!'
    messages = [('user', question), ('assistant', answer)]
    rows.append({'messages': [{'role': r, 'content': c} for r, c in messages]})
  return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))


def sums(number: int) -> datasets.DatasetDict:
  """Rows as openai/gsm8k has them, with sums of one digit."""
  rows = []
  for i in range(number):
    x, y = 1 + i % 4, 1 + (i // 4) % 4
    rows.append({'question': f'What is {x} + {y}?', 'answer': f'#### {x + y}'})
  return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))


def run(loop: str, model: str, url: str, folder: str, steps: int) -> list[dict]:
  """Runs a loop; returns its metrics, a dict for each step."""
  from tinker_cookbook import model_info

  model_info.get_recommended_renderer_name = lambda name: RENDERER
  size = 8 if loop == 'sl' else 2
  make = conversations if loop == 'sl' else sums
  datasets.load_dataset = lambda *args, **options: make(size * 100)
  common = {'base_url': url, 'log_path': folder, 'model_name': model, 'lora_rank': 8}
  common |= {'batch_size': size, 'max_steps': steps, 'save_every': 0}
  if loop == 'sl':
    from tinker_cookbook.recipes import sl_loop

    sl_loop.main(sl_loop.Config(**common, learning_rate=2e-3, max_length=128))
  else:
    from tinker_cookbook.recipes import rl_loop

    options = {'group_size': 8, 'max_tokens': 24, 'learning_rate': 1e-3}
    options['loss_fn'] = 'importance_sampling'
    rl_loop.main(rl_loop.Config(**common, **options))
  lines = pathlib.Path(folder, 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('loop', choices=('sl', 'rl'))
  parser.add_argument('--model', required=True)
  parser.add_argument('--steps', type=int, default=6)
  flags = parser.parse_args()
  model = str(pathlib.Path(flags.model).resolve())
  os.environ['TINKER_API_KEY'] = tiny.KEY
  with tempfile.TemporaryDirectory() as folder:
    server = tiny.ServerProcess(model, f'{folder}/store', *LIMITS, wait=300)
    try:
      metrics = run(flags.loop, model, server.url, f'{folder}/log', flags.steps)
    finally:
      server.stop()
  name = 'train_mean_nll' if flags.loop == 'sl' else 'reward/total'
  print(name, [round(step[name], 3) for step in metrics])


if __name__ == '__main__':
  main()
