"""`python -m tests.benchmarks.gpu.device_runs`: whole runs on one device, beside plans.

--only=quickstart,smollm2,qwen3 picks runs: the quickstart, GRPO with adapters in
SmolLM2-135M's shape, and GRPO of Qwen3-0.6B's shape with the JAX engine, 20 steps each.
Weights are random and tasks are generated, so that nothing is downloaded. Each run is
`launch.train` in a process of its own, ended after --limit seconds; what it had done by
then counts.

--plan lets `launch.plan` predict the memory instead of running, for --topology. It
takes about as long as a run, needs no device, and can be done on another machine: what
was found so far lies in --workdir as JSON, and each call prints the table of it.
--tiny takes toy sizes, on whatever there is: its figures mean nothing.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
from typing import Any

TASKS = "generate:arithmetic(kinds=('add', 'sub'), max_number=20)"
STEPS = 20
# Fields of config.json, as published.
SMOLLM2 = {
  'model_type': 'llama',
  'vocab_size': 49152,
  'hidden_size': 576,
  'intermediate_size': 1536,
  'num_hidden_layers': 30,
  'num_attention_heads': 9,
  'num_key_value_heads': 3,
  'head_dim': 64,
  'max_position_embeddings': 8192,
  'rope_theta': 100000.0,
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': True,
}
TINY = {
  'vocab_size': 512,
  'hidden_size': 64,
  'intermediate_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 32,
}
# Of runs: the config, its keys, and the model whose shape it has.
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
  'quickstart': ('configs/quickstart.py', {}, ''),
  'smollm2': ('configs/smollm2.py', {}, 'smollm2'),
  'qwen3': (
    'configs/qwen3_0_6b.py',
    {
      'dataset.path': TASKS,
      'rollout.engine': 'jax',
      'cluster.ray': False,
      'cluster.num_engines': 1,
      'cluster.num_workers': 1,
      'weight_sync.transport': 'auto(dtype="bfloat16")',
      'eval.interval': 0,
    },
    'Qwen3-0.6B',
  ),
}
SMALLER = {
  'quickstart': {'sft.num_steps': 5, 'batch.num_groups': 2, 'eval.num_tasks': 4},
  'smollm2': {'batch.num_groups': 2, 'eval.num_tasks': 4},
  'qwen3': {
    'model.dtype': 'float32',
    'model.remat': 'none',
    'batch.num_groups': 2,
    'batch.num_micro_batches': 2,
    'batch.max_length': 96,
    'batch.length_buckets': 96,
    'env.gsm8k.max_tokens_per_step': 16,
    'rollout.max_num_seqs': 16,
  },
}


def write_checkpoint(folder: pathlib.Path, name: str, tiny: bool) -> None:
  """Writes random weights of a shape, with a tokenizer made of a few problems."""
  import jax

  from jaxrl.data import arithmetic
  from jaxrl.data.tokenizer import train_tokenizer
  from jaxrl.models import huggingface
  from jaxrl.models.families import known_configs
  from jaxrl.models.transformer_lm import TransformerLM

  fields = SMOLLM2 if name == 'smollm2' else known_configs.find_known_config(name)
  assert fields is not None
  config = huggingface.config_from_hf(fields | (TINY if tiny else {}))
  rows = arithmetic.arithmetic_rows(kinds=('add', 'sub'), max_number=20, size=200)
  texts = [str(value) for row in rows for value in row.values()]
  params = TransformerLM(config).init(jax.random.key(0))
  tokenizer = train_tokenizer(texts, 512)
  huggingface.save(folder, config, params, tokenizer, dtype='bfloat16')


def command(name: str, flags: argparse.Namespace, module: str) -> list[str]:
  """The command line of a run, or of its plan."""
  config, keys, shape = RUNS[name]
  keys = {**keys, 'num_steps': 3 if flags.tiny else STEPS}
  keys |= SMALLER[name] if flags.tiny else {}
  if shape:
    keys['model.checkpoint'] = flags.workdir / f'{name}-checkpoint'
  line = [sys.executable, '-m', f'launch.{module}', f'--config={config}']
  return line + [f'--config.{key}={value}' for key, value in keys.items()]


def call(line: list[str], log: pathlib.Path, limit: float) -> str:
  """Runs a command with its output in a file; returns what went wrong, or ''."""
  with log.open('w') as output:
    child = subprocess.Popen(
      line, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
      status = child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
      os.killpg(child.pid, signal.SIGKILL)
      child.wait()
      return f'took more than {limit:.0f} s; see {log}'
  return '' if status == 0 else f'exit status {status}; see {log}'


def run(name: str, flags: argparse.Namespace) -> dict[str, Any]:
  """Makes a run; returns its figures."""
  workdir = flags.workdir / name
  line = [*command(name, flags, 'train'), f'--workdir={workdir}']
  problem = call(line, flags.workdir / f'{name}.log', flags.limit)
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().split('\n')[:-1] if path.exists() else []
  figures = summary([json.loads(line) for line in lines])
  return figures | ({'stopped': problem} if problem else {})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Figures of a run from the lines of its metrics.jsonl."""
  rows = [row for row in rows if row['phase'] == 'train']
  steps = [row for row in rows if 'time/step' in row]
  figures: dict[str, Any] = {'steps': len(steps)}
  later = steps[1:] or steps
  for key in ('time/step', 'time/rollout', 'time/learn', 'time/publish'):
    times = [row[key] for row in later if key in row]
    if times:
      figures[key] = statistics.median(times)
  for key in ('time/warmup', 'reward/mean', 'mismatch/logprob_difference'):
    found = [row[key] for row in rows if key in row]
    if found:
      figures[key] = found[0] if key == 'time/warmup' else found[-1]
  for key in ('memory/device_peak_gb', 'memory/process_gb'):
    if found := [row[key] for row in rows if key in row]:
      figures[key] = max(found)
  return figures


