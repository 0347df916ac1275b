"""Rewards by config: a whole run with judges and a reward model; what is refused."""

import contextlib
import http.server
import json
import threading

import jax
import numpy as np
import pytest

from configs import base
from jaxrl import model_loading
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.models import huggingface
from jaxrl.options import ConfigError
from launch.rollouts import reward_terms
from launch.settings.resolve import resolve_settings
from tests.launch import runs
from tests.launch.test_bad_input import refused

TINY = (
  '--config.sft.num_steps=0',
  '--config.num_steps=2',
  '--config.eval.num_tasks=2',
  '--config.optimizer.warmup_steps=0',
)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A tiny model, and the same with a head that scores."""
  workdir = tmp_path_factory.mktemp('judge')
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  shape = model_loading.random_config(hidden_size=32, num_layers=2, head_dim=16)
  texts, key = ['What is 1 + 2? It is 3.'] * 9, jax.random.key(5)
  model_loading.create_model(workdir / 'model', shape, texts, key, **options)
  config, params = huggingface.load(workdir / 'model')
  kernel = np.random.default_rng(0).standard_normal(config.hidden_size)
  head = {'kernel': kernel.astype(np.float32), 'bias': np.float32(0)}
  huggingface.save(
    workdir / 'scorer',
    config.replace(value_head=True),
    {**params, 'value_head': head},
    load_tokenizer(workdir / 'model'),
  )
  return workdir / 'model', workdir / 'scorer'


@contextlib.contextmanager
def served(answer):
  """A server of chat completions on loopback; yields its URL and what it was sent."""
  seen = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      seen.append((self.path, body))
      reply = {'choices': [{'message': {'content': answer(body)}}]}
      text = json.dumps(reply).encode()
      self.send_response(200)
      self.send_header('Content-Length', str(len(text)))
      self.end_headers()
      self.wfile.write(text)

    def log_message(self, *args):
      pass

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_address[1]}/v1', seen
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def learned(recorder):
  return [row for _, row in recorder.metrics if 'loss/total' in row]


@pytest.mark.slow
def test_a_run_with_judges_and_a_reward_model(folders, tmp_path):
  model, scorer = folders
  with served(lambda body: f'Score: {body["seed"] % 11}') as (url, seen):
    spec = (
      f'judge(url="{url}", model="m", weight=.5) + env(weight=2) + format(pattern=".*")'
      f' + judge(checkpoint="{model}", votes=2, temperature=1, max_tokens=4,'
      ' template="{reply}", otherwise=.25, weight=.1, max_length=256)'
      f' + reward_model(checkpoint="{scorer}", sigmoid=True, weight=.1)'
    )
    recorder = runs.record(tmp_path, *TINY, f'--config.rollout.rewards={spec}')
  rows = learned(recorder)
  assert len(rows) == 2
  for row in rows:
    assert 0 < row['reward/judge'] < 1 and row['reward/judge/faults'] == 0
    assert row['reward/format'] == 1
    assert (row['reward/judge_2'], row['reward/judge_2/faults']) == (0.25, 1)
    assert row['reward/judge_2/unparsable'] == 2
    assert 0 < row['reward/reward_model'] < 1
    parts = 2 * row['reward/env'] + 0.5 * row['reward/judge'] + row['reward/format']
    parts += 0.1 * (0.25 + row['reward/reward_model'])
    assert row['reward/mean'] == pytest.approx(parts, abs=1e-5)
  assert {path for path, _ in seen} == {'/v1/chat/completions'}
  seeds = {body['seed'] for _, body in seen}
  assert len(seeds) == len(seen) - 2  # two tasks are evaluated twice, and alike
  evals = [m for _, m in recorder.metrics if any('eval/' in name for name in m)]
  names = {name for m in evals for name in m}
  assert any(name.endswith('/reward/judge') for name in names)
  assert any(name.endswith('/reward/reward_model') for name in names)


@pytest.mark.slow
@pytest.mark.extended
def test_a_judge_no_one_can_read_stops_the_run_with_its_reason(folders, tmp_path):
  spec = f'judge(checkpoint="{folders[0]}", max_tokens=2, max_length=512)'
  options = ('--config.rollout.max_consecutive_drops=2', '--config.eval.interval=0')
  error = refused_while_playing(tmp_path, *options, f'--config.rollout.rewards={spec}')
  assert 'reward_failed: judge: 0 of 1 votes count; no verdict in' in error


async def test_half_precision_is_near(folders):
  messages = [{'role': 'user', 'content': 'What is 1 + 2?'}]
  scores = {}
  for dtype in ('float32', 'bfloat16'):
    device_thread = DeviceThread()
    engine = reward_terms.RewardModelEngine(str(folders[1]), device_thread, dtype=dtype)
    scores[dtype] = await engine.score(messages)
    device_thread.close()
  assert scores['bfloat16'] != scores['float32']
  assert scores['bfloat16'] == pytest.approx(scores['float32'], rel=0.05)


def refused_while_playing(workdir, *options):
  with pytest.raises(RuntimeError) as caught:
    runs.record(workdir, *TINY, *options)
  return str(caught.value)


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('jugde(url="x")', "no grader 'jugde'. Did you mean 'judge'"),
    ('judge', "judge: set either checkpoint='FOLDER', or url='…' and model='…'"),
    ('judge(url="http://h/v1")', "judge: a url needs model='…'"),
    ('judge(url="h", model="m")', 'write http://HOST:PORT/v1'),
    ('judge(url="http://h/v1", model="m", key_env="NO_SUCH_KEY")', 'is not set'),
    ('judge(url="http://h/v1", model="m", concurrency=0)', 'concurrency=0 at least 1'),
    ('judge(url="http://h/v1", model="m", timeout=0)', 'timeout=0 must be above 0'),
    ('judge(checkpoint="/none")', "judge: checkpoint='/none': no model in /none"),
    ('judge(url="http://h/v1", model="m", vote=2)', "no option 'vote'"),
    ('judge(url="http://h/v1", model="m", votes=2.5)', 'must be a whole number'),
    ('reward_model(checkpoint="x", dtype="int8")', 'is not one of float32'),
    ('reward_model', "reward_model: set checkpoint='FOLDER'"),
    ('env + env', "'env' is listed twice"),
    ('env(half=1)', "no option 'half'"),
    ('exact(otherwise="no")', "otherwise='no': must be a number or none"),
    ('exact(weight=True)', 'weight is True; it must be a number'),
  ],
)
def test_what_cannot_be_is_said_before_any_work(spec, message, tmp_path, capsys):
  error = refused(tmp_path, capsys, f'--config.rollout.rewards={spec}')
  assert message in error


@pytest.mark.parametrize(
  ('body', 'message'),
  [
    ('def grade(reply):\n  return 1.0\n', 'TypeError: grade() takes 1 positional'),
    ('def grade(reply, item):\n  return item["label"]\n', "KeyError: 'label'"),
    ('def grade(reply, item):\n  return "good"\n', "returned 'good'; it must return"),
    ('def grade(reply, item):\n  return [1.0]\n', 'returned [1.0]; it must return'),
    ('def grade(reply, item):\n  return float("nan")\n', 'returned nan; it must'),
    ('def grade(reply, item):\n  return 1j\n', 'complex, which is not a number'),
  ],
)
@pytest.mark.parametrize('place', ['rollout.rewards', 'env.math.env_config.grader'])
def test_a_grader_that_always_fails_ends_the_run_before_it_begins(
  body, message, place, tmp_path, capsys
):
  (tmp_path / 'own.py').write_text(body)
  rows = [{'question': f'{n}?', 'answer': str(n)} for n in range(9)]
  (tmp_path / 'rows.jsonl').write_text(''.join(f'{json.dumps(r)}\n' for r in rows))
  config = tmp_path / 'config.py'
  config.write_text(
    'from configs import base, debug\ndef get_config():\n  c = debug.get_config()\n'
    f'  c.env = {{"math": base.env_section("math")}}\n'
    f'  c.dataset.path = "{tmp_path}/rows.jsonl"\n  return c\n'
  )
  option = f'--config.{place}={tmp_path}/own.py:grade'
  error = refused(tmp_path / 'run', capsys, option, config=str(config))
  assert 'none of the first 8 tasks can be graded' in error
  assert message in error


def test_a_term_that_scores_steps():
  config = base.get_config('process_grpo')
  config.rollout.rewards = r"env + exact(step_end='\n\n', gain=True, weight=.5)"
  settings = resolve_settings(config)
  term = reward_terms.make_reward_pipeline(settings, None, None).terms['exact']
  assert (term.step_end, term.gain, term.weight) == ('\n\n', True, 0.5)
  config.rollout.rewards = 'exact(gain=True)'
  with pytest.raises(ConfigError, match='needs step_end'):
    reward_terms.validate_rewards(resolve_settings(config))


def test_runs_that_play_nothing_are_refused():
  config = base.get_config()
  config.rollout.rewards = 'exact'
  reward_terms.validate_rewards(resolve_settings(config))
  with pytest.raises(ConfigError, match='plays no episodes'):
    config = base.get_config('sft')
    config.rollout.rewards = 'exact'
    reward_terms.validate_rewards(resolve_settings(config))
