"""vLLM options: checks the options of vLLM's engine without importing vLLM."""

import ast
import functools
import importlib.util
import pathlib
import re
import shutil
from typing import Any

import numpy as np

from jaxrl.models import huggingface
from jaxrl.models.model_config import ModelConfig
from jaxrl.options import (
  ConfigError,
  JsonObject,
  Keywords,
  OptionValues,
  unknown_name_error,
)
from jaxrl.rollout.engine.engine_base import EngineTraits

VLLM_TRAITS = EngineTraits(
  needs_ray=True,
  can_sleep=True,
  receives_from_gpu=True,
  constrains_output=True,
  max_top_logprobs=20,  # vLLM's own default
)
# Memory for keys and values, relative to what the slots hold at their longest.
CACHE_MARGIN = 1.5

# Families that vLLM would serve with other log-probs than the learner's, and why.
FAMILY_OBSTACLES = {
  'gpt_oss': "vLLM's loader copies its experts and sinks past an update",
}
# What makes vLLM run on a TPU.
TPU_PLUGIN = 'tpu_inference'
TPU_OBSTACLE = (
  'vLLM on a TPU (tpu-inference) refuses the seed of a request and does not load '
  "weights that are sent to it: use rollout.engine='jax', which runs on the TPU"
)
# Options that other config keys set, with these keys; '' if the engine sets them.
RESERVED_OPTIONS = {
  'model': 'model.checkpoint',
  'tokenizer': 'model.checkpoint',
  'max_model_len': 'batch.max_length',
  'max_num_seqs': 'rollout.max_num_seqs',
  'mm_device_do_normalize': '',
  'data_parallel_size': 'cluster.num_engines',  # digests of replicas are not compared
  'disable_log_stats': '',
  'folder': 'model.checkpoint',
  'logprobs_mode': '',
  'parts': 'cluster.placement',
  'skip_tokenizer_init': '',
  'transfer': 'weight_sync.transport',
  'weight_transfer_config': 'weight_sync.transport',
  'worker_extension_cls': '',
}


def check_vllm_options(
  options: OptionValues, where: str, known: frozenset[str] | None = None
) -> None:
  """Checks options for vLLM's engine by name.

  Args:
    options: Options by name.
    where: Where they were set, for error messages.
    known: The options that vLLM has; by default those of the vLLM that is installed
      here. If it is empty, unknown options are left for vLLM's actor to find.

  Raises:
    ConfigError: If an option is unknown, or is set by the framework itself.
  """
  for name in options:
    if name in RESERVED_OPTIONS:
      key = RESERVED_OPTIONS[name]
      hint = f'set {key} instead' if key else 'the engine needs its own'
      raise ConfigError(f"{where}: option '{name}' cannot be set here: {hint}")
  known = vllm_option_names() if known is None else known
  for name in options:
    if known and name not in known:
      raise unknown_name_error(name, known - RESERVED_OPTIONS.keys(), 'option', where)


def gpu_transfer_problem() -> str:
  """Says why this environment cannot send weights from GPU to GPU; '' if it can.

  Neither torch nor vLLM is imported: torch has a file that says whether it was built
  for CUDA.
  """
  for name in ('torch', 'vllm'):
    if importlib.util.find_spec(name) is None:
      return f'{name} is not installed'
  torch_spec = importlib.util.find_spec('torch')
  assert torch_spec is not None and torch_spec.submodule_search_locations
  torch_folder = torch_spec.submodule_search_locations[0]
  version_text = pathlib.Path(torch_folder, 'version.py').read_text()
  cuda_version = re.search(r'^cuda\b.*= *(.*)$', version_text, re.MULTILINE)
  if cuda_version is None or cuda_version[1].strip() == 'None':
    return 'torch was built without CUDA'
  return ''


@functools.cache
def vllm_option_names() -> frozenset[str]:
  """Reads the options of the vLLM that is installed here off its source.

  Returns:
    The names; none if vLLM is not installed.
  """
  spec = importlib.util.find_spec('vllm')
  if spec is None or not spec.submodule_search_locations:
    return frozenset()
  return _read_option_names(pathlib.Path(spec.submodule_search_locations[0]))


@functools.cache
def option_names_of_python(python: str) -> frozenset[str]:
  """Reads the options of another environment's vLLM off its source.

  Args:
    python: The environment's interpreter, a path or a name.

  Returns:
    The names; none if this machine has no vLLM beside that interpreter.
  """
  folders = _find_package(python, 'vllm')
  return next(map(_read_option_names, folders), frozenset())


def _find_package(python: str, name: str) -> list[pathlib.Path]:
  """Returns the folder of a package beside an interpreter; none if it is not there."""
  program = shutil.which(python)
  if program is None:
    return []
  environment = pathlib.Path(program).absolute().parent.parent
  return list(environment.glob(f'lib/python3*/site-packages/{name}'))


def tpu_problem(python: str = '') -> str:
  """Says why vLLM cannot serve a run where it would run on a TPU; '' if it would not.

  Args:
    python: The interpreter beside which vLLM is; '' means this one.
  """
  if python:
    installed = bool(_find_package(python, TPU_PLUGIN))
  else:
    installed = importlib.util.find_spec(TPU_PLUGIN) is not None
  return TPU_OBSTACLE if installed else ''


