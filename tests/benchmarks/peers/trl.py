"""TRL's GRPOTrainer on the toy, and Hugging Face's generate with log-probs."""

import logging
import os
import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
  LogitsProcessor,
  PreTrainedTokenizerFast,
  Qwen3Config,
  Qwen3ForCausalLM,
  TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.peers import shape
from tests.benchmarks.peers.shape import Turns

END = shape.MODEL['vocab_size'] - 1  # with ENDS, the token that ends a sample
PAD = '<pad>'


def config() -> Qwen3Config:
  m = shape.MODEL
  return Qwen3Config(
    vocab_size=m['vocab_size'],
    hidden_size=m['hidden_size'],
    num_hidden_layers=m['num_layers'],
    num_attention_heads=m['num_heads'],
    num_key_value_heads=m['num_kv_heads'],
    head_dim=m['head_dim'],
    intermediate_size=m['intermediate_size'],
    tie_word_embeddings=True,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=END if shape.ENDS else None,
    pad_token_id=0,
  )


def tokenizer() -> PreTrainedTokenizerFast:
  """Token i is the word i; the end, but for ENDS, is one that the model cannot say."""
  # Token 0 is special, and as '0' it would be found within other words.
  words = {str(i) if i else PAD: i for i in range(shape.MODEL['vocab_size'])}
  bare = Tokenizer(models.WordLevel(words, unk_token=PAD))
  bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  end = str(END) if shape.ENDS else '</s>'
  return PreTrainedTokenizerFast(
    tokenizer_object=bare, pad_token=PAD, unk_token=PAD, eos_token=end
  )


class EndsAt(LogitsProcessor):
  """Ends each sample at a given length, and never before."""

  def __init__(self, lengths: list[int]):
    self.last = torch.tensor(lengths) + shape.PROMPT - 1

  def __call__(self, input_ids, scores):
    scores[:, END] = -torch.inf
    ends = self.last <= input_ids.shape[1]
    scores[ends] = -torch.inf
    scores[ends, END] = 0.0
    return scores


class Gate(TrainerCallback):
  """Waits for its turn before each step."""

  def __init__(self, turns: Turns):
    self.turns = turns

  def on_step_begin(self, args, state, control, **kwargs):
    if not self.turns.next():
      os._exit(0)  # in the middle of a step there is no other way out


def ends(lengths: list[int]) -> dict[str, Any]:
  """Arguments of `generate` that end each sample at a length."""
  return {'logits_processor': [EndsAt(lengths)]} if shape.ENDS else {}


def main() -> None:
  logging.disable(logging.WARNING)
  torch.manual_seed(0)
  model = Qwen3ForCausalLM(config())
  draw = random.Random(0)
  rows = shape.prompts(0, 4096)
  trainer = GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **_: [draw.random() for _ in completions],
    args=GRPOConfig(
      output_dir=tempfile.mkdtemp(),
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      per_device_train_batch_size=shape.PROMPTS * shape.SAMPLES,
      num_generations=shape.SAMPLES,
      max_completion_length=shape.NEW,
      max_steps=1_000_000,
      beta=0.0,
      learning_rate=shape.LEARNING_RATE,
      lr_scheduler_type='constant',
      optim='adamw_torch_fused',
      temperature=1.0,
      logging_strategy='no',
      save_strategy='no',
      report_to=[],
      disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({'prompt': [' '.join(map(str, r)) for r in rows]}),
    processing_class=tokenizer(),
  )

  generate = model.generate

  @torch.no_grad()
  def decode(rows: list[list[int]], lengths: list[int]) -> int:
    ids = torch.tensor(rows)
    model.eval()
    out: Any = generate(
      input_ids=ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=shape.NEW,
      **ends(lengths),
      do_sample=True,
      top_k=0,
      top_p=1.0,
      return_dict_in_generate=True,
      output_scores=True,
    )
    scored = model.compute_transition_scores(
      out.sequences, out.scores, normalize_logits=True
    )
    model.train()
    return sum(lengths) if shape.ENDS else scored.numel()

  turns = Turns(decode)

  def generate_as_all_do(*args: Any, **kwargs: Any) -> Any:
    prompts = kwargs['attention_mask'].sum(1).unique().tolist()
    assert prompts == [shape.PROMPT], f'prompts of {prompts} tokens'
    return generate(*args, **kwargs, **ends(shape.lengths(turns.step)))

  trainer_model: Any = model
  trainer_model.generate = generate_as_all_do
  trainer._generate = turns.generating(trainer._generate)
  trainer.add_callback(Gate(turns))
  trainer.train()


if __name__ == '__main__':
  main()
