"""Tokenizer files beside a checkpoint are written, and say which tokens end a reply."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from jaxrl.options import JsonObject

TOKENIZER_FILE, GENERATION_FILE = 'tokenizer.json', 'generation_config.json'
TOKEN_KEYS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
# Every version of `transformers` reads tokenizer.json as it is with this class. Others
# may build another tokenizer from its vocabulary.
PLAIN_CLASS = 'PreTrainedTokenizerFast'


def read_generation_config(folder: Path) -> JsonObject:
  """Reads what a checkpoint says of generation.

  Args:
    folder: The checkpoint.

  Returns:
    The content of generation_config.json; without that file, the ids of special tokens
    that config.json names; without either, nothing.

  Raises:
    ValueError: If the file is not a JSON object.
  """
  path = folder / GENERATION_FILE
  is_own = path.is_file()
  path = path if is_own else folder / 'config.json'
  if not path.is_file():
    return {}
  fields = json.loads(path.read_text(encoding='utf-8'))
  if not isinstance(fields, dict):
    raise ValueError(f'{path.name} must hold an object')
  return (
    fields if is_own else special_tokens({**fields, **fields.get('text_config', {})})
  )


def special_tokens(fields: JsonObject) -> JsonObject:
  """Returns the ids of special tokens among the fields of a config."""
  return {key: fields[key] for key in TOKEN_KEYS if fields.get(key) is not None}


def save_tokenizer(folder: Path, tokenizer: Any) -> JsonObject:
  """Writes a tokenizer, its template and what is known of generation.

  Args:
    folder: An existing folder.
    tokenizer: The tokenizer, perhaps with a `generation_config`.

  Returns:
    What config.json says of it: the ids of special tokens, and which version of
    `transformers` wrote it, without which others doubt its pattern for words.

  Raises:
    OSError: If the folder cannot be written.
  """
  tokenizer.save_pretrained(folder)
  settings = folder / 'tokenizer_config.json'
  if (folder / TOKENIZER_FILE).exists() and settings.exists():
    fields = json.loads(settings.read_text(encoding='utf-8'))
    _write(settings, fields | {'tokenizer_class': PLAIN_CLASS})
  ids = special_tokens({key: getattr(tokenizer, key, None) for key in TOKEN_KEYS})
  generation = {**ids, **(getattr(tokenizer, 'generation_config', None) or {})}
  if generation:
    _write(folder / GENERATION_FILE, generation)
  version = importlib.metadata.version('transformers')
  return {**special_tokens(generation), 'transformers_version': version}


def _write(path: Path, fields: JsonObject) -> None:
  path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + '\n', 'utf-8')
