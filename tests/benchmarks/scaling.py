"""`python -m tests.benchmarks.scaling`: how cost grows with the size of a run.

Each panel varies one size of a run and leaves the others: rows, length and vocabulary
of a step; environments at once; engines that weights are sent to; environment tags. The
line beside the measured points is the cost in theory, through the largest point, and
the slope is that of the last doublings in the logarithms of both axes.

--json=FILE writes the figures, --figure=FILE.svg draws them.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.rollout.env_manager import EnvContext
from jaxrl.rollout.env_worker import EnvWorker, partition_envs
from jaxrl.rollout.queue.group_queue import GroupQueue
from jaxrl.rollout.thread_pool import ThreadPool
from jaxrl.rollout.weights.publisher import VersionWriter, VersionWriterOptions
from jaxrl.rollout.weights.snapshots import snapshot
from jaxrl.rollout.weights.subscriber import VersionReader
from jaxrl.rollout.weights.transport import FolderTransport
from launch.runtime import process_env
from tests.benchmarks import toy
from tests.benchmarks.peers import shape
from tests.benchmarks.rollouts import FreeEngine
from tests.rollout.fakes import EchoEnv, FakeChat

BASE = dataclasses.replace(shape.SIZES['toy'], prompts=4, samples=4)
WARM, STEPS = 2, 5
ENVS, ENGINES, TAGS = (64, 256, 1024, 4096), (1, 2, 4, 8), (1, 2, 4, 8, 16)
WEIGHTS = 16_000_000  # parameters that are sent, in float32


@dataclasses.dataclass(frozen=True)
class Panel:
  """What was measured over one size.

  theory: What each point costs in theory, in any unit.
  """

  name: str
  axis: str
  unit: str
  sizes: Sequence[int]
  seconds: Sequence[float]
  theory: Sequence[float]

  @property
  def slope(self) -> float:
    """The slope of what was measured, over the upper half of the sizes."""
    return _slope(self.sizes, self.seconds)

  @property
  def theory_slope(self) -> float:
    """The slope of the theory, over the same sizes."""
    return _slope(self.sizes, self.theory)


def _slope(sizes: Sequence[int], costs: Sequence[float]) -> float:
  first = len(sizes) // 2 - (len(sizes) == 2)
  return math.log(costs[-1] / costs[first]) / math.log(sizes[-1] / sizes[first])


def _step_seconds(size: shape.Size) -> float:
  """The median seconds of a whole GRPO step."""

  async def run() -> list[float]:
    parts = toy.Toy(decode_steps=size.new, share=True, size=size)
    await parts.start()
    times = [(await parts.step(step))['step'] for step in range(WARM + STEPS)]
    parts.device_thread.close()
    return times[WARM:]

  return statistics.median(asyncio.run(run()))


def _steps(name: str, axis: str, changed: Mapping[int, shape.Size]) -> Panel:
  seconds = [_step_seconds(size) for size in changed.values()]
  theory = [4 * size.forward_flops for size in changed.values()]
  return Panel(name, axis, 's a step', list(changed), seconds, theory)


def rows() -> Panel:
  """A step over the number of rows."""
  return _steps(
    'rows',
    'rows, of 96 tokens',
    {4 * n: dataclasses.replace(BASE, prompts=n) for n in (2, 4, 8, 16, 32)},
  )


def length() -> Panel:
  """A step over the length of rows, a third of which is the prompt."""
  return _steps(
    'length',
    'tokens a row, 16 rows',
    {
      3 * n: dataclasses.replace(BASE, prompt=n, new=2 * n)
      for n in (16, 32, 64, 128, 256)
    },
  )


def vocabulary() -> Panel:
  """A step over the size of the vocabulary."""
  return _steps(
    'vocabulary',
    'tokens in the vocabulary',
    {
      n: dataclasses.replace(BASE, model={**BASE.model, 'vocab_size': n})
      for n in (2048, 8192, 32_768, 131_072)
    },
  )


async def _play(tags: int, groups: int, size: int, steps: int) -> float:
  """Seconds of a step of episodes, of all tags at once, the model for free."""
  pool, queues, tasks = ThreadPool(), [], []
  for _ in range(tags):
    queue = GroupQueue(num_groups=groups, group_size=size, num_env_groups=groups)
    world: Any = EnvContext(EchoEnv, FreeEngine(), FakeChat(), pool, queue)  # pyright: ignore[reportArgumentType]
    worker = EnvWorker(world, partition_envs(groups, size, 1)[0])
    tasks.append(asyncio.create_task(worker.run({'seed': 0})))
    queues.append(queue)
  times = []
  for step in range(steps + 1):
    start = time.perf_counter()
    await asyncio.gather(*(queue.advance_step(step) for queue in queues))
    await asyncio.gather(*(queue.get_batch(groups, step) for queue in queues))
    times.append(time.perf_counter() - start)
  await asyncio.gather(*(queue.shutdown() for queue in queues))
  await asyncio.gather(*tasks)
  pool.close()
  return statistics.median(times[1:])


def environments() -> Panel:
  """A step of episodes over the environments that play at once, one episode each."""
  seconds = [asyncio.run(_play(1, count // 8, 8, 3)) for count in ENVS]
  return Panel(
    'environments', 'environments at once', 's a step', ENVS, seconds, list(ENVS)
  )


def tags() -> Panel:
  """The same 512 environments over the tags that they are split into."""
  seconds = [asyncio.run(_play(count, 64 // count, 8, 3)) for count in TAGS]
  return Panel('tags', 'tags of 512 environments', 's a step', TAGS, seconds, [1] * 5)


def engines() -> Panel:
  """Weights that are written once and loaded by several engines of one machine."""
  draw = np.random.default_rng(0)
  params = {'weights': draw.standard_normal(WEIGHTS, dtype=np.float32)}
  seconds, theory = [], []
  for count in ENGINES:
    with tempfile.TemporaryDirectory() as folder:
      writer = VersionWriter(
        FolderTransport(folder, durable=False),
        options=VersionWriterOptions(full_every=1),
      )
      readers = [
        VersionReader(FolderTransport(folder, durable=False)) for _ in range(count)
      ]
      times = []
      for version in range(9):
        start = time.perf_counter()
        writer.publish(version, snapshot(params))
        for reader in readers:
          reader.poll()
        times.append(time.perf_counter() - start)
      for reader in readers:
        reader.close()
      writer.close()
    seconds.append(statistics.median(times[2:]))
    theory.append(1.0 + count)  # written once, read by each
  about = 'engines, 64 MB each'
  return Panel('engines', about, 's a version', ENGINES, seconds, theory)


PANELS: tuple[Callable[[], Panel], ...] = (
  rows,
  length,
  vocabulary,
  environments,
  tags,
  engines,
)


def draw(panels: Sequence[Panel], path: pathlib.Path) -> None:
  """Draws the panels, two rows of three.

  Args:
    panels: What was measured.
    path: The file, an SVG.
  """
  import matplotlib.pyplot as plt
  from matplotlib import ticker

  with plt.rc_context({'svg.hashsalt': 'jaxrl', 'font.size': 9}):
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), layout='constrained')
    for panel, ax in zip(panels, axes.flat, strict=True):
      scale = panel.seconds[-1] / panel.theory[-1]
      ax.plot(
        panel.sizes,
        [scale * cost for cost in panel.theory],
        color='0.6',
        linestyle='--',
        label=f'theory, slope {panel.theory_slope:.2f}',
      )
      ax.plot(
        panel.sizes,
        panel.seconds,
        color='#1f6feb',
        marker='o',
        label=f'measured, slope {panel.slope:.2f}',
      )
      ax.set(xscale='log', yscale='log', title=panel.name)
      ax.set(xlabel=panel.axis, ylabel=panel.unit)
      ax.set_xticks(panel.sizes, [f'{size:,}' for size in panel.sizes])
      ax.minorticks_off()
      # At least a decade: a flat line looks flat.
      middle = math.sqrt(min(panel.seconds) * max(panel.seconds))
      low, high = ax.get_ylim()
      ax.set_ylim(min(low, middle / 4), max(high, middle * 4))
      ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
      ax.yaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
      ax.grid(alpha=0.25)
      ax.spines[['top', 'right']].set_visible(False)
      ax.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format='svg', metadata={'Date': None})
    plt.close(figure)


def main() -> None:
  parser = argparse.ArgumentParser(prog='tests.benchmarks.scaling', description=__doc__)
  parser.add_argument('--json', type=pathlib.Path)
  parser.add_argument('--figure', type=pathlib.Path)
  flags = parser.parse_args()
  process_env.apply()
  panels = []
  for measure in PANELS:
    panel = measure()
    panels.append(panel)
    points = ', '.join(
      f'{size:,}: {seconds:.3f}'
      for size, seconds in zip(panel.sizes, panel.seconds, strict=True)
    )
    print(
      f'{panel.name:13} slope {panel.slope:5.2f}, in theory {panel.theory_slope:5.2f}'
      f'   {panel.unit}: {points}',
      flush=True,
    )
    jax.clear_caches()
  if flags.json:
    flags.json.parent.mkdir(parents=True, exist_ok=True)
    flags.json.write_text(json.dumps([dataclasses.asdict(p) for p in panels], indent=2))
  if flags.figure:
    draw(panels, flags.figure)


if __name__ == '__main__':
  main()
