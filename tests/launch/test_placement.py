"""Who has which devices, and how much of their memory, on machines not here."""

import pytest

from configs import debug, qwen3_0_6b
from jaxrl.options import ConfigError
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.training.learner import Learner
from launch.runtime import placement
from launch.runtime.placement import NO_DEVICES_ENV, ActorResources, ClusterNode
from launch.settings.resolve import resolve_settings
from tests.launch import runs


def config(layout='auto', engine='jax', engines=1, ray=True):
  config_dict = debug.get_config()
  config_dict.rollout.engine = engine
  config_dict.cluster.update(ray=ray, placement=layout, num_engines=engines)
  return resolve_settings(config_dict)


def qwen(layout, engine='vllm', sync='fixed'):
  config_dict = qwen3_0_6b.get_config()
  config_dict.weight_sync.policy = sync
  config_dict.cluster.placement, config_dict.rollout.engine = layout, engine
  return resolve_settings(config_dict)


def fraction(seat):
  return float(seat.env['XLA_PYTHON_CLIENT_MEM_FRACTION'])


def visible(seat):
  return list(seat.devices)


@pytest.mark.parametrize('layout', ['auto', 'colocated'])
def test_one_gpu_is_shared_within_one_budget(layout):
  plan = placement.plan_placement(qwen(layout), [ClusterNode(gpus=1)])
  (learner,), (engine,) = plan.learners, plan.engines
  assert plan.name == 'colocated' and plan.bundles == ({'GPU': 1.0},)
  assert learner.bundle == engine.bundle == 0
  assert visible(learner) == visible(engine) == [0]
  assert fraction(learner) + engine.options['gpu_memory_utilization'] == 0.9
  assert engine.env['JAX_PLATFORMS'] == 'cpu'  # of vLLM: its JAX takes nothing
  assert plan.others == ActorResources(NO_DEVICES_ENV)


@pytest.mark.parametrize('layout', ['auto', 'split'])
def test_eight_gpus_are_split_by_the_same_config(layout):
  plan = placement.plan_placement(qwen(layout), [ClusterNode(gpus=8)])
  (learner,) = plan.learners
  assert plan.name == 'split' and learner.claims == {'GPU': 4.0}
  assert [seat.claims for seat in plan.engines] == [{'GPU': 1.0}] * 4
  seats = [*plan.learners, *plan.engines]
  assert [seat.bundle for seat in seats] == list(range(5))
  assert [plan.bundles[seat.bundle] for seat in seats] == [s.claims for s in seats]
  assert fraction(learner) == 0.9
  assert {s.options['gpu_memory_utilization'] for s in plan.engines} == {0.9}
  # Ray shows an actor the devices that it claims; whoever claims none sees none.
  assert all(placement.visible_devices_env(seat, ()) == {} for seat in seats)
  assert plan.others.env['CUDA_VISIBLE_DEVICES'] == '' and not plan.others.claims
  assert plan.others.env['JAX_PLATFORMS'] == 'cpu'


def test_eight_gpus_are_shared_where_that_is_asked_for():
  plan = placement.plan_placement(qwen('colocated(memory=.8)'), [ClusterNode(gpus=8)])
  (learner,) = plan.learners
  assert visible(learner) == list(range(8)) and fraction(learner) == 0.4
  assert [visible(seat) for seat in plan.engines] == [[i] for i in range(8)]
  assert {s.options['gpu_memory_utilization'] for s in plan.engines} == {0.4}
  assert not any(seat.claims for seat in plan.engines)


@pytest.mark.parametrize('layout', ['auto', 'split(learners=2)', 'colocated'])
def test_without_a_learner_engines_may_have_every_device(layout):
  nodes = [ClusterNode(gpus=2), ClusterNode(gpus=4)]
  plan = placement.plan_placement(qwen(layout), nodes, has_learner=False)
  assert not plan.learners and len(plan.engines) == 6
  assert [plan.bundles[s.bundle] for s in plan.engines] == [{'GPU': 1.0}] * 6
  assert {s.options['gpu_memory_utilization'] for s in plan.engines} == {0.9}
  assert (
    plan.others == ActorResources(NO_DEVICES_ENV)
    and 'engines alone: 6 × 1 GPU' in plan.description
  )
  asks = config(layout, 'vllm(tensor_parallel_size=4)', engines=2)
  with pytest.raises(ConfigError, match='2 engines of 4 GPU each do not fit on 2'):
    placement.plan_placement(asks, nodes, has_learner=False)
  assert not placement.plan_placement(
    config('split(learners=2)'), [ClusterNode()], has_learner=False
  ).bundles


