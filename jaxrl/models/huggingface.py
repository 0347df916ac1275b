"""Hugging Face model folders are read and written, with every tensor accounted for."""

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from jaxrl.models import families, hf_names
from jaxrl.models.families.family_spec import ConfigJson
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.tokenizer_files import save_tokenizer
from jaxrl.options import JsonObject
from jaxrl.types import Params

log = logging.getLogger(__name__)
DTYPES = {
  'float32': np.dtype(np.float32),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
}
SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
VALUE_HEAD = 'value_head/model.safetensors'  # in a subfolder that other loaders ignore
LM_HEAD = 'lm_head.weight'
IMAGES = 'preprocessor_config.json'  # image settings of models with a vision tower
PROCESSOR = 'processor_config.json'  # where `transformers` 5 writes these settings
FAMILY_KEY = 'jaxrl_family'  # key in config.json for families outside the package
SCORE_HEAD, CLASSIFIER = 'score.weight', 'ForSequenceClassification'
FUSED_EXPERTS = re.compile(r'(.*\.experts\.)(gate_up_proj|down_proj)')
# In folders of `families.TEXT_MODELS`: the prefix of the text model's tensor names, and
# the names of the other parts of the model.
TEXT_PREFIX = re.compile(r'^(?:(model\.)language_model\.|language_model\.(?=lm_|mod))')
OTHER_PARTS = re.compile(
  r'(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_(vision|audio))\..*'
)
# Buffers in old checkpoints that are derived from the config.
DERIVED = re.compile(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq')


def config_from_hf(data: ConfigJson, *, where: str = 'config.json') -> ModelConfig:
  """Converts the contents of a config.json to a `ModelConfig`.

  Args:
    data: Contents of config.json.
    where: Prefix of error messages.

  Raises:
    ValueError: If the family or a setting is not supported.
  """
  model_type = data.get('model_type')
  if model_type in families.TEXT_MODELS:
    return config_from_hf(_text_settings(data, where), where=f'{where}: text_config')
  family = data.get(FAMILY_KEY) or families.family_name(str(model_type))
  if family is None:
    raise ValueError(
      f'{where}: model_type {model_type!r} is not supported; these are: '
      f'{", ".join(families.model_types())}. A family of your own can be registered: '
      "jaxrl.models.families.register('path/file.py:NAME') (docs/extending.md)"
    )
  fields = families.find_family(family).read_config(data, where)
  try:
    return ModelConfig(family=family, **fields)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error


def _text_settings(data: ConfigJson, where: str) -> JsonObject:
  """Merges the settings of the text model from text_config and the rest of `data`."""
  text_config = data.get('text_config')
  if not isinstance(text_config, Mapping):
    raise ValueError(f'{where}: model_type {data["model_type"]!r} needs a text_config')
  tied = {key: data[key] for key in data.keys() & {'tie_word_embeddings'}}
  settings = {**families.TEXT_MODELS[data['model_type']], **tied, **text_config}
  if quantized := data.get('quantization_config'):
    settings['quantization_config'] = quantized
  return settings


def is_text_part(folder: str | Path) -> bool:
  """Returns whether only the text part of a folder's model is used.

  Args:
    folder: Model folder.
  """
  model_type = _read_json(Path(folder) / 'config.json').get('model_type')
  return model_type in families.TEXT_MODELS


def config_to_hf(config: ModelConfig, dtype: str) -> JsonObject:
  """Returns the contents of a config.json that `transformers` and vLLM can read.

  Args:
    config: Config of the model.
    dtype: Dtype of the tensors in the folder, such as 'bfloat16'.
  """
  spec = families.find_family(config.family)
  external = {} if config.family == spec.model_type else {FAMILY_KEY: config.family}
  return {
    'architectures': [spec.architecture],
    'model_type': spec.model_type,
    **spec.write_config(config),
    'torch_dtype': dtype,
    **external,
  }


def load_config(folder: str | Path) -> ModelConfig:
  """Reads the `ModelConfig` of a model folder from its config.json.

  Args:
    folder: Model folder.

  Raises:
    FileNotFoundError: If the folder has no config.json.
    ValueError: If a setting is not supported.
  """
  path = Path(folder) / 'config.json'
  if not path.is_file():
    hint = ''
    if (path.parent / 'export' / 'config.json').is_file():
      hint = f'. It is the folder of a run, whose model is in {path.parent / "export"}'
    raise FileNotFoundError(f'no model in {folder}: it has no config.json{hint}')
  config = config_from_hf(_read_json(path), where=str(path))
  if config.vision is None:
    return config
  for name, key in ((PROCESSOR, 'image_processor'), (IMAGES, '')):
    file = path.with_name(name)
    data = _read_json(file) if file.is_file() else {}
    if settings := data.get(key) if key else data:
      from jaxrl.models.vision import patch_processor  # only for a vision tower

      vision = patch_processor.read_settings(config.vision, settings, str(file))
      return config.replace(vision=vision)
  return config


def load(
  folder: str | Path, *, value_head: bool | None = None
) -> tuple[ModelConfig, Params]:
  """Loads a model.

  Args:
    folder: Model folder. Tensors in bfloat16 or float16 are converted to float32.
    value_head: Whether to load a value head. None loads it if the folder has one; True
      makes one of zeros if the folder has none; False loads none.

  Returns:
    The config, and the parameters as float32 numpy arrays.

  Raises:
    FileNotFoundError: If a file is missing.
    ValueError: If a tensor is unknown, missing, duplicated, or has an unexpected shape
      or dtype, or if a setting in config.json is not supported. The message names the
      tensor and the file.
  """
  folder = Path(folder)
  config = load_config(folder)
  params, others = _load_tensors(folder, config, (LM_HEAD,))
  if LM_HEAD in others:  # a tied model's must equal the embedding
    file, spare = others[LM_HEAD]
    if not np.array_equal(spare, params['embedding']['table']):
      raise ValueError(
        f'{file}: tensor {LM_HEAD} differs from model.embed_tokens.weight, '
        'though config.json ties them (tie_word_embeddings)'
      )
  return _load_value_head(folder / VALUE_HEAD, config, params, value_head)


def load_scorer(folder: str | Path) -> tuple[ModelConfig, Params]:
  """Loads a reward model, with its score head as the value head.

  The model is a `Qwen2-`, `Qwen3-` or `LlamaForSequenceClassification` of transformers
  with one label, or a folder with a value head that this project wrote.

  Args:
    folder: Model folder.

  Returns:
    The config and the parameters.

  Raises:
    ValueError: As in `load`; also if the folder has neither head, or if the score head
      has several labels.
  """
  folder = Path(folder)
  check_scorer(folder)
  if not _is_classifier(folder):
    return load(folder)
  config = load_config(folder).replace(tie_embeddings=True)  # has no LM head
  params, others = _load_tensors(folder, config, (SCORE_HEAD, LM_HEAD))
  if SCORE_HEAD not in others:
    raise ValueError(f'{folder}: missing tensor {SCORE_HEAD}')
  file, kernel = others[SCORE_HEAD]
  if kernel.shape != (1, config.hidden_size):
    raise ValueError(
      f'{file}: tensor {SCORE_HEAD} has shape {list(kernel.shape)}; a reward model has '
      f'one label, [1, {config.hidden_size}]'
    )
  head = {'kernel': kernel[0].astype(np.float32), 'bias': np.zeros((), np.float32)}
  return config.replace(value_head=True), {**params, 'value_head': head}


def check_scorer(folder: str | Path) -> None:
  """Checks by config.json and file names that a folder holds a reward model.

  Args:
    folder: Model folder.

  Raises:
    ValueError: If the folder holds no reward model.
  """
  if not _is_classifier(Path(folder)) and not (Path(folder) / VALUE_HEAD).is_file():
    raise ValueError(
      f'{folder} is not a reward model: config.json names no …{CLASSIFIER} '
      f'among its architectures, and there is no {VALUE_HEAD}'
    )


def pad_id(folder: str | Path) -> int | None:
  """Returns the padding token that a sequence classifier ignores at the end, if any.

  Args:
    folder: Model folder.
  """
  if not _is_classifier(Path(folder)):
    return None
  return _read_json(Path(folder) / 'config.json').get('pad_token_id')


def _is_classifier(folder: Path) -> bool:
  named = _read_json(folder / 'config.json').get('architectures') or []
  return any(str(name).endswith(CLASSIFIER) for name in named)


def _load_tensors(
  folder: Path, config: ModelConfig, more: tuple[str, ...]
) -> tuple[Params, dict[str, tuple[Path, np.ndarray]]]:
  """Reads the parameters, and those tensors named in `more` that exist.

  Returns the latter by name, each with its file. Raises the errors of `load`.
  """
  wanted = {tensor.name: tensor for tensor in hf_names.checkpoint_tensors(config)}
  params: Params = {}
  others: dict[str, tuple[Path, np.ndarray]] = {}
  seen: dict[str, Path] = {}
  skipped: dict[str, list[str]] = {}
  tensors, is_part = _read_tensors(folder), is_text_part(folder)
  if is_part:
    tensors = ((_text_name(name), file, x) for name, file, x in tensors)
  tensors = _unpacked(tensors, wanted)
  for name, file, array in _single_experts(tensors, wanted):
    if name in seen:
      raise ValueError(f'tensor {name} is in {seen[name]} and again in {file}')
    seen[name] = file
    if name in wanted:
      _place(params, wanted[name], array, file)
    elif name in more:
      others[name] = file, array
    elif is_part and OTHER_PARTS.fullmatch(name):
      skipped.setdefault('what sees or hears', []).append(name)
    elif what := _skipped(config, name):
      skipped.setdefault(what, []).append(name)
    elif not DERIVED.fullmatch(name):
      raise ValueError(
        f'{file}: tensor {name} does not belong to a {config.family} model'
      )
  for what, names in skipped.items():
    log.warning(
      '%s: left out %d tensors of %s, such as %s; they are neither used nor saved',
      *(folder, len(names), what, names[0]),
    )
  missing = [name for name in wanted if name not in seen]
  if missing:
    rest = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
    raise ValueError(f'{folder}: missing tensor {", ".join(missing[:3])}{rest}')
  return params, others


def _text_name(name: str) -> str:
  """Returns the name that a tensor has in a checkpoint of the text model alone."""
  return TEXT_PREFIX.sub(lambda match: match[1] or '', name, count=1)


def _skipped(config: ModelConfig, name: str) -> str:
  """Names the part of the model that a tensor the family skips belongs to, or ''."""
  if _layer_of(name) >= config.num_layers:
    return config.spec.later_layers
  patterns = config.spec.skipped_tensors.items()
  return next((what for text, what in patterns if re.fullmatch(text, name)), '')


def _single_experts(
  tensors: Iterator[tuple[str, Path, np.ndarray]], wanted: Container[str]
) -> Iterator[tuple[str, Path, np.ndarray]]:
  """Yields tensors, with those of all experts of a layer split into one per expert."""
  for name, file, array in tensors:
    match = None if name in wanted else FUSED_EXPERTS.fullmatch(name)
    if match is None or array.ndim != 3:
      yield name, file, array
      continue
    where, names = match[1], match[2].removesuffix('_proj').split('_')
    for expert, matrix in enumerate(array):  # `[outputs, inputs]`
      for part, piece in zip(names, np.split(matrix, len(names)), strict=True):
        yield f'{where}{expert}.{part}_proj.weight', file, piece


def _layer_of(name: str) -> int:
  """Returns the index of the layer that a tensor belongs to; −1 for none."""
  match = re.match(r'model\.layers\.(\d+)\.', name)
  return int(match[1]) if match else -1


def _unpacked(
  tensors: Iterator[tuple[str, Path, np.ndarray]], wanted: Container[str]
) -> Iterator[tuple[str, Path, np.ndarray]]:
  """Yields tensors; dequantizes those in MXFP4 once both of their halves are read."""
  halves: dict[str, dict[str, np.ndarray]] = {}
  for name, file, array in tensors:
    whole, half = name, ''
    if array.dtype == np.uint8:
      from jaxrl.models.families import mxfp4  # only for MXFP4 checkpoints

      whole, half = mxfp4.split_name(name)
    if not half or whole not in wanted:
      if array.dtype == np.uint8:
        raise ValueError(f'{file}: tensor {name} is U8, not floating-point')
      yield name, file, array
      continue
    tensor_halves = halves.setdefault(whole, {})
    tensor_halves[half] = array
    if len(tensor_halves) == len(mxfp4.SUFFIXES):
      blocks, scales = (halves[whole].pop(half) for half in mxfp4.SUFFIXES)
      if blocks.shape != (*scales.shape, 16):
        raise ValueError(
          f'{file}: tensor {whole} in MXFP4 has blocks {list(blocks.shape)} and scales '
          f'{list(scales.shape)}; blocks are scales × 16'
        )
      yield whole, file, mxfp4.dequantize(blocks, scales)


def _read_json(path: Path) -> JsonObject:
  try:
    data = json.loads(path.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON: {error}') from error
  if not isinstance(data, dict):
    raise ValueError(f'{path} must hold a JSON object')
  return data


def _read_tensors(folder: Path) -> Iterator[tuple[str, Path, np.ndarray]]:
  """Yields (name, file, array), and checks the files against the index."""
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
          if kind not in ('F32', 'BF16', 'F16', 'F64', 'U8'):
            raise ValueError(f'{path}: tensor {name} is {kind}, not floating-point')
          yield name, path, tensors.get_tensor(name)
    except SafetensorError as error:
      raise ValueError(f'{path} is not a complete safetensors file: {error}') from error


def _place(
  params: Params,
  tensor: hf_names.CheckpointTensor | hf_names.FusedTensor,
  array: np.ndarray,
  file: Path,
) -> None:
  """Copies one tensor of the checkpoint to its place in `params`."""
  if array.shape != tensor.shape:
    raise ValueError(
      f'{file}: tensor {tensor.name} has shape {list(array.shape)}, '
      f'but config.json asks for {list(tensor.shape)}'
    )
  for part, piece in zip(tensor.parts, tensor.split(array), strict=True):
    branch = params
    for key in part.path[:-1]:
      branch = branch.setdefault(key, {})
    leaf = part.path[-1]
    if not part.index:
      branch[leaf] = piece.astype(np.float32)
      continue
    if leaf not in branch:
      branch[leaf] = np.empty((*part.stacked, *part.inner), np.float32)
    branch[leaf][part.index] = piece


def _load_value_head(
  path: Path, config: ModelConfig, params: Params, wanted: bool | None
) -> tuple[ModelConfig, Params]:
  if wanted is False or (wanted is None and not path.is_file()):
    return config, params
  shapes = {'kernel': (config.hidden_size,), 'bias': ()}
  head = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
  if path.is_file():
    head = load_file(path)
    head_shapes = {name: array.shape for name, array in head.items()}
    if head_shapes != shapes:
      raise ValueError(
        f'{path}: tensors {head_shapes}, but the model asks for {shapes}'
      )
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
  """Writes a model folder that `transformers`, vLLM and `load` can read.

  The folder is written atomically: a model that is already there is replaced only at
  the end.

  Args:
    folder: Folder to write.
    config: Config of the model.
    params: Parameters, as numpy or JAX arrays.
    tokenizer: Tokenizer to write too, or None. config.json names its special tokens.
    dtype: Dtype of the tensors: 'float32', 'bfloat16' or 'float16'.
    max_shard_bytes: Largest size of a weights file. A larger model is split into
      several files with an index.

  Raises:
    FileExistsError: If the folder contains something that is not a model.
    OSError: If the folder cannot be written, for example because the disk is full.
    ValueError: If a parameter has no tensor in a checkpoint, or the dtype is unknown.
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
    settings = config_to_hf(config, dtype)
    if tokenizer is not None:
      with _as_os_errors(folder):
        settings |= save_tokenizer(fresh, tokenizer)
    (fresh / 'config.json').write_text(json.dumps(settings, indent=2) + '\n')
    if config.vision is not None:
      from jaxrl.models.vision import patch_processor  # only for a vision tower

      processor = patch_processor.write_settings(config.vision)
      (fresh / IMAGES).write_text(json.dumps(processor, indent=2) + '\n')
    _write_tensors(fresh, config, params, DTYPES[dtype], max_shard_bytes)
    fresh.chmod(0o755)  # mkdtemp makes it private
    if folder.exists():
      old = fresh.with_name(fresh.name + '-old')
      folder.rename(old)
      cleanup.callback(shutil.rmtree, old, ignore_errors=True)
    fresh.rename(folder)


@contextlib.contextmanager
def _as_os_errors(folder: Path) -> Iterator[None]:
  """Converts I/O errors of `tokenizers`, which are plain exceptions, to OSErrors."""
  try:
    yield
  except Exception as error:
    match = re.search(r'\(os error (\d+)\)', str(error))
    if not match:
      raise
    number = int(match[1])
    raise OSError(number, os.strerror(number), str(folder)) from error


def _paths(params: Params) -> set[str]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {'.'.join(key.key for key in path) for path, _ in leaves}


def _expected_paths(config: ModelConfig) -> set[str]:
  head = {'value_head.kernel', 'value_head.bias'} if config.value_head else set()
  return head | {
    '.'.join(part.path)
    for tensor in hf_names.checkpoint_tensors(config)
    for part in tensor.parts
  }


def _write_tensors(
  folder: Path, config: ModelConfig, params: Params, dtype: np.dtype, limit: int
) -> None:
  """Writes the weights file by file, with one file's tensors in memory at a time."""
  shards: list[list[hf_names.CheckpointTensor | hf_names.FusedTensor]] = [[]]
  size = total = 0
  for tensor in hf_names.checkpoint_tensors(config):
    num_bytes = int(np.prod(tensor.shape)) * _dtype_of(tensor, dtype).itemsize
    if shards[-1] and size + num_bytes > limit:
      shards.append([])
      size = 0
    shards[-1].append(tensor)
    size, total = size + num_bytes, total + num_bytes
  weight_map = {}
  for i, shard in enumerate(shards):
    file = f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
    file = SINGLE if len(shards) == 1 else file
    arrays = {
      tensor.name: np.ascontiguousarray(
        _fetch(params, tensor).astype(_dtype_of(tensor, dtype))
      )
      for tensor in shard
    }
    _save_file(arrays, folder / file)
    weight_map |= dict.fromkeys(arrays, file)
  if len(shards) > 1:
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')
  if config.value_head:
    (folder / VALUE_HEAD).parent.mkdir()
    head = {k: np.asarray(v, np.float32) for k, v in params['value_head'].items()}
    _save_file(head, folder / VALUE_HEAD)


def _dtype_of(
  tensor: hf_names.CheckpointTensor | hf_names.FusedTensor, usual: np.dtype
) -> np.dtype:
  return DTYPES[dtype_name] if (dtype_name := tensor.parts[0].dtype) else usual


def _save_file(arrays: dict[str, np.ndarray], path: Path) -> None:
  try:
    save_file(arrays, path, metadata={'format': 'pt'})
  except SafetensorError as error:  # raised also if the disk is full
    raise OSError(f'could not write {path}: {error}') from error


def export(config: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors of a checkpoint; those from numpy parameters may be views.

  Args:
    config: Config of the model.
    params: Parameters.

  Returns:
    Names and arrays.

  Raises:
    ValueError: If a parameter does not have the shape that the config requires.
  """
  for tensor in hf_names.checkpoint_tensors(config):
    yield tensor.name, _fetch(params, tensor)


def _fetch(
  params: Params, tensor: hf_names.CheckpointTensor | hf_names.FusedTensor
) -> np.ndarray:
  """Returns one tensor in the shape of the checkpoint, as a numpy array on the host."""
  arrays = []
  for part in tensor.parts:
    leaf = params
    for key in part.path:
      leaf = leaf[key]
    arrays.append(np.asarray(leaf[part.index]))
    if arrays[-1].shape != part.inner:
      raise ValueError(
        f'parameter {".".join(part.path)} has shape {arrays[-1].shape}, '
        f'but the config asks for {part.inner}'
      )
  return tensor.join(arrays)
