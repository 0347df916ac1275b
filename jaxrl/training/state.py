"""What training changes, and everything static that a step depends on."""

import dataclasses
from typing import Any

import jax

from jaxrl.algorithms import compose
from jaxrl.functional import marks
from jaxrl.models.model import Model
from jaxrl.training import critic_warmup, teacher_columns
from jaxrl.training.moments import PLAIN, Memory
from jaxrl.types import Algorithm, Params

# Columns every batch on the devices has; others only when a part reads them.
ALWAYS = (
  'tokens',
  'segment_ids',
  'action_mask',
  'rollout_logprobs',
  'rewards',
  'task_ids',
  'run_ids',
  'step_ids',
  'expert_mask',
  'loss_weights',
)
WIDE = ('weights_version',)  # [B, T], when read
NARROW = ('pair_ids', 'state_hash', 'greedy_mask')  # [B], when read
# Slots whose parts are called in each update.
AFTER = (
  'prepare',
  'policy_loss',
  'kl_loss',
  'entropy_loss',
  'value_loss',
  'correction',
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """params: float32. opt_state: as the optimizer's kind keeps it.

  algorithm_state: what adaptive parts carry, by slot.
  """

  params: Params
  opt_state: Any
  algorithm_state: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Spec:
  """Everything static that a step depends on; hashable, so programs are shared.

  algorithm: without its numeric options. micro_batches: how many a minibatch is
  split into. packed: whether the model runs on packed rows, in as many micro-batches
  as they fill. entropy: whether the exact entropy is computed though no loss reads it.
  top_k: how many of a teacher's tokens a column of them has. memory: the optimizer's.
  """

  model: Model
  algorithm: Algorithm
  micro_batches: int = 1
  entropy: bool = False
  top_k: int = 0
  memory: Memory = PLAIN
  packed: bool = False

  @property
  def split(self) -> bool:
    """Whether a minibatch is, or may be, more than one micro-batch."""
    return self.packed or self.micro_batches > 1

  @property
  def needs(self) -> frozenset[str]:
    return compose.needs(self.algorithm)

  @property
  def reads(self) -> frozenset[str]:
    """Every column that any part reads."""
    return compose.reads(self.algorithm)

  @property
  def reads_before(self) -> frozenset[str]:
    """The columns read before the first update of a batch."""
    return compose.reads_before(self.algorithm)

  @property
  def reads_after(self) -> frozenset[str]:
    """The columns read in each update."""
    return compose.reads(self.algorithm, *AFTER)

  @property
  def prepares(self) -> bool:
    """Whether anything happens to a batch before its first update."""
    scored = self.needs & {'old_logprobs', 'ref_logprobs', 'values'}
    return bool(scored or self.reads_before)

  @property
  def teacher_columns(self) -> tuple[str, ...]:
    """The columns that teachers add to a batch on the devices."""
    return teacher_columns.columns(self.algorithm)

  @property
  def batch_columns(self) -> tuple[str, ...]:
    """The columns the learner hands to the devices, those of teachers left out."""
    replay = getattr(self.model, 'router_replay', False)
    routed = ('routed_experts',) if replay else ()
    return ALWAYS + tuple(n for n in (*WIDE, *NARROW) if n in self.reads) + routed

  def init_state(self) -> dict[str, Any]:
    """What the algorithm carries from update to update, before the first."""
    state = compose.init_state(self.algorithm)
    if self.algorithm.critic_warmup:
      state['critic_warmup'] = critic_warmup.init()
    return state

  def carries(self, slot: str) -> bool:
    """Whether the part in `slot` has a state of its own."""
    part = getattr(self.algorithm, slot)
    return part is not None and bool(marks.init_state(compose.function_of(part)))
