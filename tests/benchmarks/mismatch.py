"""How far the engine's log-probs lie from the learner's, and what exactness costs.

Tokens are drawn by the engine in every company, scored again by the learner's model in
rows of another order, and once more by the forward of a gradient, in batches of another
size. A byte differs or it does not: nothing is rounded before comparing.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.device_thread import DeviceThread
from jaxrl.models.exact_mode import Exact
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.types import Completion, Params, SamplingParams
from tests.benchmarks import toy

CONFIG = ModelConfig(
  vocab_size=512,
  hidden_size=64,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  intermediate_size=128,
)
SLOTS, WINDOW, WIDTH = 32, 160, 192
PAD, STOPS = 0, (1, 2)
TEMPERATURES = (1.0, 0.7)


@dataclasses.dataclass
class Drawn:
  """Rows `[N, WIDTH]` of prompts and completions; mask: where tokens were drawn."""

  tokens: np.ndarray
  segment_ids: np.ndarray
  mask: np.ndarray
  logprobs: np.ndarray

  def reordered(self, order: np.ndarray) -> 'Drawn':
    columns = dataclasses.asdict(self).values()
    return Drawn(*(column[order] for column in columns))


def model_and_params(
  exact: bool, config: ModelConfig = CONFIG
) -> tuple[TransformerLM, Params]:
  """Parameters larger than a start's, so that distributions are far from even."""
  model = TransformerLM(config, exact=Exact.for_slots(SLOTS) if exact else None)
  params = model.init(jax.random.key(0))
  return model, jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, params)


def draw(
  model: TransformerLM, params: Params, count: int, temperatures: Sequence[float]
) -> list[Drawn]:
  """At each temperature at least `count` tokens, of texts of every length."""
  device_thread = DeviceThread()
  engine = JaxEngine(
    dataclasses.replace(model, exact=None),  # as a run hands it to its engine
    device_thread=device_thread,
    max_num_seqs=SLOTS,
    max_length=WINDOW,
    exact=model.exact is not None,
  )

  async def run(temperature: float) -> Drawn:
    rng, rows = np.random.default_rng(int(temperature * 10)), []
    await engine.load(0, params)
    total = 0
    while total < count:
      work, prompts = [], []
      for i in range(4 * SLOTS):
        prompt = rng.integers(0, model.config.vocab_size, rng.integers(1, 64)).tolist()
        rules = SamplingParams(
          max_tokens=int(rng.integers(1, WINDOW)),
          seed=int(rng.integers(2**32)),
          temperature=temperature,
          stop_token_ids=STOPS if i % 2 else (),
        )
        prompts.append(prompt)
        work.append(engine.generate(f'{i}', prompt, rules))
      done = await asyncio.gather(*work)
      rows.extend(zip(prompts, done, strict=True))
      total += sum(len(completion.tokens) for completion in done)
    return _pack(rows)

  try:
    return [asyncio.run(run(temperature)) for temperature in temperatures]
  finally:
    device_thread.close()


def _pack(rows: list[tuple[list[int], Completion]]) -> Drawn:
  shape = len(rows), WIDTH
  drawn = Drawn(
    np.full(shape, PAD, np.int32),
    np.zeros(shape, np.int32),
    np.zeros(shape, bool),
    np.zeros(shape, np.float32),
  )
  for i, (prompt, done) in enumerate(rows):
    start, end = len(prompt), len(prompt) + len(done.tokens)
    drawn.tokens[i, :end] = [*prompt, *done.tokens]
    drawn.segment_ids[i, :end] = 1
    drawn.mask[i, start:end] = True
    drawn.logprobs[i, start:end] = done.logprobs
  return drawn


def rescore(model: TransformerLM) -> Callable[..., jax.Array]:
  """Returns log-probs of (params, tokens, segment_ids, temperature), as in scoring."""

  @jax.jit
  def run(*arguments):
    return model.policy_outputs(*arguments[:3], temperature=arguments[3]).logprobs

  return run


