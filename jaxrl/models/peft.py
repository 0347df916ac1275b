"""Adapters as a folder in the format of Hugging Face's PEFT, which vLLM serves too.

Those of experts and routers are named as layers of their own, as vLLM and checkpoints
name them; PEFT itself finds no such layers in a model of `transformers` 5.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxrl.models import lora, names
from jaxrl.models.config import Lora, ModelConfig
from jaxrl.types import Params

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'


def save(folder: str | Path, config: ModelConfig, params: Params, base: str) -> None:
  """Writes the adapters of `params`, as config.lora says; base: what they belong to.

  PEFT's lora_A is `[rank, inputs]` and its lora_B `[outputs, rank]`, both float32. Each
  expert has its own.
  """
  own, arrays, modules = config.lora, {}, set()
  assert own is not None  # there is nothing to write
  for tensor in names.tensors(lora.bare(config)):
    at, kind = tensor.path[-2:]
    if kind not in ('kernel', 'table') or config.adapters(at) is None:
      continue
    layer = params
    for key in tensor.path[:-1]:
      layer = layer[key]
    left, right = (
      np.asarray(layer[n][tensor.index], np.float32) for n in lora.ADAPTERS
    )
    module = tensor.name.removesuffix('.weight')
    modules.add(module.rpartition('.')[2])
    name = f'base_model.model.{module}'
    left, right = left.reshape(-1, own.rank), right.reshape(own.rank, -1)
    arrays[f'{name}.lora_A.weight'] = np.ascontiguousarray(left.T)
    arrays[f'{name}.lora_B.weight'] = np.ascontiguousarray(right.T)
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  save_file(arrays, folder / TENSORS, metadata={'format': 'pt'})
  settings = _settings(own, sorted(modules), base)
  (folder / CONFIG).write_text(json.dumps(settings, indent=2) + '\n')


def _settings(own: Lora, modules: list[str], base: str) -> dict[str, Any]:
  alpha = int(own.alpha) if own.alpha.is_integer() else own.alpha
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': own.rank,
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
