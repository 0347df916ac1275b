"""Token log-probs, top-k log-probs and entropies are computed from hidden states."""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.chunked_logits import VOCAB_BLOCK, score_in_chunks
from kernels.dispatch import choose, only_on, platform_of

if TYPE_CHECKING:
  from kernels.fused_logprobs import LogprobShards

# A GPU keeps a softmax of at most this share of what JAX may take of a device, rounded
# down to steps, so that a plan and a run agree where they read the memory a little
# differently; or of at most so many bytes where nothing is known of the device.
KEPT_SHARE, KEPT_STEP, KEPT_BYTES = 1 / 8, 2**28, 2**32

# Default positions per chunk: as many as give MAX_LOGITS logits. A large vocabulary
# gets MIN_ROWS instead, so that the matmul with the table is efficient, or as many as
# give MOST_LOGITS logits if that is fewer, to bound the memory.
MAX_LOGITS, MIN_ROWS, MOST_LOGITS = 2**22, 512, 21 * 2**20


class TokenScores(NamedTuple):
  """The results of `token_logprobs`; None for those that were not requested.

  Attributes:
    logprobs: Log-probs of the targets, `[B, T]` float32.
    entropy: Entropy of the distribution at temperature 1, `[B, T]` float32.
    nec: Σ_v p_v²(H + log p_v) at temperature 1, `[B, T]` float32.
    sum_pi_squared: Σ_v p_v² at temperature 1, `[B, T]` float32, without gradient.
    topk_ids: Tokens of the top-k log-probs, `[B, T, K]` int32.
    topk_logprobs: Log-probs of these tokens, `[B, T, K]` float32.
  """

  logprobs: jax.Array
  entropy: jax.Array | None = None
  nec: jax.Array | None = None
  sum_pi_squared: jax.Array | None = None
  topk_ids: jax.Array | None = None
  topk_logprobs: jax.Array | None = None


def token_logprobs(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  entropy: bool = False,
  nec: bool = False,
  sum_pi_squared: bool = False,
  topk_ids: jax.Array | None = None,
  top_k: int = 0,
  softcap: float = 0.0,
  max_rows: int | None = None,
  kernels: str = 'auto',
  platform: str | None = None,
  shards: 'LogprobShards | None' = None,
  kept_bytes: int | None = None,
  interpret: bool = False,
) -> TokenScores:
  """Computes log-probs of targets under softmax(hidden · tableᵀ / temperature).

  The full float32 logits are held in memory only on a CPU, and only if they take 256
  MiB at most and there is a C compiler: their softmax takes their place, and is kept
  for the backward pass. TPU kernels keep one block of the logits on the chip (after Cut
  Your Losses, arXiv 2411.09009) and compute it again in the backward pass. A GPU holds
  a tile of them, and keeps their softmax in the dtype of `hidden` for the backward
  pass, or computes it again if it is too large. The reference holds the logits of at
  most `max_rows` positions at a time, but of at least one position per row, and
  computes them again.

  Args:
    hidden: Hidden states `[B, T, D]`.
    table: Table `[V, D]`, the weight matrix of the LM head.
    targets: Target tokens `[B, T]` int32.
    temperature: Temperature, a scalar.
    entropy: Whether to compute the entropy H, at temperature 1.
    nec: Whether to compute Σ_v p_v²(H + log p_v), at temperature 1.
    sum_pi_squared: Whether to compute Σ_v p_v², at temperature 1.
    topk_ids: More tokens to score at `temperature`, `[B, T, K]` int32.
    top_k: Number K of most likely tokens to find and score instead, in descending
      order; 0 for none.
    softcap: Soft cap on logits: a logit z becomes softcap · tanh(z / softcap). 0 for
      none.
    max_rows: Maximum number of positions at a time in the reference; None for a
      default.
    kernels: Which implementation to use, 'auto' or 'reference'.
    platform: Platform to compile for, 'cpu', 'gpu' or 'tpu'; None for the default
      backend of this process.
    shards: Sharding of `hidden` and `table` on a mesh, which the kernels need; None for
      one device.
    kept_bytes: Bytes of each GPU that the softmax may take which it keeps, see
      `kept_bytes_of`; None for KEPT_BYTES.
    interpret: Whether to run the kernel in Pallas's interpreter, without an
      accelerator.

  Returns:
    The scores.

  Raises:
    ValueError: If topk_ids and top_k are both set, or top_k is too large.
  """
  if topk_ids is not None and top_k:
    raise ValueError('give topk_ids, or top_k to have them found, not both')
  if top_k > table.shape[0]:
    raise ValueError(
      f'top_k={top_k} is more than the {table.shape[0]} tokens there are'
    )
  platform = platform_of(platform)
  budget = KEPT_BYTES if kept_bytes is None else kept_bytes
  if topk_ids is not None or top_k:
    why = 'scores one token a position, not top-k'
  else:
    why = _obstacle(hidden, table, temperature, softcap, shards)
  plain = {'topk_ids': topk_ids, 'top_k': top_k, 'softcap': softcap}
  plain |= {'max_rows': max_rows, 'shards': shards}
  candidates = {
    **_kernels(hidden, table, shards, why=why, budget=budget, platform=platform),
    'reference': functools.partial(reference, **plain),
  }
  name = choose('token_logprobs', candidates, platform=platform, option=kernels)
  run: Any = candidates[name]
  if name != 'reference':
    run = functools.partial(run, shards=shards, budget=budget, interpret=interpret)
  moments = {'entropy': entropy, 'nec': nec, 'sum_pi_squared': sum_pi_squared}
  return run(hidden, table, targets, temperature=temperature, **moments)


