"""Where a run's model comes from: a Hugging Face folder, or a shape and a seed."""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import jax

from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.models import huggingface
from jaxrl.models.config import FAMILIES, ModelConfig
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError, check_options, parse_call, unknown
from jaxrl.types import Params

VOCAB_MULTIPLE = 32  # so that meshes divide it; ids beyond the tokenizer's are unused


@dataclasses.dataclass(frozen=True)
class Policy:
  """A model with its parameters and tokenizer. folder: where its tokenizer lies."""

  model: Model
  params: Params
  tokenizer: Any
  folder: pathlib.Path


def random_config(
  *,
  family: str = 'qwen3',
  vocab_size: int = 512,
  hidden_size: int = 128,
  num_layers: int = 4,
  num_heads: int = 4,
  num_kv_heads: int = 2,
  head_dim: int = 32,
  intermediate_size: int = 384,
) -> ModelConfig:
  """The shape of a model that starts from nothing.

  family: a call string, with what is seldom asked for: 'qwen3(tie_embeddings=False)',
  'qwen3_moe(num_experts=…, num_experts_per_token=…, moe_intermediate_size=…)'.
  vocab_size: at most; a tokenizer trained on few texts may stay smaller.
  Raises ConfigError for sizes that are no model.
  """
  name, own = _family(family)
  try:
    return ModelConfig(
      vocab_size=vocab_size,
      hidden_size=hidden_size,
      num_layers=num_layers,
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      intermediate_size=intermediate_size,
      family=name,
      rope_theta=10_000.0,
      qk_norm=name in ('qwen3', 'qwen3_moe'),
      attention_bias=name == 'qwen2',
      **own,
    )
  except ValueError as error:
    raise ConfigError(f'--config.model.random: {error}') from error


def _experts(
  *,
  num_experts: int = 8,
  num_experts_per_token: int = 2,
  moe_intermediate_size: int = 128,
  norm_topk_prob: bool = True,
  tie_embeddings: bool = True,
) -> dict[str, Any]:
  """What a mixture of experts has beside."""
  return locals()


def _dense(*, tie_embeddings: bool = True) -> dict[str, Any]:
  return locals()


def _family(text: str) -> tuple[str, dict[str, Any]]:
  """The family that a call string names, and the fields it gives it."""
  name, options = parse_call(text)
  where = f'model.random.family={text}'
  if name not in FAMILIES:
    raise unknown(name, FAMILIES, 'family', where)
  takes = _experts if name == 'qwen3_moe' else _dense
  check_options(takes, options, where)
  return name, takes(**options)


def load(
  folder: str,
  *,
  value_head: bool,
  dtype: str,
  remat: str,
  kernels: str = 'auto',
  key: str = 'model.checkpoint',
) -> Policy:
  """The policy in a Hugging Face folder. Raises ConfigError for a folder that is none.

  value_head: whether the algorithm trains a critic; a missing head starts at zero.
  key: of the config, that named the folder.
  """
  try:
    config, params = huggingface.load(folder, value_head=value_head)
    tokenizer = load_tokenizer(folder)
  except (OSError, ValueError) as error:
    raise ConfigError(f'{key}={folder}: {error}') from error
  model = Model(config, dtype=dtype, remat=remat, kernels=kernels)
  return Policy(model, params, tokenizer, pathlib.Path(folder))


def create(
  folder: pathlib.Path,
  config: ModelConfig,
  texts: Iterable[str],
  key: jax.Array,
  *,
  value_head: bool,
  dtype: str,
  remat: str,
  kernels: str = 'auto',
  tokenizer: Any = None,
) -> Policy:
  """A random policy, saved in `folder`, with a tokenizer trained on `texts`.

  tokenizer: one to take instead, with a vocabulary of the config's size.
  If `folder` holds one already it is loaded: a resumed run goes on with its tokenizer.
  """
  if not (folder / 'config.json').exists():
    if tokenizer is None:
      tokenizer = train_tokenizer(texts, config.vocab_size)
      size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
      config = config.replace(vocab_size=size)
    config = config.replace(value_head=value_head)
    params = Model(config).init(key)
    huggingface.save(folder, config, params, tokenizer)
  return load(
    str(folder), value_head=value_head, dtype=dtype, remat=remat, kernels=kernels
  )


def with_vocabulary(other: Policy, student: Policy, key: str) -> Policy:
  """`other`, if it numbers tokens as `student` does, else ConfigError naming `key`.

  Rows of its table beyond the tokenizer that the student's has not are cut off.
  """
  mine, theirs = student.tokenizer.get_vocab(), other.tokenizer.get_vocab()
  where = f'{key}={other.folder}: its vocabulary is not that of {student.folder}'
  for token, number in sorted(mine.items(), key=lambda item: item[1]):
    if theirs.get(token) != number:
      there = f'number {theirs[token]}' if token in theirs else 'absent'
      raise ConfigError(f'{where}: token {token!r} is {there}, but {number} here')
  if theirs.keys() > mine.keys():
    more = min(theirs.keys() - mine.keys(), key=theirs.__getitem__)
    raise ConfigError(f'{where}: token {more!r}, number {theirs[more]}, is absent here')
  size, config = student.model.config.vocab_size, other.model.config
  if config.vocab_size < size:
    raise ConfigError(
      f'{where}: its table has {config.vocab_size} rows; {size} are needed'
    )
  tables = {'embedding', 'lm_head'} & other.params.keys()
  cut = {name: {'table': other.params[name]['table'][:size]} for name in tables}
  model = dataclasses.replace(other.model, config=config.replace(vocab_size=size))
  return dataclasses.replace(other, model=model, params={**other.params, **cut})