def _read_option_names(folder: pathlib.Path) -> frozenset[str]:
  """Returns the public fields of the `AsyncEngineArgs` of the vLLM in a folder."""
  source = folder / 'engine' / 'arg_utils.py'
  if not source.exists():
    return frozenset()
  return frozenset(
    line.target.id
    for node in ast.parse(source.read_text()).body
    if isinstance(node, ast.ClassDef) and node.name in ('EngineArgs', 'AsyncEngineArgs')
    for line in node.body
    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    if not line.target.id.startswith('_')
  )


def check_family(config: ModelConfig) -> None:
  """Checks that vLLM can serve a model, also after an update of its weights.

  Args:
    config: The model's config.

  Raises:
    ConfigError: If it cannot.
  """
  if why := FAMILY_OBSTACLES.get(config.family):
    raise ConfigError(
      f'rollout.engine: vLLM cannot serve family {config.family!r} here: '
      f"{why}. Use the engine 'jax'"
    )
  if config.kv_latent:  # settings that no published model has
    ignored = {
      'rope_interleave=False': not config.rope_interleaved,
      'attention_bias=True': config.attention_bias,
    }
    if setting := next((name for name, is_set in ignored.items() if is_set), None):
      raise ConfigError(
        f'rollout.engine: vLLM ignores {setting} of a model with latent '
        "attention. Use the engine 'jax'"
      )


def check_folder(folder: str | pathlib.Path) -> None:
  """Checks that vLLM names the tensors of a folder's model as the learner does.

  Args:
    folder: A Hugging Face model.

  Raises:
    ConfigError: If it would serve the parts that see or hear, too.
  """
  if huggingface.is_text_part(folder):
    raise ConfigError(
      f'model.checkpoint={folder}: vLLM would serve the whole model, of which '
      'only the text model is trained. Save that in a folder of its own '
      "(docs/models.md), or use the engine 'jax'"
    )


def hf_overrides(config: ModelConfig) -> JsonObject:
  """Returns settings of a config.json under other names, by which vLLM reads them.

  Args:
    config: The model's config.
  """
  if not config.query_growth:
    return {}
  size = dict(config.rope_scaling or ()).get('original_max_position_embeddings')
  growth = {'original_max_position_embeddings': size or config.max_position}
  return {'llama_4_scaling': growth | {'beta': config.query_growth}}


def cpu_compilation(config: ModelConfig, compilation: Any = None) -> Any:
  """Returns the `compilation_config` with which vLLM's CPU build rotates correctly.

  Latent attention gives queries to the rotary embedding as `[tokens, heads, size]`. The
  CPU kernel of vLLM 0.32 rotates such queries wrongly; vLLM's PyTorch code does not.

  Args:
    config: The model's config.
    compilation: The `compilation_config` that the user has set, a dict, or None.
  """
  if not config.kv_latent:
    return compilation
  compilation = dict(compilation or {})
  custom_ops = [*compilation.get('custom_ops', ()), '-rotary_embedding']
  return compilation | {'custom_ops': list(dict.fromkeys(custom_ops))}


def check_cpu_head_size(config: ModelConfig) -> None:
  """Checks that vLLM's attention on this CPU knows the size of the model's heads.

  Otherwise its process dies at the first request.

  Args:
    config: The model.

  Raises:
    ConfigError: If it does not.
  """
  if config.kv_latent:  # which has a kernel of its own
    return
  import torch
  from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore
    CPUAttentionBackend,
  )

  sizes = CPUAttentionBackend.get_supported_head_sizes()
  if config.head_dim not in sizes and not torch.cpu._is_amx_tile_supported():
    raise ConfigError(
      f'rollout.engine: vLLM computes no attention with head_dim={config.head_dim} on '
      f'this CPU, which has no AMX; it does with {", ".join(map(str, sizes))}. The '
      'engine of our own, jax, takes any size'
    )


def cpu_options(
  config: ModelConfig, options: OptionValues, cache_bytes: int
) -> Keywords:
  """Returns a user's options, complemented for vLLM's CPU build.

  On processors with AMX, vLLM 0.32 prefers a backend for latent attention that supports
  bfloat16 only and fails when weights are updated, so another one is requested.

  Args:
    config: The model's config.
    options: The options that the user has set, by name.
    cache_bytes: Memory for keys and values.
  """
  defaults: Keywords = {
    'enforce_eager': True,
    'kv_cache_memory_bytes': cache_bytes,
  }
  if config.kv_latent and 'attention_config' not in options:
    defaults['attention_backend'] = 'CPU_MLA'
  options = defaults | dict(options)
  compilation = cpu_compilation(config, options.get('compilation_config'))
  return options | ({'compilation_config': compilation} if compilation else {})


def kv_cache_bytes(config: ModelConfig, num_tokens: int, dtype: str) -> int:
  """Computes the memory to give to vLLM's cache of keys and values.

  Args:
    config: The model's config.
    num_tokens: Tokens that all slots hold at their longest.
    dtype: Name of the cache's dtype.

  Returns:
    Bytes, with some margin.
  """
  itemsize = np.dtype(huggingface.DTYPES.get(dtype, np.float32)).itemsize
  num_values = sum(layer.cached_width for layer in config.layer_configs)
  return int(CACHE_MARGIN * num_values * itemsize * num_tokens) + (64 << 20)
