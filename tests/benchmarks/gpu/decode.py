"""JaxEngine's decode program against what the memory must deliver for it."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine import token_sampling
from jaxrl.rollout.engine.model_runner import ModelRunner, SlotState
from tests.benchmarks.gpu import device, shapes

SLOTS, PROMPT, NEW, STEPS = (32, 1, 256), 512, 128, 32
TINY = ((1, 4), 16, 16, 4)


def seated(slots: int, prompt: int, new: int) -> SlotState:
  """Every slot busy, its prompt behind it."""
  rows = SlotState.idle(slots, 8)
  rows.tokens[:] = 1
  rows.positions[:] = prompt
  rows.remaining[:] = new
  rows.keys[:, 1] = np.arange(slots)
  return rows


def one(
  config: ModelConfig, sizes: tuple[int, ...], rate: float, **options: Any
) -> dict[str, float]:
  """Milliseconds of a token for all slots, and the share that must be."""
  slots, prompt, new, steps = sizes
  model = TransformerLM(config, dtype='bfloat16', **options)
  programs = ModelRunner(
    model,
    num_slots=slots,
    max_length=prompt + new + 1,
    decode_steps=steps,
    prompt_buckets=[prompt],
    prefill_tokens=min(slots, 4) * prompt,
    max_stop_ids=8,
    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
  )
  halve = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p))
  params = programs.prepare_params(halve(model.init(jax.random.key(0))))
  cache, _ = programs.init_state()
  draw = np.random.default_rng(0)
  prompts = draw.integers(1, config.vocab_size, (slots, prompt + 1)).astype(np.int32)
  cache = jax.block_until_ready(programs.prefill(params, cache, [(0, prompts[0])]))
  start = time.perf_counter()
  cache = programs.prefill(params, cache, list(enumerate(prompts)))
  jax.block_until_ready(cache)
  prefill = time.perf_counter() - start
  rows = jax.device_put(seated(slots, prompt, new), jax.devices()[0])
  times = []
  for _ in range(new // steps):
    start = time.perf_counter()
    cache, rows, tokens, *_ = programs.decode(params, cache, rows, token_sampling.PLAIN)
    drawn = np.asarray(tokens)  # read by the host, as the engine does
    times.append((time.perf_counter() - start) / steps)
    assert (drawn >= 0).all(), 'a slot fell idle'
  spent = statistics.median(times[1:])
  floor = shapes.decode_bytes(config, slots, prompt + new / 2) / rate
  return {
    'step_ms': 1e3 * spent,
    'floor_ms': 1e3 * floor,
    'share': floor / spent,
    'tokens_per_s': slots / spent,
    'prefill_tokens_per_s': slots * prompt / prefill,
  }


def measure(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """(model, slots, kernels) → figures, so far; a case that fails says why."""
  rates, figures = device.rates(tiny), {}
  slots, *rest = TINY if tiny else (SLOTS, PROMPT, NEW, STEPS)
  for kernels in ('auto',) if tiny else ('auto', 'reference'):
    for label, config in (shapes.TINY if tiny else shapes.MODELS).items():
      for count in slots:
        name = f'{label}, {count} slots, kernels {kernels}'
        try:
          sizes = (count, *rest)
          figures[name] = one(config, sizes, rates['bytes'], kernels=kernels)
        except Exception as error:  # memory, mostly; the next case may fit
          figures[name] = {'failed': f'{type(error).__name__}: {str(error)[:160]}'}
        yield {'cases': figures, **rates}
