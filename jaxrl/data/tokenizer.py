"""Tokenizers are loaded from a checkpoint or trained as a small byte-level BPE."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl.models.tokenizer_files import TOKENIZER_FILE, read_generation_config

if TYPE_CHECKING:  # transformers takes seconds to import: where it is used
  from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, START, END = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
NUM_BYTES = 256

# ChatML: every message between START + role and END, each on its own lines. Tools are
# announced in a first system message and called in the format of Hermes and Qwen.
CHAT_TEMPLATE = (
  '{% if tools %}'
  "{{ '<|im_start|>system\\nTools:\\n' }}"
  "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
  """{{ 'To call one: <tool_call>{"name": ..., "arguments": {...}}</tool_call>' }}"""
  "{{ '<|im_end|>\\n' }}"
  '{% endif %}'
  '{% for message in messages %}'
  "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
  "{% for call in message['tool_calls'] or [] %}"
  """{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}"""
  "{{ call.function.arguments | tojson + '}</tool_call>' }}"
  '{% endfor %}'
  "{{ '<|im_end|>' + '\\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# Tokens around and for images, and what the template of a model that sees them renders.
VISION_START, VISION_END = '<|vision_start|>', '<|vision_end|>'
IMAGE_PAD, VIDEO_PAD = '<|image_pad|>', '<|video_pad|>'
_TEXT = "(message['content'] or '') }}\""
IMAGE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
  "+ (message['content'] or '') }}",
  '}}'
  "{% if not message['content'] or message['content'] is string %}"
  "{{ message['content'] or '' }}"
  "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
  f"{{{{ '{VISION_START}{IMAGE_PAD}{VISION_END}' }}}}"
  "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}",
)

GGUF_MODULE = 'transformers.modeling_gguf_pytorch_utils'


def postpone_torch() -> None:
  """Keeps the tokenizers of transformers from importing torch before they need it.

  They import it where it is installed, for GGUF files alone, which takes a second of
  each process. The module that does so is loaded when it is first used instead.
  """
  if GGUF_MODULE in sys.modules:
    return
  postponed = ModuleType(GGUF_MODULE)

  def load(name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    if sys.modules.get(GGUF_MODULE) is postponed:
      del sys.modules[GGUF_MODULE]
    return getattr(importlib.import_module(GGUF_MODULE), name)

  def load_gguf_checkpoint(*args: object, **kwargs: object) -> Any:
    return load('load_gguf_checkpoint')(*args, **kwargs)

  # The name that transformers takes from the module; others load it.
  vars(postponed).update(load_gguf_checkpoint=load_gguf_checkpoint, __getattr__=load)
  sys.modules[GGUF_MODULE] = postponed


postpone_torch()

# Time to train grows with the square of the longest word.
LONG_RUN = re.compile(r'(\S{1000}|\s{1000})(?:(?<=\S)\S+|(?<=\s)\s+)')


def train_tokenizer(
  texts: Iterable[str], vocab_size: int, *, images: bool = False
) -> PreTrainedTokenizerFast:
  """Trains a byte-level BPE tokenizer with a ChatML template.

  Any text survives encoding and decoding unchanged. Each digit is a token. `<|im_end|>`
  ends a turn (eos), `<|endoftext|>` pads. The vocabulary may stay smaller than
  `vocab_size` if the texts hold too few pairs to merge. The same texts give the same
  tokenizer.

  Args:
    texts: The training texts. Of words longer than 1,000 letters, the beginning counts.
    vocab_size: The largest size of the vocabulary.
    images: Whether there are tokens for images, which the template renders.

  Returns:
    The tokenizer.

  Raises:
    ValueError: If `vocab_size` cannot hold the bytes and the special tokens.
  """
  image_tokens = [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD] if images else []
  specials = [PAD, START, END, *image_tokens]
  if vocab_size < NUM_BYTES + len(specials):
    raise ValueError(
      f'vocab_size={vocab_size} is too small: {NUM_BYTES} bytes and {len(specials)} '
      f'special tokens need at least {NUM_BYTES + len(specials)}'
    )
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=specials,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator((LONG_RUN.sub(r'\1', text) for text in texts), trainer)
  from transformers import PreTrainedTokenizerFast

  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token=END,
    pad_token=PAD,
    additional_special_tokens=[START, *image_tokens],
    chat_template=IMAGE_CHAT_TEMPLATE if images else CHAT_TEMPLATE,
    clean_up_tokenization_spaces=False,
  )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
  """Loads the tokenizer of a Hugging Face folder on this machine's disk.

  Nothing is downloaded.

  Args:
    folder: The folder.

  Returns:
    The tokenizer. Its `image_processor` is the `PatchProcessor` of the folder's model,
    or None if that sees no images. Its `generation_config` is what the folder says of
    generation, with the ids of the tokens that end a reply as `eos_token_id`.

  Raises:
    FileNotFoundError: If the folder does not exist or holds no tokenizer.
    ValueError: If its files do not form a usable tokenizer.
  """
  folder = Path(folder)
  if not folder.is_dir():
    raise FileNotFoundError(f'no folder {folder} to load a tokenizer from')
  names = (TOKENIZER_FILE, 'tokenizer_config.json', 'vocab.json', 'tokenizer.model')
  if not any((folder / name).exists() for name in names):
    raise FileNotFoundError(f'{folder} holds no tokenizer: none of {", ".join(names)}')
  try:
    tokenizer = _tokenizer_class(folder).from_pretrained(
      str(folder), local_files_only=True
    )
    tokenizer.generation_config = read_generation_config(folder)
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(f'{folder} holds no usable tokenizer: {error}') from error
  tokenizer.image_processor = _image_processor(folder)
  return tokenizer


def _image_processor(folder: Path) -> Any:
  """Returns what cuts images for the folder's model, if there is one that sees them."""
  config = folder / 'config.json'
  if not config.is_file() or '"vision_config"' not in config.read_text():
    return None
  from jaxrl.models import huggingface  # few models see images
  from jaxrl.models.vision.patch_processor import PatchProcessor

  vision = huggingface.load_config(folder).vision
  return None if vision is None else PatchProcessor(vision)


def _tokenizer_class(folder: Path) -> type:
  """Returns the class that loads the tokenizer.

  A `tokenizer.json` is read as it is. The class that `tokenizer_config.json` names may
  build another tokenizer from its vocabulary: of DeepSeek's, LlamaTokenizerFast, which
  loses the spaces.
  """
  if (folder / TOKENIZER_FILE).exists():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast
  from transformers import AutoTokenizer

  return AutoTokenizer
