"""Model loading gets a run's model from a Hugging Face folder, or creates a random one.

Both come with the tokenizer that lies in the same folder.
"""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

import jax

from jaxrl.component_table import Component, as_call
from jaxrl.data import hub
from jaxrl.data.chat_tokenizer import ChatOptions, ChatTokenizer
from jaxrl.data.model_text.turn_end import ChatOptionError
from jaxrl.data.tokenizer import (
  IMAGE_PAD,
  VIDEO_PAD,
  VISION_END,
  VISION_START,
  load_tokenizer,
  train_tokenizer,
)
from jaxrl.models import families, huggingface
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.remat import RematPolicy
from jaxrl.models.transformer_lm import TransformerLM
from jaxrl.options import (
  ConfigError,
  Keywords,
  check_options,
  defaults,
  error_prefix,
  unknown_name_error,
)
from jaxrl.types import Params

# Vocabulary sizes are a multiple of this, so that meshes divide them. Ids beyond the
# tokenizer's are unused.
VOCAB_MULTIPLE = 32


@dataclasses.dataclass(frozen=True)
class LoadedModel:
  """A model with its parameters and tokenizer.

  Attributes:
    model: The model.
    params: Its parameters.
    tokenizer: Its Hugging Face tokenizer.
    folder: The folder that it was loaded from, in the cache if it is of the Hub.
  """

  model: TransformerLM
  params: Params
  tokenizer: Any
  folder: pathlib.Path

  def without_params(self) -> 'LoadedModel':
    """Returns the same without parameters, so that it does not keep their memory."""
    return dataclasses.replace(self, params={})


