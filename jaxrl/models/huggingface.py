"""Reads and writes Hugging Face model folders, every tensor accounted for."""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from jaxrl.models import hf_config, names
from jaxrl.models.config import ModelConfig
from jaxrl.types import Params

DTYPES = {
  'float32': np.dtype(np.float32),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
}
SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
VALUE_HEAD = 'value_head/model.safetensors'  # in a folder that other loaders skip
LM_HEAD = 'lm_head.weight'
# Buffers that old checkpoints carry though they follow from the config.
DERIVED = re.compile(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')


def load_config(folder: str | Path) -> ModelConfig:
  """Reads config.json. Raises FileNotFoundError, or ValueError naming the setting."""
  path = Path(folder) / 'config.json'
  if not path.is_file():
    raise FileNotFoundError(f'no model in {folder}: it has no config.json')
  return hf_config.from_hf(_read_json(path), where=str(path))


def load(
  folder: str | Path, *, value_head: bool | None = None
) -> tuple[ModelConfig, Params]:
  """Loads `(config, params)`, params as float32 numpy arrays.

  value_head: None loads one if the folder has it; True makes a zero one if it has
  not; False leaves it out. Files in bfloat16 or float16 are widened.

  Raises FileNotFoundError for a missing file, and ValueError, naming the tensor and
  the file, for one that is unknown, missing, given twice, of another shape or of an
  unsupported type, or for a setting in config.json that is not supported.
  """
  folder = Path(folder)
  config = load_config(folder)
  wanted = {tensor.name: tensor for tensor in names.tensors(config)}
  params: Params = {}
  seen: dict[str, Path] = {}
  for name, file, array in _read_tensors(folder):
    if name in seen:
      raise ValueError(f'tensor {name} is in {seen[name]} and again in {file}')
    seen[name] = file
    if name in wanted:
      _place(params, wanted[name], array, config.num_layers, file)
    elif name == LM_HEAD:  # of a tied model: must say the same as the embedding
      params['spare'] = array
    elif not DERIVED.fullmatch(name):
      raise ValueError(f'{file}: tensor {name} has no place in a {config.family} model')
  missing = [name for name in wanted if name not in seen]
  if missing:
    more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
    raise ValueError(f'{folder}: missing tensor {", ".join(missing[:3])}{more}')
  spare = params.pop('spare', None)
  if spare is not None and not np.array_equal(spare, params['embedding']['table']):
    raise ValueError(
      f'{seen[LM_HEAD]}: tensor {LM_HEAD} differs from model.embed_tokens.weight, '
      'though config.json ties them (tie_word_embeddings)'
    )
  return _load_value_head(folder / VALUE_HEAD, config, params, value_head)


def _read_json(path: Path) -> dict[str, Any]:
  try:
    data = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}') from error
  if not isinstance(data, dict):
    raise ValueError(f'{path} must hold a JSON object')
  return data


def _read_tensors(folder: Path) -> Iterator[tuple[str, Path, np.ndarray]]:
  """Yields (name, file, array), and checks that the index speaks the truth."""
  weight_map = None
  if (folder / INDEX).is_file():
    weight_map = _read_json(folder / INDEX).get('weight_map')
    if not isinstance(weight_map, dict):
      raise ValueError(f'{folder / INDEX} has no weight_map')
  files = sorted(set(weight_map.values())) if weight_map else [SINGLE]
  for file in files:
    path = folder / file
    if not path.is_file():
      raise FileNotFoundError(f'no weights in {folder}: {file} is not there')
    try:
      with safe_open(path, 'numpy') as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
          if weight_map is not None and weight_map.get(name) != file:
            raise ValueError(f'{path}: tensor {name} is not listed there by {INDEX}')
          kind = tensors.get_slice(name).get_dtype()
          if kind not in ('F32', 'BF16', 'F16', 'F64'):
            raise ValueError(f'{path}: tensor {name} is {kind}, not floating-point')
          yield name, path, tensors.get_tensor(name)
    except SafetensorError as error:
      raise ValueError(f'{path} is not a whole safetensors file: {error}') from error


def _place(
  params: Params, tensor: names.Tensor, array: np.ndarray, num_layers: int, file: Path
) -> None:
  """Puts one tensor of the checkpoint where it belongs in `params`."""
  if array.shape != tensor.shape:
    raise ValueError(
      f'{file}: tensor {tensor.name} has shape {list(array.shape)}, '
      f'but config.json asks for {list(tensor.shape)}'
    )
  branch = params
  for key in tensor.path[:-1]:
    branch = branch.setdefault(key, {})
  leaf, array = tensor.path[-1], tensor.from_hf(array)
  if tensor.layer is None:
    branch[leaf] = array.astype(np.float32)
    return
  if leaf not in branch:
    branch[leaf] = np.empty((num_layers, *tensor.inner), np.float32)
  branch[leaf][tensor.layer] = array


