"""A run's data sets: one for all tags that ask for the same rows."""

import types

from jaxrl.data.dataset import GlobalDataset
from launch.components.env_datasets import load_datasets
from launch.components.rollout_scheduler import RolloutScheduler
from launch.runtime.local_runtime import LocalRuntime
from launch.settings.resolve import resolve_settings
from tests.launch import two_tags


class Counting(LocalRuntime):
  """Notes what it spawns."""

  def __init__(self):
    super().__init__()
    self.spawned = []

  def spawn(self, made, *args, **options):
    self.spawned.append((made, options))
    return super().spawn(made, *args, **options)


def test_tags_share_their_rows_and_modes_do_not():
  config, host = two_tags.get_config(), Counting()
  config.dataset.limit = 20
  config.eval.num_tasks = -1
  train, tests = load_datasets(resolve_settings(config), host)
  assert train['arithmetic'] is train['more'] and tests['arithmetic'] is tests['more']
  assert [made for made, _ in host.spawned] == [GlobalDataset] * 2
  assert [options['mode'] for _, options in host.spawned] == ['sample', 'traversal']
  assert train['more'].size == 20
  assert [options['limit'] for _, options in host.spawned] == [20, None]  # -1: all
  config.eval.interval = 0
  assert set(load_datasets(resolve_settings(config), host)[1].values()) == {None}


async def test_a_shared_curriculum_is_told_once_before_anyone_draws():
  heard = []

  class Data:
    async def report(self, results):
      heard.append(results)

  class Queue:
    def __init__(self, *results):
      self.found = list(results)

    def results(self):
      return self.found

    async def advance_step(self, step):
      heard.append(step)

  data, alone = Data(), Data()
  rollouts = types.SimpleNamespace(
    queues={
      'a': Queue((1, 0.5, 4)),
      'b': Queue((2, 1.0, 4), (3, 0.0, 4)),
      'c': Queue((9, 1.0, 4)),
      'game': Queue((5, 1.0, 4)),
    },
    datasets={'a': data, 'b': data, 'c': alone, 'game': None},
  )
  await RolloutScheduler.advance(rollouts, 7)  # pyright: ignore[reportArgumentType]
  assert heard[:2] == [[(1, 0.5, 4), (2, 1.0, 4), (3, 0.0, 4)], [(9, 1.0, 4)]]
  assert heard[2:] == [7] * 4
