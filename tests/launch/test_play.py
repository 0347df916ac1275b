"""One episode on the screen: every token once, given or written, with what it is."""

import io
import re
import runpy

import numpy as np
import pytest

from jaxrl.data.images import as_image
from jaxrl.rollout.episodes.rollout_cache import RolloutCache
from jaxrl.rollout.queue.group_state import EpisodeLease
from jaxrl.types import Completion, Task, Trajectory
from launch.logging.console import Console
from launch.play import EpisodeScreen, _blocks, main, play_one_episode
from launch.rollouts import inference_job
from tests.launch import runs

TEXT = {1: 'What', 2: ' is', 3: '\n', 4: 'It', 5: ' is[/b]', 6: '<end>', 7: 'No'}


class Manager:
  """Plays two turns: given three tokens, says two, is given one, says two."""

  async def play_episode(self, lease, *, base_seed):
    cache = await self.reset(lease)
    while cache is not None and not cache.done:
      await self.step(cache, await self.make_decision(cache))
    return cache and self.rows(cache)

  async def reset(self, lease):
    if lease.episode_id > 3:
      return None
    task = Task(seed=5, index=2, item={'question': 'q?'})
    cache = RolloutCache(lease=lease, seed=5, task=task)
    cache.append_observation([1, 2, 3])
    return cache

  async def make_decision(self, cache):
    tokens = np.array([4 + len(cache.turns), 6], np.int32)
    completion = Completion(tokens, np.float32([-1, -2]), np.int32([7, 7]), 'stop')
    cache.append_response(completion)
    return completion

  async def step(self, cache, completion):
    cache.turns[-1].reward = 0.5
    if len(cache.turns) == 2:
      cache.terminated = True
    else:
      cache.append_observation([7])

  def rows(self, cache):
    mask = np.array(cache.mask)
    zeros = np.zeros(len(mask), np.float32)
    rewards = zeros.copy()
    rewards[-1] = 1
    return [Trajectory(np.array(cache.tokens), mask, zeros, rewards, zeros)]


class Job:
  def __init__(self):
    self.manager, self.base_seed, self.events = Manager(), 0, []

  async def run(self, work):
    self.events.append('start')
    try:
      return await work()
    finally:
      self.events.append('close')


def decode(ids):
  return ''.join(TEXT[i] for i in ids)


async def test_every_token_is_shown_once_in_order():
  stream, job = io.StringIO(), Job()
  assert await play_one_episode(job, EpisodeScreen(Console(stream), decode), 0, 0) == 0
  text = stream.getvalue()
  assert '\x1b' not in text
  assert 'row 2' in text and 'q?' in text
  assert 'What| is|↵' in text and 'It|<end>' in text and ' is[/b]|<end>' in text
  heads = [line for line in text.splitlines() if 'mask' in line]
  assert [re.search(r'mask (\d)', line).group(1) for line in heads] == list('0101')
  assert 'mean log-prob -1.500 · weights of step 7' in heads[1]
  ids = [x for x in text.splitlines() if re.fullmatch(r'[\d ]+', x) and x.strip()]
  assert ' '.join(ids) == '1 2 3 4 6 7 5 6'
  assert text.count('reward        0.5') == 2
  assert 'Ended by finish.' in text and '4 written by the model' in text
  assert job.events == ['start', 'close']


def test_an_ending_shows_what_the_environment_keeps_and_what_went_wrong():
  stream, zeros = io.StringIO(), np.zeros(2, np.float32)
  row = Trajectory(np.zeros(2, int), zeros > 0, zeros, zeros, zeros)
  row.stop_reason, row.metrics = 'env_error', {'passed': 0.5}
  row.columns = {'given': '', 'test_output': 'exit code 1\n1 failed'}
  row.extras['error'] = "KeyError: 'x' (lab/env.py, line 3)"
  EpisodeScreen(Console(stream), decode).show_ending([row])
  lines = [line.split(maxsplit=1) for line in stream.getvalue().splitlines() if line]
  facts = dict(line for line in lines if len(line) == 2)
  assert facts['passed'] == '0.5' and facts['test_output'] == 'exit code 1'
  assert 'given' not in facts and '1 failed' in stream.getvalue()
  assert facts['error'] == "KeyError: 'x' (lab/env.py, line 3)"