def first_forward(model: TransformerLM) -> Callable[..., jax.Array]:
  """The same, out of the program that makes a gradient of them."""

  def loss(params, tokens, segment_ids, temperature):
    outputs = model.policy_outputs(
      params, tokens, segment_ids, temperature=temperature, entropy=True
    )
    drawn = jnp.exp(outputs.logprobs).sum() - outputs.entropy.sum()
    return drawn, outputs.logprobs

  @jax.jit
  def run(*arguments):
    (_, logprobs), slope = jax.value_and_grad(loss, has_aux=True)(*arguments)
    return logprobs, slope

  return lambda *arrays: run(*arrays)[0]


def compare(
  function: Callable[..., jax.Array],
  params: Params,
  drawn: Drawn,
  rows: int,
  temperature: float,
) -> dict[str, float]:
  """Differing bytes, and |Δ|, of `rows` rows at a time in a random order."""
  drawn = drawn.reordered(np.random.default_rng(rows).permutation(len(drawn.mask)))
  parts = []
  for start in range(0, len(drawn.mask), rows):
    part = drawn.reordered(np.arange(start, start + rows) % len(drawn.mask))
    logprobs = function(params, part.tokens, part.segment_ids, np.float32(temperature))
    parts.append(np.asarray(logprobs))
  there = np.concatenate(parts)[: len(drawn.mask)][drawn.mask]
  ours = drawn.logprobs[drawn.mask]
  apart = np.abs(there - ours)
  return {
    'tokens': float(len(ours)),
    'bytes': float((ours.view(np.uint8) != there.view(np.uint8)).sum()),
    'differ': float((ours.view(np.int32) != there.view(np.int32)).mean()),
    'mean': float(apart.mean()),
    'max': float(apart.max()),
  }


def figures(exact: bool, tokens: int) -> dict[str, dict[str, float]]:
  """The engine against a rescoring, and against the forward of a gradient."""
  model, params = model_and_params(exact)
  ways = {'rescored': (rescore(model), 64), 'trained': (first_forward(model), 40)}
  comparisons: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
  samples = draw(model, params, tokens // len(TEMPERATURES), TEMPERATURES)
  for temperature, drawn in zip(TEMPERATURES, samples, strict=True):
    for stop in (PAD, *STOPS):
      assert (drawn.tokens[drawn.mask] == stop).any(), f'{stop} was never drawn'
    for name, (function, rows) in ways.items():
      comparison = compare(function, params, drawn, rows, temperature)
      comparisons[name].append(comparison)
  return {name: _together(parts) for name, parts in comparisons.items()}


def _together(parts: list[dict[str, float]]) -> dict[str, float]:
  tokens = sum(part['tokens'] for part in parts)
  share = [part['tokens'] / tokens for part in parts]
  mean = lambda name: sum(s * p[name] for s, p in zip(share, parts, strict=True))  # noqa: E731
  return {
    'tokens': tokens,
    'bytes': sum(part['bytes'] for part in parts),
    'differ': mean('differ'),
    'mean': mean('mean'),
    'max': max(part['max'] for part in parts),
  }


def measure(tokens: int = 100_000, steps: int = 3) -> dict[str, dict[str, float]]:
  """Both modes' figures, and the seconds of a step of the toy in both."""
  results = {}
  for mode in ('plain', 'exact'):
    for name, values in figures(mode == 'exact', tokens).items():
      results[f'{mode}_{name}'] = values
  return results | asyncio.run(_cost(steps))


async def _cost(steps: int) -> dict[str, dict[str, float]]:
  """Seconds of the median step's phases, modes taking turns."""
  toys = {
    mode: toy.Toy(decode_steps=16, exact=mode == 'exact') for mode in ('plain', 'exact')
  }
  timings: dict[str, list[dict[str, float]]] = {mode: [] for mode in toys}
  for one in toys.values():
    await one.start()
  for step in range(1 + steps):
    for mode, one in toys.items():
      seconds = await one.step(step)
      if step:
        timings[mode].append(seconds)
  return {
    f'{mode}_cost': {
      name: float(np.median([row[name] for row in rows])) for name in rows[0]
    }
    for mode, rows in timings.items()
  }