def test_shared_devices_are_called_what_they_are_on_their_machine():
  engine = 'vllm(tensor_parallel_size=2)'
  plan = placement.plan_placement(qwen('colocated', engine), [ClusterNode(gpus=4)])
  assert all('CUDA_VISIBLE_DEVICES' not in s.env for s in plan.engines)
  seen = [
    placement.visible_devices_env(seat, ['4', '5', '7', 'GPU-8f'])
    for seat in (*plan.learners, *plan.engines)
  ]
  names = [env['CUDA_VISIBLE_DEVICES'] for env in seen]
  assert names == ['4,5,7,GPU-8f', '4,5', '7,GPU-8f']
  assert {env['RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES'] for env in seen} == {'1'}


def test_engines_of_several_devices_and_a_share_of_their_own():
  engine = 'vllm(tensor_parallel_size=2, gpu_memory_utilization=.6)'
  plan = placement.plan_placement(qwen('colocated', engine), [ClusterNode(gpus=8)])
  assert [visible(seat) for seat in plan.engines] == [[0, 1], [2, 3], [4, 5], [6, 7]]
  assert all(not seat.options for seat in plan.engines)  # they say it themselves
  assert round(fraction(plan.learners[0]), 6) == 0.3
  plan = placement.plan_placement(qwen('split', engine), [ClusterNode(gpus=8)])
  assert [seat.claims for seat in plan.engines] == [{'GPU': 2.0}] * 2


def test_two_machines_have_a_process_of_the_learner_each():
  two = [ClusterNode(gpus=4), ClusterNode(), ClusterNode(gpus=4)]
  plan = placement.plan_placement(
    config('split(learners=2, devices=2)', engines=4), two
  )
  assert [seat.claims for seat in plan.learners] == [{'GPU': 2.0}] * 2
  assert len(plan.engines) == 4 and {fraction(s) for s in plan.engines} == {0.9}
  shared = placement.plan_placement(config('colocated', engines=0), two)
  assert [seat.bundle for seat in shared.learners] == [0, 1]
  assert [seat.bundle for seat in shared.engines] == [0] * 4 + [1] * 4
  assert [visible(seat) for seat in shared.engines] == [[0], [1], [2], [3]] * 2


@pytest.mark.parametrize(
  'machines, learners, devices, engines',
  [
    ([1] * 4, 2, 1, 2),
    ([2] * 3, 1, 2, 4),
    ([8] * 4, 2, 8, 16),
    ([8] * 2, 1, 8, 8),
    ([1] * 3, 1, 1, 2),
    ([8, 4, 4, 8], 3, 4, 12),  # as many as the least of them has
  ],
)
def test_by_itself_a_learner_has_about_half_in_whole_machines(
  machines, learners, devices, engines
):
  plan = placement.plan_placement(
    config(engines=0), [ClusterNode(gpus=n) for n in machines]
  )
  assert [seat.claims for seat in plan.learners] == [{'GPU': float(devices)}] * learners
  assert [seat.claims for seat in plan.engines] == [{'GPU': 1.0}] * engines
  assert len(plan.bundles) == learners + engines


def test_whole_machines_leave_room_for_the_engines():
  plan = placement.plan_placement(config(engines=2), [ClusterNode(gpus=2)] * 4)
  assert [seat.claims for seat in plan.learners] == [{'GPU': 2.0}] * 3
  assert len(plan.engines) == 2
  large = 'vllm(tensor_parallel_size=2)'
  plan = placement.plan_placement(config('auto', large, 0), [ClusterNode(gpus=3)] * 4)
  assert [seat.claims for seat in plan.learners] == [{'GPU': 3.0}] * 2
  assert len(plan.engines) == 2  # on each machine that is left one device is over
  with pytest.raises(ConfigError, match='one engine would need 2 GPU'):
    placement.plan_placement(config('auto', large, 0), [ClusterNode(gpus=1)] * 4)


def test_tpus_are_split_and_never_shared():
  plan = placement.plan_placement(
    config('auto', engines=0), [ClusterNode(tpus=4), ClusterNode(tpus=4)]
  )
  assert plan.learners[0].claims == {'TPU': 4.0}
  assert [seat.claims for seat in plan.engines] == [{'TPU': 1.0}] * 4
  with pytest.raises(ConfigError, match='a TPU can only be used by one process'):
    placement.plan_placement(config('colocated'), [ClusterNode(tpus=8)])


def test_hosts_without_accelerators_have_no_budget_and_say_so(monkeypatch):
  plan = placement.plan_placement(config(engines=2), [ClusterNode(), ClusterNode()])
  assert (
    not plan.learners
    and plan.engines == (ActorResources(), ActorResources())
    and not plan.bundles
  )
  assert 'no budget' in plan.description
  monkeypatch.setenv('XLA_FLAGS', f'--xla_some=1 {placement.DEVICE_COUNT_FLAG}=8')
  plan = placement.plan_placement(
    config('split(learners=2, devices=4)'), [ClusterNode()]
  )
  assert [seat.bundle for seat in plan.learners] == [0, 1]
  flags = f'--xla_some=1 {placement.DEVICE_COUNT_FLAG}=4'
  assert {seat.env['XLA_FLAGS'] for seat in plan.learners} == {flags}