async def test_ids_can_be_left_out():
  stream = io.StringIO()
  await play_one_episode(Job(), EpisodeScreen(Console(stream), decode, ids=False), 0, 0)
  assert '1 2 3' not in stream.getvalue()


async def test_an_episode_beyond_the_data(capsys):
  assert (
    await play_one_episode(Job(), EpisodeScreen(Console(io.StringIO()), decode), 9, 0)
    == 2
  )
  assert 'the data set ends before it' in capsys.readouterr().err


def test_what_a_users_manager_raises_is_one_line_with_its_place(
  tmp_path, capsys, monkeypatch
):
  file = tmp_path / 'own.py'
  file.write_text('async def play_episode(lease, *, base_seed):\n  return {}[lease]\n')
  job = Job()
  job.decode = decode
  job.manager.play_episode = runpy.run_path(str(file))['play_episode']
  monkeypatch.setattr(inference_job, 'Player', lambda settings: job)
  assert main([f'--config={runs.DEBUG}']) == 1
  error = capsys.readouterr().err
  assert error.startswith('error: KeyError: ') and error.count('\n') == 1
  assert error.endswith(f'({file}, line 2)\n')


def test_what_a_users_manager_raises_when_it_is_made_is_one_line(
  tmp_path, capsys, monkeypatch
):
  file = tmp_path / 'own.py'
  file.write_text('def make_player(settings):\n  return {}["x"]\n')
  make_player = runpy.run_path(str(file))['make_player']
  monkeypatch.setattr(inference_job, 'Player', make_player)
  assert main([f'--config={runs.DEBUG}']) == 1
  assert capsys.readouterr().err == f"error: KeyError: 'x' ({file}, line 2)\n"


def test_images_are_named_where_they_stand_and_drawn_in_half_blocks():
  pixels = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255]] * 2, [[9, 9, 9]] * 2])
  image = as_image(pixels.astype(np.uint8))
  cache = RolloutCache(EpisodeLease(0, 0, 0, 0, 0), 0, images=[(2, image)])
  cache.append_observation([1, 2, 3])
  out = io.StringIO()
  EpisodeScreen(Console(out), lambda ids: 'x' * len(ids)).show_new_tokens(cache)
  assert 'image of 2 × 3 pixels, up to token 1 · sha256:' in out.getvalue()
  text = _blocks(image)
  assert text.plain == '▀▀\n▀▀\n'
  styles = [str(span.style) for span in text.spans]
  assert styles[0] == 'rgb(255,0,0) on rgb(0,0,255)' and styles[2] == 'rgb(9,9,9)'


def test_lease_fields_are_as_the_player_gives_them():
  assert EpisodeLease._fields[:5] == (
    'env_group', 'episode_id', 'sample_index', 'start_step', 'attempt',
  )  # fmt: skip
  assert EpisodeLease._field_defaults == {'greedy': False}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['debug', 'frozen_lake'])
def test_a_fresh_model_and_an_exported_one_play(name, tmp_path, capsys):
  """The commands that people type, on configs as they are."""
  config = f'--config={runs.ROOT}/configs/{name}.py'
  assert main([config]) == 0
  assert 'Ended by' in capsys.readouterr().out
  short = (
    '--config.sft.num_steps=0',
    '--config.num_steps=1',
    '--config.eval.interval=0',
    '--config.batch.num_groups=2',
  )
  runs.record(tmp_path, *short, config=f'{runs.ROOT}/configs/{name}.py')
  capsys.readouterr()
  assert main([config, f'--config.model.checkpoint={tmp_path}/export']) == 0
  output = capsys.readouterr().out
  assert 'Ended by' in output and 'mask 1' in output
