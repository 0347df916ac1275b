"""Log-probabilities of given tokens, and entropies, from hidden states."""

import jax
import jax.numpy as jnp

# Positions scored at once, unless told: as many as make this many logits, but enough
# for the table's matrix product to run at speed.
MAX_LOGITS, MIN_ROWS = 2**22, 512


def token_logprobs(
  hidden: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  entropy: bool = False,
  max_rows: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Scores targets under softmax(hidden · tableᵀ / temperature).

  hidden: `[B, T, D]`. table: `[V, D]`. targets: `[B, T]` int32.
  Returns log-probs `[B, T]` float32, and the entropy `[B, T]` of the distribution at
  temperature 1 if asked, else None. The logits of at most `max_rows` positions (or of
  one in every row) are held at a time; the backward pass computes them anew.
  """
  batch, length, width = hidden.shape

  def score(hidden, targets):
    logits = hidden.reshape(-1, width) @ table.T.astype(hidden.dtype)
    logits = logits.reshape(*targets.shape, -1).astype(jnp.float32)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    chosen = jnp.where(ids == targets[..., None], logits, 0.0).sum(-1)
    logprobs = chosen / temperature - jax.nn.logsumexp(logits / temperature, axis=-1)
    if not entropy:
      return logprobs, None
    norm = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - norm[..., None])
    return logprobs, norm - (weights * logits).sum(-1)

  if max_rows is None:
    max_rows = max(MIN_ROWS, MAX_LOGITS // table.shape[0])
  size = max(1, min(length, max_rows // batch))
  if size >= length:
    return score(hidden, targets)
  chunks = -(-length // size)
  pad = chunks * size - length
  hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
  targets = jnp.pad(targets, ((0, 0), (0, pad)))
  hidden = hidden.reshape(batch, chunks, size, width).swapaxes(0, 1)
  targets = targets.reshape(batch, chunks, size).swapaxes(0, 1)
  body = jax.checkpoint(lambda _, chunk: (None, score(*chunk)))
  _, scored = jax.lax.scan(body, None, (hidden, targets))
  flat = lambda x: x.swapaxes(0, 1).reshape(batch, -1)[:, :length]  # noqa: E731
  return jax.tree.map(flat, scored)