@pytest.mark.parametrize(
  'layout, engine, engines, gpus, message',
  [
    ('colocated(learner=.6)', 'vllm(gpu_memory_utilization=.5)', 1, 1, '0.6 [+] 0.5'),
    ('colocated(memory=.5, learner=.5)', 'jax', 1, 1, 'each be above 0'),
    ('split', 'vllm(gpu_memory_utilization=.95)', 1, 8, 'budget of memory=0.9'),
    ('split', 'jax', 1, 1, 'use colocated'),
    ('split(devices=8)', 'jax', 0, 8, 'exceed the 8'),
    ('split(devices=4)', 'jax', 5, 8, '5 × 1 for engines'),
    ('colocated', 'jax', 9, 8, '9 engines'),
    ('colocated(sleep=True)', 'jax', 1, 1, 'only vLLM can give its memory back'),
    ('colocated(sleep=True)', 'vllm', 1, 0, 'there is none here .devices: CPU.'),
    ('colocated(sleep=True, learner=.3)', 'vllm', 1, 1, 'leave it out'),
    (
      'colocated(sleep=True)',
      'vllm(gpu_memory_utilization=.95)',
      1,
      1,
      'budget of memory=0.9',
    ),
    ('split(memory=1.2)', 'jax', 1, 8, r'memory=1\.2 must be in \(0, 1\]'),
    ('split(learner=2)', 'jax', 1, 8, "Did you mean 'learners'"),
    ('colocate', 'jax', 1, 8, "Did you mean 'colocated'"),
  ],
)
def test_what_does_not_fit_is_told_with_its_numbers(
  layout, engine, engines, gpus, message
):
  with pytest.raises(ConfigError, match=message):
    placement.plan_placement(config(layout, engine, engines), [ClusterNode(gpus=gpus)])


def test_in_turns_each_has_the_whole_budget():
  plan = placement.plan_placement(qwen('colocated(sleep=True)'), [ClusterNode(gpus=2)])
  (learner,) = plan.learners
  assert learner.env == placement.ALLOCATOR_ENV and visible(learner) == [0, 1]
  wanted = {'gpu_memory_utilization': 0.9, 'enable_sleep_mode': True}
  assert [seat.options for seat in plan.engines] == [wanted] * 2
  assert [visible(seat) for seat in plan.engines] == [[0], [1]]
  assert 'in turns' in plan.description
  asks = qwen('colocated(sleep=True)', 'vllm(gpu_memory_utilization=.8)')
  (seat,) = placement.plan_placement(asks, [ClusterNode(gpus=1)]).engines
  assert seat.options == {'enable_sleep_mode': True} and seat.memory == 0.8
  pushing = qwen('colocated(sleep=True)', sync='trainer')
  with pytest.raises(ConfigError, match='policy=trainer sends it weights'):
    placement.plan_placement(pushing, [ClusterNode(gpus=1)])
  # Where nobody learns there is no turn to take.
  (seat,) = placement.plan_placement(
    asks, [ClusterNode(gpus=1)], has_learner=False
  ).engines
  assert 'enable_sleep_mode' not in seat.options


def test_a_process_has_the_devices_of_one_machine():
  with pytest.raises(ConfigError, match='no machine has more than 4: raise learners'):
    placement.plan_placement(
      config('split(devices=6)', engines=2), [ClusterNode(gpus=4)] * 2
    )


def test_apart_needs_ray():
  with pytest.raises(ConfigError, match='ray=true'):
    config('split', ray=False)


def test_one_process_keeps_within_its_share():
  assert placement.single_process_env(config(ray=False)) == {}
  env = placement.single_process_env(config('colocated(memory=.7)', ray=False))
  assert env == {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.7'}
  with pytest.raises(ConfigError, match='share the memory of one process'):
    placement.single_process_env(config('colocated(learner=.4)', ray=False))


@pytest.mark.slow
def test_in_one_process_the_engine_sleeps_while_the_learner_learns(
  tmp_path, monkeypatch
):
  caches, asleep = [], []
  update, sleep = Learner.update, JaxEngine.sleep

  async def watched_sleep(self):
    assert self._state is not None
    await sleep(self)
    asleep.append(self)

  async def watched_update(self, groups):
    caches.append(asleep[-1]._state)
    return await update(self, groups)

  monkeypatch.setattr(JaxEngine, 'sleep', watched_sleep)
  monkeypatch.setattr(Learner, 'update', watched_update)
  options = (
    '--config.sft.num_steps=0',
    '--config.num_steps=2',
    '--config.eval.interval=0',
    '--config.checkpoint.save_interval=0',
  )
  placed = '--config.cluster.placement=colocated(sleep=True)'
  recorder = runs.record(tmp_path, *options, placed)
  assert caches == [None, None]
  trained = [row for _, row in recorder.metrics if 'loss/total' in row]
  assert len(trained) == 2 and all(row['reward/mean'] > 0 for row in trained)
