"""The options of vLLM's engine, and whether it is here, without importing vLLM."""

import ast
import functools
import importlib.util
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.models import huggingface
from jaxrl.models.config import ModelConfig
from jaxrl.signature import ConfigError, unknown

SPARE = 1.5  # room for keys and values beyond what the slots hold at their longest

# What the run itself decides, and by which key.
OURS = {
  'model': 'model.checkpoint',
  'tokenizer': 'model.checkpoint',
  'max_model_len': 'batch.max_length',
  'max_num_seqs': 'rollout.num_slots',
  'data_parallel_size': 'cluster.num_engines',  # digests of replicas are not compared
  'disable_log_stats': '',
  'folder': 'model.checkpoint',
  'logprobs_mode': '',
  'parts': 'cluster.placement',
  'skip_tokenizer_init': '',
  'transfer': 'cluster.weights',
  'weight_transfer_config': 'cluster.weights',
  'worker_extension_cls': '',
}


def check(
  options: Mapping[str, Any], where: str, known: frozenset[str] | None = None
) -> None:
  """Raises ConfigError for an option that vLLM has not, or that is not the user's.

  known: vLLM's options, by default those of the vLLM that is installed here. Where
  they are not known only the latter is checked: vLLM's actor checks the rest.
  """
  for name in options:
    if name in OURS:
      key = OURS[name]
      hint = f'set --config.{key} instead' if key else 'the engine needs its own'
      raise ConfigError(f"{where}: option '{name}' is not to be set: {hint}")
  known = names() if known is None else known
  for name in options:
    if known and name not in known:
      raise unknown(name, known - OURS.keys(), 'option', where)


def no_gpu_transfer() -> str:
  """Why a process of this environment cannot send from GPU to GPU; '' if it can.

  Neither is imported: torch says in a file whether it was built for CUDA.
  """
  for name in ('torch', 'vllm'):
    if importlib.util.find_spec(name) is None:
      return f'{name} is not installed'
  torch = importlib.util.find_spec('torch')
  assert torch is not None and torch.submodule_search_locations
  said = pathlib.Path(torch.submodule_search_locations[0], 'version.py').read_text()
  found = re.search(r'^cuda\b.*= *(.*)$', said, re.MULTILINE)
  if found is None or found[1].strip() == 'None':
    return 'torch was built without CUDA'
  return ''


@functools.cache
def names() -> frozenset[str]:
  """The fields of vLLM's `AsyncEngineArgs`, read off its source; empty without it."""
  spec = importlib.util.find_spec('vllm')
  if spec is None or not spec.submodule_search_locations:
    return frozenset()
  file = pathlib.Path(spec.submodule_search_locations[0], 'engine', 'arg_utils.py')
  classes = {
    node.name: node
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.ClassDef)
  }
  return frozenset(
    line.target.id
    for name in ('EngineArgs', 'AsyncEngineArgs')
    for line in classes[name].body
    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
  )


def cache_bytes(shape: ModelConfig, tokens: int, dtype: str) -> int:
  """Bytes of keys and values of so many tokens, and some more."""
  itemsize = np.dtype(huggingface.DTYPES.get(dtype, np.float32)).itemsize
  each = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize
  return int(SPARE * each * tokens) + (64 << 20)