def _obstacle(
  hidden: jax.Array,
  table: jax.Array,
  temperature: jax.Array | float,
  softcap: float,
  shards: 'LogprobShards | None',
) -> str:
  """Returns why no kernel can score one token a position; '' if one may."""
  if jnp.ndim(temperature):
    return 'takes one temperature for all'
  if softcap:
    return 'does not take softcap'
  return '' if shards is None else shards.obstacle(hidden, table)


def _kernels(
  hidden: jax.Array,
  table: jax.Array,
  shards: 'LogprobShards | None',
  *,
  why: str,
  budget: int,
  platform: str,
) -> dict[str, Any]:
  """Returns the kernels by name, the best first, or the reasons against them."""
  size = _kept_size(hidden, table, shards)
  large = f'would keep {size / 2**30:.2g} GiB, of {budget / 2**30:.2g}'

  def on(home: str, name: str, obstacle: str = '') -> Any:
    run = why or obstacle or functools.partial(_fused, name)
    return only_on(home, run, platform=platform)

  return {
    'mosaic': on('tpu', 'mosaic'),
    'kept': on('gpu', 'kept', large if size > budget else ''),
    'tiles': on('gpu', 'tiles'),
    'native': on('cpu', 'native', _native_obstacle(hidden, shards, size, platform)),
  }


def _native_obstacle(
  hidden: jax.Array, shards: 'LogprobShards | None', size: int, platform: str
) -> str:
  """Returns why a CPU does not keep the softmax; '' if it does."""
  if platform != 'cpu':
    return ''
  if shards is not None and shards.mesh.size > 1:
    return 'runs on one device'
  from kernels.native import row_softmax  # not for other platforms

  if size > row_softmax.KEPT_BYTES:
    return f'keeps {row_softmax.KEPT_BYTES >> 20} MiB, not {size >> 20}'
  return row_softmax.obstacle(hidden)


def kept_bytes_of(limit: float) -> int:
  """Returns how much of a device a kept softmax may take, in bytes.

  Args:
    limit: Bytes of the device that JAX may take.
  """
  return int(limit * KEPT_SHARE) // KEPT_STEP * KEPT_STEP


def _kept_size(
  hidden: jax.Array, table: jax.Array, shards: 'LogprobShards | None'
) -> int:
  """Returns the bytes of each device that the softmax takes in the dtype of states."""
  parts = 1
  if shards is not None:
    parts = shards.size(shards.batch + shards.length + shards.vocab)
  rows = hidden.shape[0] * hidden.shape[1]
  return rows * len(table) * hidden.dtype.itemsize // parts


