"""Compares the memory that `launch.plan` predicts with a learner's, on the CPU.

    python -m tests.benchmarks.memory [CASE …]
    python -m tests.benchmarks.memory published
    python -m tests.benchmarks.memory --soak[=MINUTES]

Each case runs in a process of its own: its programs are compiled first, for shapes
alone; then the learner is made and updates twice. Measured is how far the resident set
has risen, from before there was any array, at its highest during the second update.

A soak trains configs/debug.py for some minutes, 15 by default, with a checkpoint at
each step and then without any. After its first minute of training, the
resident set of a run may grow by at most 10 MiB. It rises and falls by some MiB as
Python collects its garbage and checkpoints are written, so that medians are compared:
of the second minute, and of the last three.
"""

import asyncio
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

# name → (layers, width, inner width, vocabulary, groups, tokens a row, micro-batches,
# remat, packing): each of 'TABLE' has more than 1 GB of parameters and moments.
CASES = {
  'wide': (6, 1024, 4096, 8192, 2, 64, 1, 'none', ''),
  'deep': (24, 512, 2048, 4096, 2, 128, 2, 'full', ''),
  'long rows': (10, 768, 3072, 16384, 1, 512, 2, 'full', ''),
  'small': (2, 256, 1024, 2048, 4, 256, 1, 'none', ''),
  'abreast': (
    6,
    1024,
    4096,
    8192,
    2,
    64,
    1,
    'none',
    'first_fit(tokens=256,num_parallel=2)',
  ),
}
# Published shapes, with random weights: name → (fields of config.json, options).
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
  'SmolLM2-135M': (
    {
      'model_type': 'llama',
      'vocab_size': 49152,
      'hidden_size': 576,
      'intermediate_size': 1536,
      'num_hidden_layers': 30,
      'num_attention_heads': 9,
      'num_key_value_heads': 3,
      'head_dim': 64,
      'rope_theta': 100000.0,
      'rms_norm_eps': 1e-5,
      'tie_word_embeddings': True,
    },
    {'batch.num_groups': 4, 'batch.max_length': 384, 'batch.num_micro_batches': 4},
  ),
  'Gemma 3 270M': (
    {
      'model_type': 'gemma3_text',
      'vocab_size': 262144,
      'hidden_size': 640,
      'intermediate_size': 2048,
      'num_hidden_layers': 18,
      'num_attention_heads': 4,
      'num_key_value_heads': 1,
      'head_dim': 256,
      'sliding_window': 512,
      'layer_types': (['sliding_attention'] * 5 + ['full_attention']) * 3,
      'query_pre_attn_scalar': 256,
      'rope_theta': 1e6,
      'rope_local_base_freq': 1e4,
      'rms_norm_eps': 1e-6,
      'hidden_activation': 'gelu_pytorch_tanh',
      'tie_word_embeddings': True,
    },
    {'batch.num_groups': 2, 'batch.max_length': 128, 'batch.num_micro_batches': 2},
  ),
  'Qwen3-0.6B': (
    {},  # known by its name
    {
      'batch.num_groups': 2,
      'batch.max_length': 128,
      'batch.num_micro_batches': 2,
      'model.lora': 'lora(rank=16)',
    },
  ),
}
TABLE = ('wide', 'deep', 'long rows', 'abreast')


def measure(name: str, xla_flags: str = '') -> dict[str, float]:
  """Returns the predicted and measured bytes of a case, in a process of its own.

  Args:
    name: A key of `CASES`.
    xla_flags: How its programs are compiled; by default as they are for users.
  """
  command = [sys.executable, '-m', 'tests.benchmarks.memory', '--child', name]
  # malloc gives freed pages back at once, so that the resident set is what is in use.
  others = ('MALLOC_', 'LD_PRELOAD')
  env = {k: v for k, v in os.environ.items() if not k.startswith(others)}
  env |= {
    'MALLOC_TRIM_THRESHOLD_': '0',
    'MALLOC_ARENA_MAX': '1',
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags,
  }
  with tempfile.TemporaryDirectory() as cache:  # so that each program compiles once
    env |= {'JAX_COMPILATION_CACHE_DIR': cache}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
  return json.loads(done.stdout.splitlines()[-1])


def resident(field: str, pid: int | str = 'self') -> int:
  """Bytes of a process's memory, as the kernel tells: VmRSS, or VmHWM, its peak."""
  with open(f'/proc/{pid}/status') as file:
    line = next(line for line in file if line.startswith(field))
  return int(line.split()[1]) * 1024


def child(name: str) -> dict[str, float]:
  """Measures in this process."""
  import jax

  from launch.planning import cost, planned_run, targets
  from launch.settings.resolve import resolve_settings

  config = _published(name) if name in PUBLISHED else _config(*CASES[name])
  run = planned_run.read_run(resolve_settings(config))
  target, devices = targets.parse_target('cpu:1'), jax.devices()[:1]
  mesh = planned_run.planned_mesh(run, devices)
  predicted = cost.estimate_cost(run, target, devices)
  learner_alone = predicted.peaks['train'] - sum(
    predicted.memory.get(part, 0.0) for part in ("engine's weights", 'cache')
  )
  shapes = planned_run.make_learner(run, mesh)
  asyncio.run(shapes.warmup())
  ctypes.CDLL('libc.so.6').malloc_trim(0)
  before = resident('VmRSS')
  learner = _learner(run, mesh)
  ctypes.CDLL('libc.so.6').malloc_trim(0)
  groups = _groups(run)

  async def updates() -> int:
    await learner.update(groups)
    with open('/proc/self/clear_refs', 'w') as file:
      file.write('5')  # the peak begins anew
    await learner.update(groups)
    return resident('VmHWM')

  peak = asyncio.run(updates())
  state = predicted.memory['parameters'] + predicted.memory['optimizer state']
  return {'predicted': learner_alone, 'measured': peak - before, 'state': state}


