"""The live view of 100,000 trajectories: start-up, indexing, filters and pages."""

import asyncio
import functools
import importlib.util
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from jaxrl.data.trajectory_writers.dump_columns import DumpColumns
from jaxrl.data.trajectory_writers.file_writer import FileWriter
from jaxrl.types import Trajectory

COUNT, PER_STEP, GROUP = 100_000, 1000, 8
TOKENS, WORDS = 300, 120
ORDERS = ('sample', 'turn', 'mode', 'actions')
TOKEN = 'a-token-of-the-benchmark'
FILTERS = {
  'all': {},
  'tag': {'tag': 'lake'},
  'stop reason': {'stop': 'max_length'},
  'score, by length': {'score_min': 0.5, 'sort': 'length', 'order': 'desc'},
  'steps, by score': {'step_min': 20, 'step_max': 60, 'sort': 'score'},
  'a rare word': {'text': 'needle 77'},
  'a frequent word': {'text': 'stone'},
  'two letters': {'text': 'to'},
  'word, tag and score': {'text': 'river', 'tag': 'math', 'score_max': 0.5},
}


def measure() -> dict[str, Any]:
  """Seconds and milliseconds of the view, and sizes in MB."""
  if importlib.util.find_spec('aiohttp') is None:
    return {'missing': 'aiohttp'}
  with tempfile.TemporaryDirectory() as folder:
    run = pathlib.Path(folder) / 'run'
    run.mkdir()
    (run / 'metrics.jsonl').touch()
    write_dump(run)
    return {'startup_s': _startup(run.parent), **asyncio.run(_ask(run))}


def write_dump(run: pathlib.Path, count: int = COUNT) -> None:
  """Writes a dump as a run does, of conversations of random words."""
  columns, draw = DumpColumns(), random.Random(0)
  words = 'stone river tower north seven apple under carry light paper'.split()
  words += [f'w{i:04x}' for i in range(4000)]
  writer = FileWriter(str(run / 'trajectories'), 'train', columns.types)
  writer.check(fresh=True)
  mask = np.arange(TOKENS) >= 60
  arrays = {
    'tokens': np.arange(TOKENS, dtype=np.int32),
    'action_mask': mask,
    'rollout_logprobs': np.where(mask, -0.5, 0).astype(np.float32),
    'weights_version': np.where(mask, 3, -1).astype(np.int32),
  }
  for step in range(max(1, count // PER_STEP)):
    rows = []
    for number in range(PER_STEP // GROUP):
      group = []
      for sample in range(GROUP):
        rewards = np.zeros(TOKENS, np.float32)
        rewards[-1] = draw.random()
        text = ' '.join(draw.choices(words, k=WORDS))
        if draw.random() < 0.001:
          text += f' needle {draw.randrange(100)}'
        group.append(
          Trajectory(
            rewards=rewards,
            tag=('math', 'lake', 'code')[number % 3],
            env_group=number,
            sample_index=sample,
            episode_id=step,
            stop_reason='finish' if draw.random() < 0.8 else 'max_length',
            messages=[
              {'role': 'user', 'content': f'Task {number}: say something.'},
              {'role': 'assistant', 'content': text},
            ],
            **arrays,
          )
        )
      rows += columns.rows(group, step=step, mode='train', model_name='toy')
    writer.write(f'part-step{step:06d}', rows)


def _startup(root: pathlib.Path) -> float:
  """Seconds from the command line to the URL, the second time."""
  seconds = 0.0
  for _ in range(2):
    start = time.perf_counter()
    process = subprocess.Popen(
      [sys.executable, '-m', 'launch.view', str(root)],
      stdout=subprocess.PIPE,
      env={**os.environ, 'JAXRL_VIEW_TOKEN': TOKEN},
      text=True,
    )
    assert process.stdout
    while TOKEN not in process.stdout.readline():
      assert process.poll() is None
    seconds = time.perf_counter() - start
    process.terminate()
    process.wait()
  return seconds


async def _ask(run: pathlib.Path) -> dict[str, Any]:
  import aiohttp

  from launch.report import assets
  from launch.report.trajectory_index import FILE
  from launch.report.view_server import serve_view

  async with (
    serve_view(run.parent, TOKEN) as url,
    aiohttp.ClientSession(url) as session,
  ):

    async def get(name: str, **parameters: Any) -> tuple[float, Any]:
      start = time.perf_counter()
      parameters = {'run': 'run', **parameters}
      async with session.get(f'api/{name}', params=parameters) as response:
        answer = await response.json()
      assert response.status == 200, answer
      return 1e3 * (time.perf_counter() - start), answer

    listing = functools.partial(get, 'trajectories', limit=50)
    start = time.perf_counter()
    while (await listing())[1]['indexing']:
      await asyncio.sleep(0.2)
    index_s = time.perf_counter() - start
    filters, pages = {}, []
    for name, query in FILTERS.items():
      # Another order of the same rows is another query, which nothing has answered yet.
      orders = [query, *({**query, 'sort': order} for order in ORDERS)]
      filters[name] = max([(await listing(**order))[0] for order in orders])
      pages += [(await listing(**query, offset=50 * n))[0] for n in range(1, 6)]
    _, answer = await listing()
    shown = answer['rows'][0]
    detail = [(await get('trajectory', id=shown['id']))[0] for _ in range(5)]
    group = [(await get('group', group=shown['grp']))[0] for _ in range(5)]
    size = sum(f.stat().st_size for f in (run / 'trajectories').iterdir())
    return {
      'count': answer['total'],
      'index_s': index_s,
      'dump_mb': size / 1e6,
      'index_mb': (run / FILE).stat().st_size / 1e6,
      'filters_ms': filters,
      'page_ms': max(pages),
      'trajectory_ms': statistics.median(detail),
      'group_ms': statistics.median(group),
      'pages_kb': sum(len(assets.read_asset(n)) for n in assets.asset_names()) / 1e3,
    }


if __name__ == '__main__':
  print(json.dumps(measure(), indent=2))
