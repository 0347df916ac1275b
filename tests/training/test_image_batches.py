"""Learning from rows with images: the same however a step is split and packed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl import model_loading
from jaxrl.models import lora
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import ConfigError
from jaxrl.training.batching.packing_plan import Packing
from jaxrl.training.checkpointing import Checkpointer, CheckpointError, flatten_by_name
from jaxrl.training.learner import Learner
from jaxrl.training.learner_options import LearnerOptions
from jaxrl.training.optimizers import OptimizerOptions
from jaxrl.training.parallelism.mesh import MeshOptions, make_mesh
from tests.calls import make_algorithm, make_optimizer, parse_call, split_options
from tests.marks import extended
from tests.models import images
from tests.training import toy
from tests.training.test_invariance import SMOOTH

FAMILY = parse_call(
  'qwen3_vl(rope_sections=(2, 1, 1), tower_layers=2, tower_width=16, tower_heads=2, '
  'tower_mlp=24, deepstack_layers=(0,), num_positions=16, patch_size=4, min_pixels=64, '
  'max_pixels=1024)'
)
ADAPTERS = lora.lora_adapters(rank=2, targets='q,up')


def config(train='frozen', **changes):
  sizes = {'vocab_size': 64, 'hidden_size': 16, 'num_layers': 2, 'head_dim': 8}
  sizes |= {'num_heads': 2, 'num_kv_heads': 2, 'intermediate_size': 24}
  base = model_loading.random_config(family=FAMILY, **sizes)
  assert base.vision is not None
  ids = {f'{k}_token': images.cases.IMAGE_TOKENS[v] for k, v in IDS.items()}
  vision = dataclasses.replace(base.vision, train=train, **ids)
  return base.replace(vision=vision, **changes)


IDS = {
  'image': 'image_token_id',
  'video': 'video_token_id',
  'start': 'vision_start_token_id',
  'end': 'vision_end_token_id',
}


@functools.cache
def params(shape):
  """Random numpy arrays, so that none compiles."""
  draw = np.random.default_rng(0)

  def fill(path, x):
    noise = 0.1 * draw.normal(size=x.shape)
    return (noise + (path[-1].key == 'scale')).astype(np.float32)

  shapes = jax.eval_shape(TransformerLM(shape).init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(fill, shapes)


def groups():
  """Equal prompts with one image, with others each, and one of text among them."""
  draw, cut = np.random.default_rng(0), images.PatchProcessor(config().vision)
  one, other, wide = images.SMALL, images.Picture(9, 9, 7), images.WIDE
  members = [[[one]] * 3, [[one], [other], [wide, one]], [[wide], []]]
  image_groups = []
  for number, group in enumerate(members):
    prompts = [images.sequence(cut, 3, *pictures, 2) for pictures in group]
    image_groups.append([])
    for sample, (pictures, prompt) in enumerate(zip(group, prompts, strict=True)):
      row = toy.trajectory(draw, len(prompt) + 5, env_group=number, sample_index=sample)
      row.tokens = np.minimum(row.tokens, images.IMAGE - 1)
      row.tokens[: len(prompt)] = prompt
      row.action_mask = np.arange(len(row.tokens)) >= len(prompt)
      image_groups[-1].append(dataclasses.replace(row, images=pictures))
  return image_groups


def learner(train='frozen', *, adapters=None, remat='none', weights=None, **options):
  shape = config(train, lora=adapters)
  if 'mesh' in options:
    options['mesh'] = make_mesh(MeshOptions(**options['mesh']))
  options = {'num_rows': 8, 'length_buckets': (40,)} | options
  return Learner(
    TransformerLM(shape, remat=remat),
    weights or params(shape),
    make_algorithm('grpo', {'kl_coef': 0.1, 'correction': 'tis'}),
    optimizer=make_optimizer(OptimizerOptions(**SMOOTH)),
    **split_options(LearnerOptions, options),
  )


@functools.cache
def results():
  return {}


async def train(train='full', **options):
  trainer = learner(train, **options)
  metrics = [await trainer.update(groups()) for _ in range(2)]
  return flatten_by_name(jax.tree.map(np.array, trainer.params)), metrics


async def plain():
  if 'plain' not in results():
    results()['plain'] = await train()
  return results()['plain']


EXTENDED = pytest.mark.extended
PACKED = {'packing': Packing(tokens=80, length=0, share_prefix=True)}
TREES = {'packing': dataclasses.replace(PACKED['packing'], share_tree=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
  'options',
  [
    pytest.param(PACKED, marks=EXTENDED, id='packed'),
    pytest.param(TREES, marks=EXTENDED, id='trees'),
    pytest.param({'num_micro_batches': 2}, id='halves'),
    pytest.param(
      {'mesh': {'fsdp': 4, 'tensor': 2}}, id='devices', marks=pytest.mark.extended
    ),
    pytest.param({'mesh': {'data': 4, 'context': 2}}, id='context'),
    pytest.param({'remat': 'full'}, marks=EXTENDED, id='remat'),
  ],
)
async def test_a_step_is_the_same_however_it_is_split(options):
  """Also where rows of a group have equal tokens and different images."""
  wanted, metrics = await plain()
  split_params, others = await train(**options)
  start = flatten_by_name(params(config('full')))
  for name, x in wanted.items():
    assert np.abs(x - start[name]).max() > 1e-5 or name.endswith('qkv.bias'), name
    np.testing.assert_allclose(split_params[name], x, atol=2e-5, err_msg=name)
  for step_metrics, other in zip(metrics, others, strict=True):
    assert step_metrics['kl/reference'] == pytest.approx(
      other['kl/reference'], abs=1e-5
    )
    assert step_metrics['loss/total'] == pytest.approx(other['loss/total'], abs=1e-5)
  assert metrics[1]['kl/reference'] > 1e-6


@pytest.mark.slow  # test_image_episodes lets a learner learn from images
@pytest.mark.parametrize('train_tower', [extended('frozen'), 'lora'])
async def test_the_tower_is_frozen_or_has_adapters(train_tower, tmp_path):
  """What moves, and what a checkpoint keeps and refuses."""
  adapters = ADAPTERS if train_tower == 'lora' else None
  trainer = learner(train_tower, adapters=adapters)
  before = flatten_by_name(jax.tree.map(np.array, trainer.params))
  await trainer.update(groups())
  after = flatten_by_name(jax.tree.map(np.array, trainer.params))
  moved = {name for name, x in after.items() if (x != before[name]).any()}
  tower = {name for name in moved if name.startswith('vision.')}
  if train_tower == 'frozen':
    assert not tower and 'layers.mlp.up.kernel' in moved and 'embedding.table' in moved
    other = params(config('frozen'))
    other = other | {'vision': jax.tree.map(lambda x: x + 1, other['vision'])}
  else:
    assert all('lora_' in name for name in moved)
    assert {'vision.layers.qkv.lora_b', 'vision.merger.mlp.up.lora_b'} <= tower
    assert trainer.merged_params().keys() == params(config()).keys()
    other = None
  checkpointer = Checkpointer(tmp_path)
  await trainer.save(checkpointer, {}, wait=True)
  again = learner(train_tower, adapters=adapters)
  await again.restore(checkpointer)
  for name, x in flatten_by_name(jax.tree.map(np.array, again.params)).items():
    np.testing.assert_array_equal(x, after[name])
  if other is not None:
    again = learner(weights=other)
    with pytest.raises(CheckpointError, match='trained on another model'):
      await again.restore(checkpointer)


async def test_what_cannot_be_learned_is_refused_in_one_line():
  trainer = learner()
  bad = groups()
  bad[1][1].images.pop()
  bad[1][1] = dataclasses.replace(bad[1][1], images=[images.WIDE])
  with pytest.raises(ValueError, match=r'row .*_1_0: image 1 of 1 needs a run of'):
    await trainer.update(bad)
  blind = toy.learner(
    make_algorithm('grpo', {}), kind=TransformerLM, length_buckets=(40,)
  )
  with pytest.raises(ValueError, match='the model that is trained sees none'):
    await blind.update(groups())
  with pytest.raises(ConfigError, match='do not run in parallel'):
    learner(packing=dataclasses.replace(PACKED['packing'], num_parallel=2))
