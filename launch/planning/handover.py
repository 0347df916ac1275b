"""What the learner's devices hold of the weights that engines are given, and when."""

import functools
import math
from typing import Any

import jax

from jaxrl.models import lora, names
from jaxrl.rollout import sync
from jaxrl.rollout.weights.changes import keeps
from jaxrl.rollout.weights.direct import Sending
from jaxrl.training.learner import Learner
from jaxrl.types import Params
from launch import weights
from launch.planning import abstract
from launch.planning.abstract import Run
from launch.planning.program import Program, per_device

# Copies on their way while the learner learns, by what it waits for; where that is
# never, the newest may wait beside the one that is sent. See `sync.Swaps`.
COPIES = {'now': 0, 'last': 1, 'never': 2}


def traced(run: Run, learner: Learner) -> dict[str, Any]:
  """The program that merges adapters for the engines, if there are any: by its name."""
  own = learner.model.config.lora
  if not run.sends or own is None or own.send == 'adapters':
    return {}
  return {'merge': learner._served.merge.trace(learner.params)}


def held(run: Run, learner: Learner) -> dict[str, float]:
  """Bytes of each device that are there in every phase, by part."""
  style, plan = sync.parse(run.config.rollout.sync), weights.plan(run.config)
  given, found = _given(learner), {}
  if count := COPIES[style.waits]:
    found['versions on their way'] = count * per_device(given)
  if plan.options.get('on_device'):
    cast = abstract.cast(given, plan.options.get('dtype'))
    kept = (x for x in jax.tree.leaves(cast) if keeps(_share(x), x.dtype))
    found['version before'] = per_device(list(kept))
  return found


def passing(run: Run, learner: Learner, merge: Program | None) -> dict[str, float]:
  """Bytes of the fullest device that a version takes while it is published, by part."""
  copied, merging = _copied(run, learner), merge.temporaries if merge else 0.0
  found = {'merged weights': per_device(_given(learner))} if merge else {}
  return {**found, 'gradients': 0.0, 'temporaries': max(copied, merging)}


def _given(learner: Learner) -> Params:
  """What `Learner.weights` gives, as it lies on the learner's devices: shapes."""
  config, params = learner.model.config, learner.params
  if config.lora and config.lora.send == 'adapters':
    return params
  merge = functools.partial(lora.merged, config, dtype=learner.model.dtype)
  return jax.tree.map(
    lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own.sharding),
    jax.eval_shape(merge, params),
    lora.without(params),
  )


def _share(x: jax.ShapeDtypeStruct) -> int:
  """Elements of a device's share of an array."""
  assert x.sharding is not None
  return math.prod(x.sharding.shard_shape(x.shape))


def _copied(run: Run, learner: Learner) -> float:
  """What a transport copies on a device before anything of it goes on its way."""
  plan = weights.plan(run.config)
  dtype = plan.options.get('dtype')
  sent = abstract.cast(_given(learner), dtype)
  if plan.name == 'inprocess':  # anew for the engine, whole, beside what it serves yet
    return per_device(abstract.served(run, dtype))
  if plan.direct:
    width = jax.numpy.dtype(dtype or 'float32').itemsize
    largest = max(math.prod(tensor.shape) for tensor in names.tensors(run.shape))
    return max(plan.options.get('buffer_bytes', Sending.buffer_bytes), largest * width)
  if plan.options.get('on_device'):  # a parameter at a time
    return max(per_device(x) for x in jax.tree.leaves(sent))
  return per_device(sent)
