"""Where a run's model comes from: a Hugging Face folder, or a shape and a seed."""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import jax

from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.models import huggingface
from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Model
from jaxrl.signature import ConfigError
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
  tie_embeddings: bool = True,
) -> ModelConfig:
  """The shape of a model that starts from nothing.

  vocab_size: at most; a tokenizer trained on few texts may stay smaller.
  """
  return ModelConfig(
    vocab_size=vocab_size,
    hidden_size=hidden_size,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    intermediate_size=intermediate_size,
    family=family,
    rope_theta=10_000.0,
    tie_embeddings=tie_embeddings,
    qk_norm=family == 'qwen3',
    attention_bias=family == 'qwen2',
  )


def load(folder: str, *, value_head: bool, dtype: str, remat: str) -> Policy:
  """The policy in a Hugging Face folder. Raises ConfigError for a folder that is none.

  value_head: whether the algorithm trains a critic; a missing head starts at zero.
  """
  try:
    config, params = huggingface.load(folder, value_head=value_head)
    tokenizer = load_tokenizer(folder)
  except (OSError, ValueError) as error:
    raise ConfigError(f'model.checkpoint={folder}: {error}') from error
  model = Model(config, dtype=dtype, remat=remat)
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
) -> Policy:
  """A random policy with a tokenizer trained on `texts`, saved in `folder`.

  If `folder` holds one already it is loaded: a resumed run goes on with its tokenizer.
  """
  if not (folder / 'config.json').exists():
    tokenizer = train_tokenizer(texts, config.vocab_size)
    size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    config = config.replace(vocab_size=size, value_head=value_head)
    params = Model(config).init(key)
    huggingface.save(folder, config, params, tokenizer)
  return load(str(folder), value_head=value_head, dtype=dtype, remat=remat)
