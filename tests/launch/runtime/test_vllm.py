"""Whole runs whose rollouts a real vLLM serves."""

import asyncio
import multiprocessing

import jax
import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.model_loading import random_config
from launch import evaluate
from launch.logging.console import Console
from launch.settings import command_line
from launch.settings.resolve import resolve_settings
from tests.launch import runs
from tests.launch.runtime.test_inference_job import same
from tests.rollout.vllm import needs

pytestmark = [*needs.VLLM, pytest.mark.ray, pytest.mark.xdist_group('ray')]
OPTIONS = (
  '--config.cluster.ray=true',
  '--config.num_steps=4',
  '--config.sft.num_steps=0',
  '--config.eval.interval=0',
  '--config.checkpoint.save_interval=0',
  runs.model(head_dim=32),
  '--config.optimizer.learning_rate=0.01',
)


def test_a_run_learns_from_what_vllm_plays(ray, tmp_path):
  recorder = runs.record(
    tmp_path, *OPTIONS, '--config.rollout.engine=vllm(block_size=32)'
  )
  assert [step for step, _ in recorder.metrics] == [0, 1, 2, 3]
  rows = [metrics for _, metrics in recorder.metrics]
  # Each step is played with that step's weights, which differ from those before.
  assert all(row['optimizer/grad_norm'] > 0 for row in rows)
  assert all(row['weights/changed'] > 0.9 for row in rows[1:])
  for step, kind, groups, _ in recorder.played:
    for row in (row for group in groups for row in group):
      assert kind == 'train' and row.action_mask.any()
      assert set(row.weights_version[row.action_mask]) == {step}
      assert np.all(row.rollout_logprobs[row.action_mask] < 0)
  # vLLM's log-probs are the learner's, every step: it serves what was just learned.
  assert all(row['mismatch/logprob_difference'] < 1e-4 for row in rows)


def test_options_that_vllm_refuses_end_the_run_with_its_words(ray, tmp_path, capsys):
  engine = '--config.rollout.engine=vllm(quantization="nonsense")'
  status = runs.main(tmp_path, *OPTIONS, engine, config=runs.VARIED)
  assert status != 0
  assert 'vLLM refuses the options' in capsys.readouterr().err


def test_a_checkpoint_is_scored_by_vllm_as_by_jax(ray, tmp_path):
  shape = model_loading.random_config(hidden_size=64, num_layers=1, head_dim=32)
  options = {'value_head': False, 'dtype': 'float32', 'remat': 'none'}
  texts = [f'What is {i} + {i}?' for i in range(20)]
  model_loading.create_model(
    tmp_path / 'model', shape, texts, jax.random.key(3), **options
  )

  def scored(*options):
    command = command_line.parse([f'--config={runs.VARIED}', *options], evaluate.FLAGS)
    config = command_line.load(command)
    evaluate.prepare_evaluation(
      config, {**evaluate.FLAGS, 'checkpoint': f'{tmp_path}/model'}
    )
    console = Console()
    job = evaluate.build_evaluation(resolve_settings(config), console)
    return asyncio.run(evaluate.play_evaluation(job, evaluate.TagProgress(console)))

  here, groups = scored()
  there, others = scored(
    '--config.cluster.ray=true', '--config.rollout.engine=vllm(block_size=32)'
  )
  assert here == there
  rows, rows_ = ([row for group in g for row in group] for g in (groups, others))
  assert len(rows) == 8 and all(len(row.tokens) for row in rows)
  same(rows, rows_, atol=1e-4)


@pytest.mark.slow
def test_an_actor_ends_when_its_vllm_dies(ray, tmp_path):
  """So that the fleet finds it lost, and the router goes on elsewhere."""
  import psutil
  from ray.exceptions import RayActorError

  from jaxrl.rollout.weights.publisher import VersionWriter
  from jaxrl.rollout.weights.snapshots import snapshot
  from jaxrl.rollout.weights.transport import SharedMemoryTransport
  from jaxrl.types import SamplingParams
  from launch.runtime import weight_transport
  from launch.runtime.ray_engines import VllmActor

  policy = model_loading.create_model(
    tmp_path / 'model',
    random_config(vocab_size=300, hidden_size=64, num_layers=1),
    ['some text'],
    jax.random.key(0),
    value_head=False,
    dtype='float32',
    remat='none',
  )
  memory = SharedMemoryTransport()
  publisher = VersionWriter(memory)
  publisher.publish(1, snapshot(policy.params))
  connect = weight_transport.make_connector(memory)
  actor_class = ray.remote(VllmActor).options(max_concurrency=100, num_cpus=0)
  actor = actor_class.remote(policy.folder, connect, max_num_seqs=2, max_length=64)
  assert ray.get(actor.pull.remote(1), timeout=300) == publisher.digest
  assert ray.get(actor.health.remote(60.0)) == ''
  rules = SamplingParams(max_tokens=5)
  assert len(ray.get(actor.generate.remote('a', [1, 2], rules)).tokens) == 5
  # Not found by their titles, which depend on how the environment is laid out.
  children = actor.__ray_call__.remote(
    lambda _: [child.pid for child in multiprocessing.active_children()]
  )
  cores = [psutil.Process(pid) for pid in ray.get(children)]
  assert cores
  for core in cores:
    core.kill()
  with pytest.raises(RayActorError):
    for turn in range(100):
      ray.get(actor.generate.remote(f'b/{turn}', [1, 2], rules), timeout=60)
  assert not psutil.wait_procs(cores, timeout=30)[1]
  publisher.close()
  memory.close()