def _fused(
  name: str,
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  *,
  temperature: jax.Array | float,
  entropy: bool,
  nec: bool,
  sum_pi_squared: bool,
  shards: 'LogprobShards | None',
  budget: int,
  interpret: bool,
) -> TokenScores:
  # Imported here because only accelerators need it.
  from kernels.fused_logprobs import FusedLogprobsPlan, fused_logprobs
  from kernels.kept_softmax import TILE_LOGITS
  from kernels.softmax_stats import StatsKind

  tempered = not (isinstance(temperature, (int, float)) and temperature == 1)
  entries = len(table) // (1 if shards is None else shards.size(shards.vocab))
  rows = max(TILE_LOGITS // entries, budget // (entries * hidden.dtype.itemsize), 1)
  if name == 'native':
    shards, rows = None, max(1, MOST_LOGITS // entries)
  kind = StatsKind(tempered, entropy or nec or sum_pi_squared)
  plan = FusedLogprobsPlan(name, kind, shards, rows, interpret)
  inverse = 1 / jnp.float32(temperature)
  scores: Any = fused_logprobs(plan, hidden, table, targets, inverse)
  logprobs, mean, weighted, square = scores
  return TokenScores(
    logprobs,
    mean if entropy else None,
    weighted if nec else None,
    jax.lax.stop_gradient(square) if sum_pi_squared else None,
  )


def reference(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  entropy: bool = False,
  nec: bool = False,
  sum_pi_squared: bool = False,
  topk_ids: jax.Array | None = None,
  top_k: int = 0,
  softcap: float = 0.0,
  max_rows: int | None = None,
  shards: 'LogprobShards | None' = None,
) -> TokenScores:
  """Computes `token_logprobs` in plain jnp, some positions at a time.

  Args:
    hidden: Hidden states `[B, T, D]`.
    table: Table `[V, D]`.
    targets: Target tokens `[B, T]` int32.
    temperature: Temperature, a scalar.
    entropy: Whether to compute the entropy.
    nec: Whether to compute nec.
    sum_pi_squared: Whether to compute Σ_v p_v².
    topk_ids: More tokens to score, `[B, T, K]` int32.
    top_k: Number of most likely tokens to find and score.
    softcap: As in `token_logprobs`.
    max_rows: Maximum number of positions at a time; None for a default.
    shards: As in `token_logprobs`. With more than one device, the whole table is cast,
      and its gradient computed, at once.

  Returns:
    The scores.
  """

  def score(logits, inputs, temperature):
    (logits,), (targets, chosen_ids) = logits, inputs
    if softcap:
      logits = softcap * jnp.tanh(logits / softcap)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    chosen = jnp.where(ids == targets[..., None], logits, 0.0).sum(-1)
    norm = jax.nn.logsumexp(logits / temperature, axis=-1)
    scores = TokenScores(chosen / temperature - norm)
    if top_k:
      chosen_ids = jax.lax.top_k(jax.lax.stop_gradient(logits), top_k)[1]
      scores = scores._replace(topk_ids=chosen_ids)
    if chosen_ids is not None:
      likely = jnp.take_along_axis(logits, chosen_ids, axis=-1) / temperature
      scores = scores._replace(topk_logprobs=likely - norm[..., None])
    if entropy or nec or sum_pi_squared:
      scores = scores._replace(**_moments(logits, entropy, nec, sum_pi_squared))
    return scores

  if max_rows is None:
    few = min(MIN_ROWS, MOST_LOGITS // table.shape[0])
    max_rows = max(few, MAX_LOGITS // table.shape[0], 1)
  return score_in_chunks(
    score,
    ((hidden, table),),
    (targets, topk_ids),
    jnp.asarray(temperature, jnp.float32),
    max_rows=max_rows,
    entries=VOCAB_BLOCK if shards is None or shards.mesh.size == 1 else None,
  )


def _moments(
  logits: jax.Array, entropy: bool, nec: bool, sum_pi_squared: bool
) -> dict[str, jax.Array]:
  """Computes H, Σ_v p_v²(H + log p_v) and Σ_v p_v² of softmax(logits)."""
  norm = jax.nn.logsumexp(logits, axis=-1)
  weights = jnp.exp(logits - norm[..., None])
  mean = (weights * logits).sum(-1)
  moments = {'entropy': norm - mean} if entropy else {}
  if nec:  # H + log p_v = logit_v − Σ p·logit
    moments['nec'] = (jnp.square(weights) * (logits - mean[..., None])).sum(-1)
  if sum_pi_squared:
    square = jnp.square(weights).sum(-1)
    moments['sum_pi_squared'] = jax.lax.stop_gradient(square)
  return moments
