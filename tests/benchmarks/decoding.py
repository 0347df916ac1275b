"""What options of the JAX engine bring: drafted tokens, and prompts in blocks.

Engines with the option and without take turns in one process.
"""

import asyncio
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import numpy as np

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.device_thread import DeviceThread
from jaxrl.model_loading import random_config
from jaxrl.models import huggingface
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.rollout.engine.jax_engine import JaxEngine
from jaxrl.types import SamplingParams

FOLDER = pathlib.Path(__file__).parents[2] / '.real/checkpoints/smollm2-135m-instruct'
SLOTS, LENGTH, TOKENS, DRAFT_TOKENS = 8, 256, 96, 4
# What the model goes on from: texts that repeat themselves, and one that does not.
BEGUN = {
  'JSON lines': ''.join(
    json.dumps({'id': i, 'name': f'part {i}', 'status': 'open', 'price': 10 + 3 * i})
    + '\n'
    for i in range(5)
  ),
  'unit tests': ''.join(
    f'def test_{name}():\n  result = run("{name}", {a}, 2)\n'
    f'  assert result.status == "ok"\n  assert result.value == 3\n\n\n'
    for name, a in (('add', 1), ('sub', 5))
  ),
  'tool calls': ''.join(
    f'<tool_call>\n{{"name": "read_file", "arguments": {{"path": "src/{name}.py"}}}}\n'
    f'</tool_call>\n<tool_response>\n{{"lines": {i}}}\n</tool_response>\n'
    for i, name in enumerate(('main', 'config', 'cache', 'router'))
  ),
  'a story': 'The lighthouse keeper had never left the island, until the morning',
}
# Replies at once, of 8 slots, and the temperature that they are drawn at.
CASES = ((1, 0.0), (4, 0.7), (8, 0.7))
# Sessions side by side: tokens of the first prompt, of a reply, and of what follows it.
SESSIONS, TURNS, FIRST, REPLY, OBSERVED = 8, 8, 200, 16, 48
BLOCKS = (0, 32, 64)


def _rules(seed: int, temperature: float) -> SamplingParams:
  return SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed)


async def _play(engine: JaxEngine, prompt: list[int], count: int, temperature: float):
  """Returns the seconds, completions and metrics of `count` replies at once."""
  engine.metrics()
  start = time.perf_counter()
  work = (engine.generate(str(i), prompt, _rules(i, temperature)) for i in range(count))
  done = await asyncio.gather(*work)
  return time.perf_counter() - start, done, engine.metrics()


async def _compare(
  engines: dict[bool, JaxEngine], prompt: list[int], rounds: int, **options: Any
) -> dict[str, float]:
  ratios, metrics, done = [], {}, {}
  for i in range(rounds):
    seconds = {}
    for drafts in ((False, True), (True, False))[i % 2]:
      seconds[drafts], done[drafts], metrics[drafts] = await _play(
        engines[drafts], prompt, **options
      )
    ratios.append(seconds[True] / seconds[False])
  for one, other in zip(done[False], done[True], strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
  on, off = metrics[True], metrics[False]
  return {
    'ratio': statistics.median(ratios),
    'lowest_ratio': min(ratios),
    'highest_ratio': max(ratios),
    'tokens': on['tokens/generated'],
    'drafted': on['tokens/drafted'],
    'accepted': on['tokens/accepted'],
    'steps': on['rollout/decode_steps'],
    'steps_without': off['rollout/decode_steps'],
  }


def measure_drafts(
  rounds: int = 3, names: tuple[str, ...] = tuple(BEGUN)
) -> dict[str, Any]:
  """Figures by text, replies at once and temperature; or what is missing."""
  if not FOLDER.exists():
    return {'missing': 'the checkpoint that make env-real fetches'}
  config, params = huggingface.load(FOLDER, value_head=False)
  model, tokenizer = TransformerLM(config), load_tokenizer(FOLDER)
  device_thread, engines = DeviceThread(), {}

  async def run() -> dict[str, Any]:
    for drafts in (False, True):
      engines[drafts] = JaxEngine(
        model,
        device_thread=device_thread,
        max_num_seqs=SLOTS,
        max_length=LENGTH,
        prompt_buckets=[LENGTH],
        draft_tokens=DRAFT_TOKENS if drafts else 0,
      )
      await engines[drafts].load(0, params)
      await engines[drafts].warmup()
    figures = {}
    for name in names:
      prompt = tokenizer.encode(BEGUN[name])
      for count, temperature in CASES:
        options: dict[str, Any] = {'count': count, 'temperature': temperature}
        case = f'{name}, {count} at {temperature:g}'
        figures[case] = await _compare(engines, prompt, rounds, **options)
    return figures

  figures = asyncio.run(run())
  device_thread.close()
  return figures


async def _sessions(engine: JaxEngine, seed: int) -> tuple[float, dict[str, float]]:
  """Plays sessions side by side; returns the seconds and the engine's metrics."""
  engine.metrics()

  async def session(number: int) -> None:
    draw = np.random.default_rng((seed, number))
    ids = draw.integers(0, 512, FIRST).tolist()
    for turn in range(TURNS):
      rules = SamplingParams(max_tokens=REPLY, seed=turn)
      done = await engine.generate(f'{number}/{turn}', ids, rules)
      ids = [*ids, *done.tokens.tolist(), *draw.integers(0, 512, OBSERVED).tolist()]

  start = time.perf_counter()
  await asyncio.gather(*map(session, range(SESSIONS)))
  return time.perf_counter() - start, engine.metrics()


def measure_blocks(rounds: int = 5) -> dict[str, Any]:
  """Figures of sessions by the tokens of a block, 0 for whole prompts."""
  config = random_config(
    hidden_size=384,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=1024,
  )
  model, device_thread = TransformerLM(config), DeviceThread()
  params = model.init(jax.random.key(0))

  async def run() -> dict[str, Any]:
    engines, seconds, metrics = {}, {}, {}
    for block in BLOCKS:
      engines[block] = JaxEngine(
        model,
        device_thread=device_thread,
        max_num_seqs=SESSIONS,
        max_length=1024,
        prompt_block=block,
      )
      await engines[block].load(0, params)
      await engines[block].warmup()
      seconds[block] = []
    for i in range(rounds):
      for block in BLOCKS if i % 2 else BLOCKS[::-1]:
        spent, metrics[block] = await _sessions(engines[block], i)
        seconds[block].append(spent)
    return {
      str(block): {
        'ratio': statistics.median(
          one / whole for one, whole in zip(seconds[block], seconds[0], strict=True)
        ),
        'seconds': statistics.median(seconds[block]),
        'prefill_s': metrics[block]['time/prefill'],
        'prefilled': metrics[block]['tokens/prefilled'],
        'reused': metrics[block]['tokens/prompt_reused'],
      }
      for block in BLOCKS
    }

  figures = asyncio.run(run())
  device_thread.close()
  return figures


def measure() -> dict[str, Any]:
  return {'drafts': measure_drafts(), 'blocks': measure_blocks()}
