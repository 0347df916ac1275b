"""Tenant learner: trains the adapters of many tenants on one frozen model.

Its methods use the device and must run on one thread, the `DeviceThread`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.tinker import row_adapters
from jaxrl.rollout.tinker.row_adapters import Adapters, tenant_axis
from jaxrl.rollout.tinker.tenant_losses import CODES, CROSS_ENTROPY, LossRows
from jaxrl.rollout.tinker.tenant_programs import (
  AdamHyperparameters,
  MuonHyperparameters,
  TenantPrograms,
  TenantState,
  TokenRows,
  buckets_to,
  num_targets,
)
from jaxrl.types import AnyArray, Params, PyTree

ALPHA = 32.0  # what the API scales adapters by, over their rank


@dataclasses.dataclass(frozen=True)
class TrainingRow:
  """One datum: tokens, the targets after each of them, and what its loss reads.

  Attributes:
    tokens: `[n]` int32.
    targets: `[n, K]` int32.
    loss: The name of a loss.
    options: The loss's options.
    inputs: The loss's inputs, `[n]` or, of the weights, `[n, K]`, float32.
    is_flat: Whether the targets came without the axis K.
  """

  tokens: np.ndarray
  targets: np.ndarray
  loss: str = CROSS_ENTROPY
  options: Mapping[str, float] = dataclasses.field(default_factory=dict)
  inputs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  is_flat: bool = True


@dataclasses.dataclass(frozen=True)
class TenantSnapshot:
  """Everything that one tenant's training has produced, on the host.

  Attributes:
    adapters: The parameters, of the tenant's own rank.
    mu: The optimizer's first moments; None for a fresh optimizer.
    nu: Its second moments, zero if it has none; None for a fresh optimizer.
    count: Optimizer steps so far.
  """

  adapters: Adapters
  mu: Adapters | None = None
  nu: Adapters | None = None
  count: int = 0


@dataclasses.dataclass
class Tenant:
  """One tenant's place among those in training.

  Attributes:
    place: Its index in the stack.
    rank: The rank of its adapters.
    count: Optimizer steps so far.
    num_rows: Rows whose gradients wait for an optimizer step.
    lost: Why gradients that should be waiting were lost; '' if none were.
    has_dropped: Whether gradients since the last step were dropped: a request failed.
  """

  place: int
  rank: int
  count: int = 0
  num_rows: int = 0
  lost: str = ''
  has_dropped: bool = False

  @property
  def scale(self) -> float:
    """Returns α / rank."""
    return ALPHA / self.rank


class TenantLearner:
  """Holds the tenants in training and runs their steps.

  Attributes:
    buckets: Padded lengths of rows.
    max_rank: The rank that adapters are padded to.
  """

  def __init__(
    self,
    model: TransformerLM,
    params: Params,
    *,
    max_tenants: int,
    max_rank: int,
    max_length: int,
    step_tokens: int,
  ):
    """Makes room for tenants.

    Args:
      model: The model.
      params: Its parameters, on the device, with layers stacked.
      max_tenants: Tenants in training at the same time.
      max_rank: Their largest rank.
      max_length: Tokens of the longest row.
      step_tokens: Tokens of one program, with padding; a row may be longer.

    Raises:
      ValueError: If rows of the model cannot have adapters of their own.
    """
    row_adapters.check_model(model.config)
    self._config, self._params = model.config, params
    self._programs = TenantPrograms(model)
    self.buckets = buckets_to(max_length)
    self.max_rank, self._max_tenants = max_rank, max_tenants
    self._step_tokens = step_tokens
    self._tenants: dict[int, Tenant] = {}
    self._state = self._empty_state()

  def _empty_state(self) -> TenantState:
    make = lambda: row_adapters.empty_stack(  # noqa: E731
      self._config, self._max_tenants, self.max_rank
    )
    state = TenantState(make(), make(), make(), make())
    # On the model's devices: elsewhere, programs would be compiled once more.
    return jax.device_put(state, jax.tree.leaves(self._params)[0].sharding)

  @property
  def num_free(self) -> int:
    """Returns how many more tenants there is room for."""
    return self._max_tenants - len(self._tenants)

  def bucket(self, length: int) -> int:
    """Returns the padded length of a row of `length` tokens."""
    return next(size for size in self.buckets if size >= length)

  def rows_per_step(self, bucket: int) -> int:
    """Returns how many rows the program of a bucket has."""
    return max(1, self._step_tokens // bucket)

  def add(self, snapshot: TenantSnapshot) -> Tenant:
    """Takes a tenant in.

    Args:
      snapshot: Where its training starts.

    Raises:
      RuntimeError: If there is no room.
    """
    taken = self._tenants.keys()
    place = next((i for i in range(self._max_tenants) if i not in taken), None)
    if place is None:
      raise RuntimeError(f'there is room for {self._max_tenants} tenants, and no more')
    rank = next(iter(snapshot.adapters.values()))[0].shape[-1]
    tenant = self._tenants[place] = Tenant(place, rank)
    self.load(tenant, snapshot)
    return tenant

  def remove(self, tenant: Tenant) -> None:
    """Frees a tenant's place."""
    if self._tenants.get(tenant.place) is tenant:
      del self._tenants[tenant.place]

  def load(self, tenant: Tenant, snapshot: TenantSnapshot) -> None:
    """Replaces a tenant's training by a snapshot of the same rank."""
    zeros = jax.tree.map(np.zeros_like, snapshot.adapters)
    parts = snapshot.adapters, zeros, snapshot.mu or zeros, snapshot.nu or zeros
    padded = [row_adapters.pad_rank(part, self.max_rank) for part in parts]
    self._put(tenant, TenantState(*padded))
    tenant.count, tenant.num_rows, tenant.lost = snapshot.count, 0, ''
    tenant.has_dropped = False

  def _put(self, tenant: Tenant, own: TenantState) -> None:
    place = np.int32(tenant.place)
    self._state = self._programs.put_tenant(self._state, place, own)

  def snapshot(self, tenant: Tenant) -> TenantSnapshot:
    """Copies a tenant's training to the host."""

    def own(tree: Adapters) -> Adapters:
      copies = {
        name: tuple(
          np.asarray(jnp.take(x, tenant.place, tenant_axis(name))) for x in pair
        )
        for name, pair in tree.items()
      }
      return row_adapters.cut_rank(copies, tenant.rank)

    state = self._state
    return TenantSnapshot(own(state.stack), own(state.mu), own(state.nu), tenant.count)

  def run(
    self, rows: Sequence[tuple[Tenant, TrainingRow]], *, backward: bool
  ) -> list[tuple[np.ndarray, float]]:
    """Runs rows of one bucket in one program.

    Args:
      rows: At most `rows_per_step` rows, with their tenants.
      backward: Whether to add their gradients to the tenants' sums.

    Returns:
      Each row's log-probs `[n, K]` and loss.
    """
    bucket = self.bucket(max(len(row.tokens) for _, row in rows))
    token_rows, loss_rows = self._arrays(rows, bucket)
    try:
      if backward:
        state, logprobs, losses = self._programs.forward_backward(
          self._params, self._state, token_rows, loss_rows
        )
        self._state = state
      else:
        logprobs, losses = self._programs.forward(
          self._params, self._state, token_rows, loss_rows
        )
      logprobs, losses = np.asarray(logprobs), np.asarray(losses)
    except Exception as error:
      self._recover(error)
      raise
    results = []
    for i, (tenant, row) in enumerate(rows):
      tenant.num_rows += backward
      shape = row.targets.shape
      results.append((logprobs[i, : shape[0], : shape[1]], float(losses[i])))
    return results

  def _recover(self, error: Exception) -> None:
    """Makes new arrays in place of those that a failed program was given for good."""
    if not any(x.is_deleted() for x in jax.tree.leaves(self._state)):
      return
    self._state = self._empty_state()
    for tenant in self._tenants.values():
      tenant.lost = f'the device failed ({type(error).__name__}): load a saved state'

  def _arrays(
    self, rows: Sequence[tuple[Tenant, TrainingRow]], bucket: int
  ) -> tuple[TokenRows, LossRows]:
    number = self.rows_per_step(bucket)
    width = num_targets(max(row.targets.shape[1] for _, row in rows))
    tokens = np.zeros((number, bucket), np.int32)
    targets = np.zeros((number, bucket, width), np.int32)
    lengths, codes = np.zeros(number, np.int32), np.zeros(number, np.int32)
    tenants = np.full(number, self._max_tenants, np.int32)
    scales, beta = np.ones(number, np.float32), np.zeros(number, np.float32)
    mask = np.zeros((number, bucket), bool)
    weights = np.zeros((number, bucket, width), np.float32)
    columns = {
      name: np.zeros((number, bucket), np.float32)
      for name in ('logprobs', 'advantages', 'sequence_ratio_mask')
    }
    columns['clip_low_threshold'] = np.full((number, bucket), 0.8, np.float32)
    columns['clip_high_threshold'] = np.full((number, bucket), 1.2, np.float32)
    for i, (tenant, row) in enumerate(rows):
      n, k = row.targets.shape
      tokens[i, :n], lengths[i], targets[i, :n, :k] = row.tokens, n, row.targets
      tenants[i], scales[i], mask[i, :n] = tenant.place, tenant.scale, True
      codes[i], beta[i] = CODES[row.loss], row.options.get('beta', 0.0)
      weights[i, :n, :k] = row.inputs.get('weights', np.ones((n, k), np.float32))
      columns['sequence_ratio_mask'][i, :n] = 1
      for name, column in columns.items():
        value = row.inputs.get(name, row.options.get(name))
        if value is not None:
          column[i, :n] = value
    return TokenRows(tokens, lengths, targets, tenants, scales), LossRows(
      codes,
      mask,
      weights,
      columns['logprobs'],
      columns['advantages'],
      columns['sequence_ratio_mask'] > 0,
      columns['clip_low_threshold'],
      columns['clip_high_threshold'],
      beta,
    )

  def discard_gradients(self, tenant: Tenant) -> None:
    """Forgets the gradients of a tenant's rows since its last step."""
    self._state = _zero_gradients(self._state, np.int32(tenant.place))
    tenant.num_rows = 0

  def adam_step(self, tenant: Tenant, options: Mapping[str, float]) -> float:
    """Takes a step of AdamW with a tenant's gradients.

    Args:
      tenant: The tenant.
      options: The fields of `AdamHyperparameters`.

    Returns:
      The norm of the gradient before it was clipped. If it is not finite, no step has
      been taken.
    """
    hyperparameters = AdamHyperparameters(**_scalars(options))
    return self._step(tenant, self._programs.adam_step, hyperparameters)

  def muon_step(self, tenant: Tenant, options: Mapping[str, float]) -> float:
    """Takes a step of Muon with a tenant's gradients.

    Args:
      tenant: The tenant.
      options: The fields of `MuonHyperparameters`.

    Returns:
      As `adam_step`.
    """
    hyperparameters = MuonHyperparameters(**_scalars(options))
    return self._step(tenant, self._programs.muon_step, hyperparameters)

  def _step(self, tenant: Tenant, program: Any, hyperparameters: PyTree) -> float:
    tenant.count += 1
    tenant.num_rows = 0
    try:
      own = self._programs.take_tenant(self._state, np.int32(tenant.place))
      own, norm = program(own, np.int32(tenant.count), hyperparameters)
      if math.isfinite(norm):
        self._put(tenant, own)
      else:  # weights and moments would be lost
        tenant.count -= 1
        self.discard_gradients(tenant)
      return float(norm)
    except Exception as error:
      self._recover(error)
      raise


def _scalars(options: Mapping[str, float]) -> dict[str, np.float32]:
  return {name: np.float32(value) for name, value in options.items()}


def _zero(state: TenantState, place: PyTree) -> TenantState:
  def zero(x: AnyArray, name: str) -> AnyArray:
    axis = tenant_axis(name)
    blank = jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    return jax.lax.dynamic_update_index_in_dim(x, blank, place, axis)

  totals = {
    name: tuple(zero(x, name) for x in pair) for name, pair in state.totals.items()
  }
  return dataclasses.replace(state, totals=totals)


_zero_gradients = jax.jit(_zero, donate_argnums=0)
