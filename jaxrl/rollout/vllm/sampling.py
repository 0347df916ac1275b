"""A request in vLLM's terms."""

# pyright: reportMissingImports=false

import hashlib

from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmParams

from jaxrl.types import SamplingParams

COLDEST = 0.01  # vLLM raises temperatures between 0 and this one to it


def translate(sampling: SamplingParams, budget: int) -> VllmParams:
  """budget: the most tokens to come. Stop strings are looked for by the caller."""
  greedy = sampling.temperature == 0  # its log-probs are of the whole distribution
  return VllmParams(
    max_tokens=budget,
    temperature=sampling.temperature,
    top_p=1.0 if greedy else sampling.top_p,
    top_k=0 if greedy else sampling.top_k,
    stop_token_ids=list(sampling.stop_token_ids),
    ignore_eos=True,
    seed=stream(sampling.seed, sampling.first),
    logprobs=0,
    detokenize=False,
    output_kind=RequestOutputKind.DELTA,
  )


def stream(seed: int, first: int) -> int:
  """The seed of vLLM's own generator, which counts from the first token it draws.

  A completion that goes on after `first` tokens draws from another stream than it
  began with: the same one again would repeat its choices.
  """
  if not first and seed < 2**63:
    return seed
  digest = hashlib.blake2b(f'{seed} {first}'.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1
