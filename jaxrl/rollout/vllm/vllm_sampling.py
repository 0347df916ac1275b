"""vLLM sampling: converts sampling parameters to vLLM's, and its log-probs to ours."""

# pyright: reportMissingImports=false

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from jaxrl.types import SamplingParams, TextConstraint


def to_vllm_sampling(sampling: SamplingParams, max_tokens: int) -> VllmSamplingParams:
  """Converts sampling parameters to vLLM's.

  Args:
    sampling: Our sampling parameters. The engine looks for stop strings itself.
    max_tokens: Most tokens to generate.

  Returns:
    vLLM's sampling parameters.
  """
  is_greedy = sampling.temperature == 0  # log-probs are of the whole distribution
  return VllmSamplingParams(
    max_tokens=max_tokens,
    temperature=sampling.temperature,
    top_p=1.0 if is_greedy else sampling.top_p,
    top_k=0 if is_greedy else sampling.top_k,
    stop_token_ids=list(sampling.stop_token_ids),
    ignore_eos=True,
    seed=vllm_seed(sampling.seed, sampling.num_generated),
    logprobs=sampling.top_logprobs,
    structured_outputs=_structured_outputs(sampling.constraint),
    detokenize=False,
    output_kind=RequestOutputKind.DELTA,
  )


def _structured_outputs(
  constraint: TextConstraint | None,
) -> StructuredOutputsParams | None:
  """Converts a constraint to vLLM's: one of its alternatives, once."""
  if constraint is None:
    return None
  (begin, schema, end), *others = constraint.alternatives
  if not (begin or end or others):
    return StructuredOutputsParams(json=schema)
  tags = [
    {
      'type': 'tag',
      'begin': begin,
      'content': {'type': 'json_schema', 'json_schema': json.loads(schema)},
      'end': end,
    }
    for begin, schema, end in constraint.alternatives
  ]
  one = {'type': 'tags_with_separator', 'tags': tags, 'separator': ''}
  form = {**one, 'at_least_one': True, 'stop_after_first': True}
  tag = {'type': 'structural_tag', 'format': form}
  return StructuredOutputsParams(structural_tag=json.dumps(tag))


def vllm_seed(seed: int, num_generated: int) -> int:
  """Computes the seed of vLLM's own generator, which counts from its first token.

  A completion that continues after `num_generated` tokens draws from another random
  stream than it began with: the same stream would repeat its choices.

  Args:
    seed: The request's seed.
    num_generated: Number of tokens that were generated before.

  Returns:
    A seed below 2**63.
  """
  if not num_generated and seed < 2**63:
    return seed
  digest = hashlib.blake2b(f'{seed} {num_generated}'.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1


def likeliest(by_token: Mapping[int, Any], count: int) -> dict[int, float]:
  """Returns the likeliest tokens in one place.

  Args:
    by_token: vLLM's log-probabilities by token, with ranks. The token that was drawn is
      among them, whatever its rank.
    count: How many are wanted.

  Returns:
    The log-probabilities by token, the likeliest first. Tokens that could not be drawn
    are left out.
  """
  ranked = sorted(by_token.items(), key=lambda pair: pair[1].rank)[:count]
  return {token: one.logprob for token, one in ranked if np.isfinite(one.logprob)}
