"""Serves one model after the other with vLLM in one process, for tests of families.

Starting vLLM's own processes would take most of a minute a model. Requests are lines of
JSON on the standard input, answers lines of JSON on the standard output.
"""

# pyright: reportMissingImports=false

import gc
import json
import os
import sys
import time
import traceback
from typing import Any

MAX_LENGTH = 128


def main() -> None:
  """Answers requests until the input ends."""
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # what vLLM prints goes elsewhere
  os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'
  os.environ['TORCHDYNAMO_DISABLE'] = '1'
  # One thread is enough for tiny models; several would wait for each other.
  os.environ |= {'OMP_NUM_THREADS': '1', 'VLLM_CPU_OMP_THREADS_BIND': 'nobind'}
  for line in sys.stdin:
    try:
      answer: dict[str, Any] = serve(**json.loads(line))
      print('CPU', time.process_time(), file=sys.stderr, flush=True)
    except Exception as error:
      traceback.print_exc()
      answer = {'error': f'{type(error).__name__}: {error}'}
    print(json.dumps(answer), file=answers, flush=True)


def serve(
  folder: str, address: str, version: int, prompts: list[list[int]], count: int
) -> dict[str, Any]:
  """Samples with the weights of a folder, then with those of a published version.

  Args:
    folder: The model.
    address: Where the version is published.
    version: The version.
    prompts: Tokens of each prompt.
    count: How many tokens to sample.

  Returns:
    `before` and `after`: of each prompt the tokens and their log-probs.
  """
  from vllm import LLM, SamplingParams
  from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

  from jaxrl.models import huggingface
  from jaxrl.rollout.vllm import vllm_options
  from jaxrl.rollout.vllm.vllm_worker import PULL_BACKEND, WorkerExtension

  config = huggingface.load_config(folder)
  llm: Any = LLM(
    folder,
    dtype='float32',
    seed=0,
    max_model_len=MAX_LENGTH,
    max_num_seqs=len(prompts),
    skip_tokenizer_init=True,
    enable_prefix_caching=False,
    logprobs_mode='processed_logprobs',
    weight_transfer_config={'backend': PULL_BACKEND},
    hf_overrides=vllm_options.hf_overrides(config),
    worker_extension_cls=f'{WorkerExtension.__module__}.{WorkerExtension.__name__}',
    **vllm_options.cpu_options(config, {}, 32 << 20),
  )
  rules = SamplingParams(max_tokens=count, logprobs=0, seed=1, ignore_eos=True)
  rules.detokenize = False

  def sample() -> list[list[list[float]]]:
    inputs: Any = [{'prompt_token_ids': prompt} for prompt in prompts]
    samples = []
    for request in llm.generate(inputs, rules, use_tqdm=False):
      output = request.outputs[0]
      tokens, each = list(output.token_ids), output.logprobs
      assert each is not None
      logprobs = [step[token].logprob for step, token in zip(each, tokens, strict=True)]
      samples.append([tokens, logprobs])
    return samples

  try:
    answer = {'before': sample()}
    info = {'address': address, 'parts': 1}
    llm.collective_rpc('init_weight_transfer_engine', args=(info,))
    llm.collective_rpc('fetch_weights', args=(version, False))
    while llm.collective_rpc('fetched_weights') == [None]:
      time.sleep(0.01)
    llm.collective_rpc('start_weight_update')
    llm.collective_rpc('update_weights', args=({'version': version},))
    llm.collective_rpc('finish_weight_update')
    return answer | {'after': sample()}
  finally:
    llm.llm_engine.engine_core.shutdown()
    llm = None
    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == '__main__':
  main()