def _load_value_head(
  path: Path, config: ModelConfig, params: Params, wanted: bool | None
) -> tuple[ModelConfig, Params]:
  if wanted is False or (wanted is None and not path.is_file()):
    return config, params
  shapes = {'kernel': (config.hidden_size,), 'bias': ()}
  head = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
  if path.is_file():
    head = load_file(path)
    found = {name: array.shape for name, array in head.items()}
    if found != shapes:
      raise ValueError(f'{path}: tensors {found}, but the model asks for {shapes}')
  return config.replace(value_head=True), {**params, 'value_head': head}


def save(
  folder: str | Path,
  config: ModelConfig,
  params: Params,
  tokenizer: Any = None,
  *,
  dtype: str = 'float32',
  max_shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a folder that `transformers`, vLLM and `load` read.

  params: numpy or JAX arrays. tokenizer: written beside, its special tokens named in
  config.json. dtype: 'float32', 'bfloat16' or 'float16'. A model of more than
  `max_shard_bytes` is cut into several files with an index.

  The folder appears whole or not at all: an earlier model there is replaced at the
  end. Raises FileExistsError when it holds something that is not a model.
  """
  folder = Path(folder)
  extra = sorted(_paths(params) - _expected_paths(config))
  if extra:
    raise ValueError(f'parameter {extra[0]} has no place in a checkpoint: not saved')
  if dtype not in DTYPES:
    raise ValueError(f'dtype {dtype!r} is not one of {", ".join(DTYPES)}')
  occupied = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
  if occupied and not (folder / 'config.json').is_file():
    raise FileExistsError(f'{folder} holds something that is not a model: not replaced')
  folder.parent.mkdir(parents=True, exist_ok=True)
  fresh = Path(tempfile.mkdtemp(prefix=f'.{folder.name}-', dir=folder.parent))
  with contextlib.ExitStack() as cleanup:
    cleanup.callback(shutil.rmtree, fresh, ignore_errors=True)
    settings = hf_config.to_hf(config, dtype)
    if tokenizer is not None:
      tokenizer.save_pretrained(fresh)
      settings |= _special_tokens(tokenizer)
    (fresh / 'config.json').write_text(json.dumps(settings, indent=2) + '\n')
    _write_tensors(fresh, config, params, DTYPES[dtype], max_shard_bytes)
    fresh.chmod(0o755)  # mkdtemp makes it private
    if folder.exists():
      old = fresh.with_name(fresh.name + '-old')
      folder.rename(old)
      cleanup.callback(shutil.rmtree, old, ignore_errors=True)
    fresh.rename(folder)


def _paths(params: Params) -> set[str]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {'.'.join(key.key for key in path) for path, _ in leaves}


def _expected_paths(config: ModelConfig) -> set[str]:
  head = {'value_head.kernel', 'value_head.bias'} if config.value_head else set()
  return {'.'.join(tensor.path) for tensor in names.tensors(config)} | head


def _special_tokens(tokenizer: Any) -> dict[str, int]:
  keys = ('bos_token_id', 'eos_token_id', 'pad_token_id')
  ids = {key: getattr(tokenizer, key, None) for key in keys}
  return {key: value for key, value in ids.items() if value is not None}


def _write_tensors(
  folder: Path, config: ModelConfig, params: Params, dtype: np.dtype, limit: int
) -> None:
  """Writes the weights file by file, holding one file's tensors at a time."""
  shards: list[list[names.Tensor]] = [[]]
  size = total = 0
  for tensor in names.tensors(config):
    num_bytes = int(np.prod(tensor.shape)) * dtype.itemsize
    if shards[-1] and size + num_bytes > limit:
      shards.append([])
      size = 0
    shards[-1].append(tensor)
    size, total = size + num_bytes, total + num_bytes
  weight_map = {}
  for i, shard in enumerate(shards):
    file = f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
    file = SINGLE if len(shards) == 1 else file
    arrays = {tensor.name: _fetch(params, tensor, dtype) for tensor in shard}
    _save_file(arrays, folder / file)
    weight_map |= dict.fromkeys(arrays, file)
  if len(shards) > 1:
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')
  if config.value_head:
    (folder / VALUE_HEAD).parent.mkdir()
    head = {k: np.asarray(v, np.float32) for k, v in params['value_head'].items()}
    _save_file(head, folder / VALUE_HEAD)


def _save_file(arrays: dict[str, np.ndarray], path: Path) -> None:
  try:
    save_file(arrays, path, metadata={'format': 'pt'})
  except SafetensorError as error:  # a full disk comes as this
    raise OSError(f'could not write {path}: {error}') from error


def _fetch(params: Params, tensor: names.Tensor, dtype: np.dtype) -> np.ndarray:
  """One tensor in the checkpoint's shape and type, from wherever `params` lives."""
  leaf = params
  for key in tensor.path:
    leaf = leaf[key]
  array = np.asarray(leaf if tensor.layer is None else leaf[tensor.layer])
  if array.shape != tensor.inner:
    raise ValueError(
      f'parameter {".".join(tensor.path)} has shape {array.shape}, '
      f'but the config asks for {tensor.inner}'
    )
  return np.ascontiguousarray(tensor.to_hf(array.astype(dtype)))