def random_config(
  *,
  family: Component = 'qwen3',
  vocab_size: int = 512,
  hidden_size: int = 128,
  num_layers: int = 4,
  num_heads: int = 4,
  num_kv_heads: int = 2,
  head_dim: int = 32,
  intermediate_size: int = 384,
) -> ModelConfig:
  """Returns the config of a model that starts from random parameters.

  Args:
    family: The model family, with rarely used options: 'qwen3(tie_embeddings=False)',
      'qwen3_moe(num_experts=…, num_experts_per_token=…, moe_intermediate_size=…)'. A
      family of your own is named by where its `FamilySpec` is, 'path/file.py:NAME'.
    vocab_size: The largest vocabulary; a tokenizer trained on few texts may be smaller.
    hidden_size: Width of the hidden states.
    num_layers: Number of layers.
    num_heads: Attention heads.
    num_kv_heads: Heads of keys and values. Latent attention has num_heads of them.
    head_dim: Width of a head.
    intermediate_size: Width of the feed-forward layers.

  Returns:
    The config.

  Raises:
    ConfigError: The sizes do not make up a model.
  """
  name, fields = _family(family)
  spec = families.find_family(name)
  with error_prefix('model.random'):
    if (types := fields.get('layer_types')) and num_layers > 0:  # a pattern
      types = (types * (num_layers // len(types) + 1))[-num_layers:]
      layer_kinds = dict(fields['layer_kinds'])
      kinds = tuple((kind, layer_kinds[kind]) for kind in dict.fromkeys(types))
      fields = fields | {'layer_types': types, 'layer_kinds': kinds}
    return ModelConfig(
      vocab_size=vocab_size,
      hidden_size=hidden_size,
      num_layers=num_layers,
      num_heads=num_heads,
      num_kv_heads=num_heads if fields.get('kv_latent') else num_kv_heads,
      head_dim=head_dim,
      intermediate_size=intermediate_size,
      family=name,
      **{
        'rope_theta': 10_000.0,
        'qk_norm': bool(spec.qk_norm),
        'attention_bias': bool(spec.attention_bias),
        **fields,
      },
    )


def _family(family: Component) -> tuple[str, Keywords]:
  """Returns the name of a family, and the config fields that its options set."""
  call = as_call(family)
  name, where = call.name, f'model.random={call}'
  if ':' not in name and name not in families.family_names():
    raise unknown_name_error(name, families.family_names(), 'family', where)
  random_options = families.find_family(name).random_options
  check_options(random_options, call.options, where)
  return name, random_options(**call.options)


def load_model(
  folder: str,
  *,
  value_head: bool,
  dtype: str,
  remat: RematPolicy,
  kernels: str = 'auto',
  chat: ChatOptions | None = None,
  key: str = 'model.checkpoint',
) -> LoadedModel:
  """Loads a model from a Hugging Face folder.

  Args:
    folder: The folder, or a name on the Hub; see `jaxrl.data.hub`.
    value_head: Whether the algorithm trains a critic; a missing head starts at zero.
    dtype: What the model computes in.
    remat: What is recomputed in the backward pass.
    kernels: Which kernels are used.
    chat: How the model's conversations are written, where that is not as the folder
      says; the tokenizer takes it over. None for a model that writes none.
    key: The config key that named the folder, for error messages.

  Returns:
    The model with parameters and tokenizer.

  Raises:
    ConfigError: The folder has no model that can be loaded.
  """
  name = folder
  try:
    folder = hub.find_checkpoint(name)
    config, params = huggingface.load(folder, value_head=value_head)
    tokenizer = load_tokenizer(folder)
    check_table_size(tokenizer, config.vocab_size)
    if chat is not None:
      _take_over(tokenizer, chat)
  except ChatOptionError as error:
    raise ConfigError(f'model.{error.option}: {error} (in {name})') from error
  except (OSError, ValueError) as error:
    raise ConfigError(f'{key}={name}: {error}') from error
  model = TransformerLM(config, dtype=dtype, remat=remat, kernels=kernels)
  return LoadedModel(model, params, tokenizer, pathlib.Path(folder))


def check_table_size(tokenizer: Any, table_size: int) -> None:
  """Checks that a model's embedding has a row for each token of its tokenizer.

  Tokens for images may lie beyond it: a model that sees none never reads them.

  Args:
    tokenizer: The tokenizer.
    table_size: The number of rows.

  Raises:
    ValueError: If a token has no row.
  """
  kinds = ('image', 'video', 'audio', 'boi', 'eoi', 'boa', 'eoa')
  unread = {
    str(value)
    for name, value in tokenizer.special_tokens_map.items()
    if name.startswith(kinds)
  }
  added = tokenizer.added_tokens_decoder
  beyond = [number for number in added if number >= table_size]
  missing = [number for number in beyond if str(added[number]) not in unread]
  size = max([tokenizer.vocab_size, *(number + 1 for number in missing)])
  if size > table_size:
    examples = ', '.join(str(added[number]) for number in missing[:3])
    raise ValueError(
      f'its tokenizer has {size:,} tokens, and its model has rows for {table_size:,}'
      f'{f", so none for {examples}" if examples else ""}: use the tokenizer of this '
      'model, or enlarge its embedding'
    )


def _take_over(tokenizer: Any, chat: ChatOptions) -> None:
  """Makes a tokenizer's own template and stop tokens those of the options."""
  if not chat.chat_template and tokenizer.chat_template is None:
    return  # it may learn texts; whoever needs a template says so
  try:
    stop_ids = ChatTokenizer(tokenizer, chat).stop_token_ids
  except ChatOptionError:
    raise
  except ValueError as error:
    if not chat.chat_template:
      raise
    raise ChatOptionError('chat_template', str(error)) from error
  if chat.chat_template:
    tokenizer.chat_template = chat.chat_template
  tokenizer.generation_config |= {'eos_token_id': list(stop_ids)}


def create_model(
  folder: pathlib.Path,
  config: ModelConfig,
  texts: Iterable[str],
  key: jax.Array,
  *,
  value_head: bool,
  dtype: str,
  remat: RematPolicy,
  kernels: str = 'auto',
  tokenizer: Any = None,
  chat: ChatOptions | None = None,
) -> LoadedModel:
  """Creates a random model and saves it in a folder.

  If the folder has a model already, that is loaded: a resumed run continues with its
  tokenizer.

  Args:
    folder: The folder.
    config: The model's config.
    texts: What a tokenizer is trained on.
    key: The random key of the parameters.
    value_head: Whether the algorithm trains a critic.
    dtype: What the model computes in.
    remat: What is recomputed in the backward pass.
    kernels: Which kernels are used.
    tokenizer: A tokenizer to use instead, with the config's vocabulary size.
    chat: See `load_model`.

  Returns:
    The model with parameters and tokenizer.
  """
  if not (folder / 'config.json').exists():
    sees_images = config.vision is not None
    if tokenizer is None:
      tokenizer = train_tokenizer(texts, config.vocab_size, images=sees_images)
      size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
      config = config.replace(vocab_size=size)
    config = with_image_tokens(config, tokenizer).replace(value_head=value_head)
    params = TransformerLM(config).init(key)
    huggingface.save(folder, config, params, tokenizer)
  return load_model(
    str(folder),
    value_head=value_head,
    dtype=dtype,
    remat=remat,
    kernels=kernels,
    chat=chat,
  )


def with_image_tokens(config: ModelConfig, tokenizer: Any) -> ModelConfig:
  """Returns a config with the ids that a tokenizer gives the tokens of images.

  Args:
    config: The model's config.
    tokenizer: Its tokenizer.

  Raises:
    ConfigError: The model sees images, and the tokenizer lacks such a token.
  """
  if config.vision is None:
    return config
  names = {
    'image_token': IMAGE_PAD,
    'video_token': VIDEO_PAD,
    'start_token': VISION_START,
    'end_token': VISION_END,
  }
  vocabulary = tokenizer.get_vocab()
  if missing := [name for name in names.values() if name not in vocabulary]:
    raise ConfigError(
      f'model.random: family {config.family} needs a tokenizer with '
      f'{", ".join(names.values())}, and this one lacks {", ".join(missing)}'
    )
  ids = {field: vocabulary[name] for field, name in names.items()}
  return config.replace(vision=dataclasses.replace(config.vision, **ids))


def match_vocabulary(other: LoadedModel, student: LoadedModel, key: str) -> LoadedModel:
  """Returns a model cut to the student's vocabulary, if they number tokens alike.

  Rows of its embedding that are in no tokenizer and that the student lacks are cut off.

  Args:
    other: The model, such as a teacher.
    student: The model that is trained.
    key: The config key that named `other`, for error messages.

  Returns:
    `other`, with as many rows in its tables as `student`.

  Raises:
    ConfigError: The vocabularies differ.
  """
  student_vocab = student.tokenizer.get_vocab()
  other_vocab = other.tokenizer.get_vocab()
  problem = f'{key}={other.folder}: its vocabulary is not that of {student.folder}'
  for token, number in sorted(student_vocab.items(), key=lambda item: item[1]):
    if other_vocab.get(token) != number:
      actual = f'number {other_vocab[token]}' if token in other_vocab else 'absent'
      raise ConfigError(
        f'{problem}: token {token!r} is {actual} there, but number {number} in '
        'the model that is trained'
      )
  if other_vocab.keys() > student_vocab.keys():
    extra = min(other_vocab.keys() - student_vocab.keys(), key=other_vocab.__getitem__)
    raise ConfigError(
      f'{problem}: token {extra!r}, number {other_vocab[extra]}, does not '
      'exist in the model that is trained'
    )
  vocab_size, config = student.model.config.vocab_size, other.model.config
  if config.vocab_size < vocab_size:
    raise ConfigError(
      f'{problem}: it has room for {config.vocab_size} tokens, but '
      f'{vocab_size} are needed'
    )
  tables = {'embedding', 'lm_head'} & other.params.keys()
  cut = {name: {'table': other.params[name]['table'][:vocab_size]} for name in tables}
  model = dataclasses.replace(other.model, config=config.replace(vocab_size=vocab_size))
  return dataclasses.replace(other, model=model, params={**other.params, **cut})


def parse_random_config(component: Component, where: str) -> ModelConfig:
  """Returns the shape that a call such as 'qwen3(num_layers=2)' describes.

  Args:
    component: A family with its options: the sizes of `random_config`, and those that
      the family itself takes.
    where: What error messages begin with.

  Raises:
    ConfigError: If the family or an option is wrong.
  """
  call = as_call(component)
  family, options = call.name, call.options
  if ':' not in family and family not in families.family_names():
    raise unknown_name_error(family, families.family_names(), 'family', where)
  sizes = set(defaults(random_config)) - {'family'}
  with error_prefix(where):
    family_defaults = defaults(families.find_family(family).random_options)
  for name in options:
    if name not in sizes and name not in family_defaults:
      raise unknown_name_error(name, sizes | set(family_defaults), 'option', where)
  family_options = {k: v for k, v in options.items() if k not in sizes}
  chosen = {name: value for name, value in options.items() if name in sizes}
  check_options(random_config, chosen, where)
  family_call = dataclasses.replace(call, options=family_options, text='')
  return random_config(family=family_call, **chosen)
