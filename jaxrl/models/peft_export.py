"""Exports adapters to a folder in the format of Hugging Face's PEFT, which vLLM reads.

Adapters of experts and routers are named as layers of their own, as vLLM and
checkpoints name them; PEFT itself finds no such layers in a model of `transformers` 5.
"""

import json
from pathlib import Path

import numpy as np

from jaxrl.models import hf_names, lora
from jaxrl.models.model_config import Lora, ModelConfig
from jaxrl.options import JsonObject
from jaxrl.types import Params

PEFT_CONFIG, PEFT_TENSORS = 'adapter_config.json', 'adapter_model.safetensors'


def save_peft(
  folder: str | Path, config: ModelConfig, params: Params, base: str
) -> None:
  """Writes adapters to a folder that PEFT and vLLM read.

  PEFT's lora_A is `[rank, inputs]` and its lora_B `[outputs, rank]`, both float32. Each
  expert has its own.

  Args:
    folder: The folder.
    config: The model's shape; it has `lora`.
    params: The parameters.
    base: The name of the model that they belong to.
  """
  from safetensors.numpy import save_file  # benchmarks on a GPU have none

  adapters, arrays, modules = config.lora, {}, set()
  assert adapters is not None  # there is nothing to write
  for tensor in hf_names.checkpoint_tensors(lora.base_config(config)):
    branches = [_branch(params, part.path[:-1]) for part in tensor.parts]
    if not any('lora_a' in branch for branch in branches):
      continue
    kind, names = tensor.parts[0].path[-1], [part.path[-2] for part in tensor.parts]
    if kind not in ('kernel', 'table'):
      continue
    if isinstance(tensor, hf_names.FusedTensor) or tensor.lead:
      raise ValueError(
        f'adapters of {", ".join(names)} cannot be exported for PEFT: a checkpoint of '
        f'family {config.family!r} stores them together, as {tensor.name}. Merge them'
      )
    left, right = (
      np.asarray(branches[0][n][tensor.index], np.float32) for n in lora.ADAPTERS
    )
    module = tensor.name.removesuffix('.weight')
    modules.add(module.rpartition('.')[2])
    name = f'base_model.model.{module}'
    left, right = left.reshape(-1, adapters.rank), right.reshape(adapters.rank, -1)
    arrays[f'{name}.lora_A.weight'] = np.ascontiguousarray(left.T)
    arrays[f'{name}.lora_B.weight'] = np.ascontiguousarray(right.T)
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  save_file(arrays, folder / PEFT_TENSORS, metadata={'format': 'pt'})
  settings = _peft_settings(adapters, sorted(modules), base)
  (folder / PEFT_CONFIG).write_text(json.dumps(settings, indent=2) + '\n')


def _branch(params: Params, path: tuple[str, ...]) -> Params:
  """Returns the branch of a tree at a path; {} if there is none."""
  for key in path:
    params = params.get(key, {})
  return params


def _peft_settings(adapters: Lora, modules: list[str], base: str) -> JsonObject:
  alpha = int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': adapters.rank,
    'lora_alpha': alpha,
    'lora_dropout': 0.0,
    'target_modules': modules,
    'bias': 'none',
    'fan_in_fan_out': False,
    'use_rslora': False,
    'use_dora': False,
    'modules_to_save': None,
    'inference_mode': True,
  }