def _config(
  layers: int,
  width: int,
  inner: int,
  vocab: int,
  groups: int,
  length: int,
  micro: int,
  remat: str,
  packing: str,
) -> Any:
  from configs import quickstart

  config = quickstart.get_config()
  config.model.remat = remat
  config.model.random = (
    f'qwen3(num_layers={layers}, hidden_size={width}, intermediate_size={inner}, '
    f'vocab_size={vocab}, num_heads=8, num_kv_heads=4, head_dim=64)'
  )
  config.batch.update(num_groups=groups, max_length=length, num_micro_batches=micro)
  config.batch.packing = packing
  config.algorithm.group_size = 4
  return config


def _published(name: str) -> Any:
  from configs import quickstart

  config, (fields, options) = quickstart.get_config(), PUBLISHED[name]
  config.model.checkpoint, config.model.remat = name, 'none'
  if fields:
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / 'config.json').write_text(json.dumps(fields))
    config.model.checkpoint = str(folder)
  config.algorithm.group_size = 4
  for key, value in options.items():
    section, _, last = key.partition('.')
    config[section][last] = value
  return config


def _learner(run: Any, mesh: Any) -> Any:
  import jax
  import jax.numpy as jnp

  from jaxrl.device_thread import DeviceThread
  from launch.learner import learner_factory

  shapes = run.policy().params
  params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes)
  policy = run.policy()
  factory = learner_factory.LocalLearnerFactory(
    run.settings, policy, mesh, DeviceThread('memory'), None
  )
  phase = learner_factory.PhaseSpec('train', run.num_rows, run.settings.num_steps)
  return factory.build_learner(phase, params)


def _groups(run: Any) -> list[Any]:
  from tests.training import toy

  length, sizes = run.buckets[-1], (run.settings.algorithm.group_size,)
  count = run.settings.batch.num_groups
  return toy.groups(sizes=sizes * count, lengths=(length - 4, length))


SOAKS = {
  'a checkpoint at each step': '--config.checkpoint.save_interval=1',
  'no checkpoints': '--config.checkpoint.save_interval=0',
}
MAX_GROWTH_MIB = 10  # after the first minute


def soak(option: str, seconds: float) -> tuple[int, list[int]]:
  """Trains for some time; steps done, and the resident set once a second, in bytes."""
  command = [sys.executable, '-m', 'launch.train', '--config=configs/debug.py']
  sizes = []
  with tempfile.TemporaryDirectory() as folder:
    options = [f'--workdir={folder}', '--config.num_steps=1000000000', option]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
      metrics = pathlib.Path(folder, 'metrics.jsonl')
      while not metrics.exists() and process.poll() is None:
        time.sleep(1)
      end = time.monotonic() + seconds
      while time.monotonic() < end:
        time.sleep(1)
        if process.poll() is not None:
          raise SystemExit(f'the run ended with status {process.returncode}')
        sizes.append(resident('VmRSS', process.pid))
    finally:
      process.terminate()
      process.wait()
    lines = metrics.read_text().splitlines()
  return len(lines), sizes


def soak_all(minutes: float) -> None:
  """Prints how far resident sets grow after a minute; exits with 1 if too far."""
  growths = []
  for name, option in SOAKS.items():
    steps, sizes = soak(option, 60 * minutes)
    whole_minutes = range(60, len(sizes) - 30, 60)
    medians = [statistics.median(sizes[i : i + 60]) / 2**20 for i in whole_minutes]
    growths.append(statistics.median(medians[-3:]) - medians[0])
    listed = ', '.join(f'{size:.0f}' for size in medians)
    print(f'{name}: {steps} steps; MiB in each minute from the second on: {listed}')
    print(f'  grown by {growths[-1]:.1f} MiB', flush=True)
  sys.exit(max(growths) > MAX_GROWTH_MIB)


def main() -> None:
  from rich.console import Console
  from rich.table import Table

  table = Table('case', 'state', 'predicted', 'measured', 'ratio')
  names = sys.argv[1:] or TABLE
  for name in PUBLISHED if names == ['published'] else names:
    result = measure(name)
    sizes = [f'{result[k] / 1e9:.2f} GB' for k in ('state', 'predicted', 'measured')]
    table.add_row(name, *sizes, f'{result["predicted"] / result["measured"]:.3f}')
  Console().print(table)


if __name__ == '__main__':
  if sys.argv[1:2] == ['--child']:
    print(json.dumps(child(sys.argv[2])))
  elif sys.argv[1:] and sys.argv[1].startswith('--soak'):
    soak_all(float(sys.argv[1].partition('=')[2] or 15))
  else:
    main()