def plan(name: str, flags: argparse.Namespace) -> dict[str, Any]:
  """Plans a run; returns the memory that the plan predicts, in GB."""
  path = flags.workdir / f'{name}-plan.json'
  path.unlink(missing_ok=True)
  line = command(name, flags, 'plan')
  line += [f'--topology={flags.topology}', f'--json={path.absolute()}']
  problem = call(line, flags.workdir / f'{name}-plan.log', flags.limit)
  if not path.exists():
    return {'planned': {'stopped': problem}}
  memory, cut = json.loads(path.read_text())['memory'], ('total', 'limit', 'phase')
  parts = {key: value / 1e9 for key, value in memory.items() if key not in cut}
  return {
    'planned': {
      'topology': flags.topology,
      'gb': memory['total'] / 1e9,
      'phase': memory['phase'],
      'parts': parts,
    }
  }


def table(results: dict[str, dict[str, Any]]) -> list[str]:
  """Lines that show what was found, a run after the other."""
  lines = []
  for name, figures in results.items():
    lines.append(name)
    for key, value in figures.items():
      if key not in ('planned', 'stopped'):
        lines.append(f'  {key:<30} {value:.4g}')
    planned = figures.get('planned', {})
    if 'gb' in planned:
      about = f'{planned["topology"]}, {planned["phase"]}'
      lines.append(f'  {"planned, GB":<30} {planned["gb"]:.4g} ({about})')
      if 'memory/device_peak_gb' in figures:
        ratio = figures['memory/device_peak_gb'] / planned['gb']
        lines.append(f'  {"peak / planned":<30} {ratio:.2f}')
    for where in (figures, planned):
      if 'stopped' in where:
        lines.append(f'  stopped: {where["stopped"]}')
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(prog='device_runs', description=__doc__)
  parser.add_argument('--only', default=','.join(RUNS))
  parser.add_argument(
    '--workdir', type=pathlib.Path, default=pathlib.Path('runs/device')
  )
  parser.add_argument('--limit', type=float, default=460.0, help='seconds a run')
  parser.add_argument('--topology', default='h200:1')
  parser.add_argument('--plan', action='store_true')
  parser.add_argument('--tiny', action='store_true')
  parser.add_argument('--write', help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.write:
    write_checkpoint(flags.workdir, flags.write, flags.tiny)
    return
  names = flags.only.split(',')
  if unknown := [name for name in names if name not in RUNS]:
    parser.error(f'no run {", ".join(unknown)}; there are {", ".join(RUNS)}')
  flags.workdir = flags.workdir.absolute()
  flags.workdir.mkdir(parents=True, exist_ok=True)
  path = flags.workdir / 'results.json'
  results = json.loads(path.read_text()) if path.exists() else {}
  for name in names:
    folder = flags.workdir / f'{name}-checkpoint'
    if (shape := RUNS[name][2]) and not folder.exists():
      # In a process of its own, which gives the device's memory back.
      line = [
        sys.executable,
        '-m',
        'tests.benchmarks.gpu.device_runs',
        '--write',
        shape,
      ]
      line += [f'--workdir={folder}', *(['--tiny'] if flags.tiny else [])]
      subprocess.run(line, check=True)
    found = (plan if flags.plan else run)(name, flags)
    results[name] = {**results.get(name, {}), **found}
    path.write_text(json.dumps(results, indent=2))
  print('\n'.join(table(results)))
  if not flags.plan and not all(results[name].get('steps') for name in names):
    sys.exit(1)


if __name__ == '__main__':
  main()
