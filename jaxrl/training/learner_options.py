"""Learner options say how a learner divides a batch, what it computes and reports."""

import dataclasses
import functools

from jaxrl.component_table import Component
from jaxrl.options import Options, option
from jaxrl.training.batching.packing_plan import Packing, make_packing


@dataclasses.dataclass(frozen=True)
class LearnerOptions(Options):
  """How a learner divides a batch, what it computes and reports."""

  num_minibatches: int = option(1, 'Optimizer updates in one pass over a batch.', low=1)
  num_micro_batches: int = option(
    1,
    'Parts of a minibatch whose gradients are summed, to save memory; 0 takes as many '
    'as the memory needs, where the launcher chooses.',
    low=0,
  )
  packing: Component | Packing | None = option(
    None,
    "Runs the model on packed rows, as in 'first_fit(tokens=8192)', whose tokens fill "
    "micro-batches; '' for one sequence per row. On GPUs, attention needs a mask in "
    'memory only in packed rows of models with windows.',
  )
  ppo_epochs: int = option(1, 'Passes over a batch.', low=1)
  log_entropy: bool = option(
    True, 'Whether the exact entropy is reported even if no component reads it.'
  )
  logprob_mismatch_warn: float = option(
    0.1,
    'Mean |Δlog-prob| between rollout and learner above which it warns.',
    low=0,
  )
  engine_rounding: bool = option(
    False,
    "Whether the learner's forward pass rounds matrices to the 8 bits that the engine "
    'has them in, as with rollout.engine=\'jax(weights_dtype="int8")\'; gradients pass '
    'as if it did not.',
  )

  @functools.cached_property
  def packing_plan(self) -> Packing | None:
    """How sequences share rows; None gives each sequence its own."""
    return make_packing(self.packing)
