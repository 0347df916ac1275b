"""vLLM on the toy: decoding alone."""

import os
import tempfile

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING='0', VLLM_CPU_KVCACHE_SPACE='1')
os.environ.update(HF_HUB_OFFLINE='1', VLLM_LOGGING_LEVEL='ERROR')

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from tests.benchmarks.peers import shape
from tests.benchmarks.peers.shape import Turns


def checkpoint(folder: str) -> None:
  """Random weights of the toy's shape, in Hugging Face's form."""
  m = shape.MODEL
  config = Qwen3Config(
    vocab_size=m['vocab_size'],
    hidden_size=m['hidden_size'],
    num_hidden_layers=m['num_layers'],
    num_attention_heads=m['num_heads'],
    num_key_value_heads=m['num_kv_heads'],
    head_dim=m['head_dim'],
    intermediate_size=m['intermediate_size'],
    tie_word_embeddings=True,
    max_position_embeddings=256,
    architectures=['Qwen3ForCausalLM'],
  )
  torch.manual_seed(0)
  Qwen3ForCausalLM(config).save_pretrained(folder)


def main() -> None:
  with tempfile.TemporaryDirectory() as folder:
    checkpoint(folder)
    engine = LLM(
      model=folder,
      skip_tokenizer_init=True,
      dtype='float32',
      max_model_len=256,
      max_num_seqs=shape.PROMPTS * shape.SAMPLES,
      enforce_eager=True,
    )

  def decode(rows: list[list[int]], lengths: list[int]) -> int:
    inputs = [{'prompt_token_ids': row} for row in rows]
    rules = [
      SamplingParams(
        max_tokens=length,
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
      )
      for length in lengths
    ]
    done = engine.generate(inputs, rules, use_tqdm=False)
    return sum(len(out.outputs[0].logprobs) for out in done)

  Turns(decode).next()


if __name__ == '__main__':
  main()
