"""The model that a Tinker server serves, and its adapters as files for others."""

import dataclasses
import pathlib
import tempfile

import msgspec
import numpy as np

from jaxrl.models.model_config import Lora, ModelConfig
from jaxrl.options import JsonObject
from jaxrl.rollout.tinker import row_adapters
from jaxrl.rollout.tinker.pending_results import RequestError
from jaxrl.rollout.tinker.tenant_learner import ALPHA, TenantSnapshot
from jaxrl.types import Params

ADAMW, DIMUON = 'adamw', 'dimuon'  # optimizers, as the API calls them


@dataclasses.dataclass(frozen=True)
class TinkerModel:
  """The model that a server trains and samples from.

  Attributes:
    name: Its name, as clients give it.
    folder: The folder that it was loaded from.
    config: Its shape.
    tokenizer_id: What clients load its tokenizer from.
  """

  name: str
  folder: pathlib.Path
  config: ModelConfig
  tokenizer_id: str

  def check_name(self, name: str | None) -> None:
    """Checks that a client means this model.

    Args:
      name: The name that it gave; None for any.

    Raises:
      RequestError: If it means another one.
    """
    names = {self.name, str(self.folder), str(self.folder.resolve())}
    if name is not None and name.split(':')[0] not in names:
      raise RequestError(
        f'there is no model {name!r} here; this server has {self.name!r}'
      )


def optimizer_config(facts: JsonObject) -> JsonObject:
  """Returns the optimizer of a run or checkpoint as the API describes it.

  Args:
    facts: What is known of it; what was saved without an optimizer has AdamW.
  """
  kind = facts.get('optimizer', ADAMW)
  return {'type': kind, 'version': 1} if kind == DIMUON else {'type': kind}


def trained_layers(facts: JsonObject) -> frozenset[str]:
  """Returns the layers that a run trains.

  Args:
    facts: With train_unembed, train_mlp and train_attn.
  """
  layers = set()
  if facts['train_attn']:
    layers |= {'q', 'k', 'v', 'o'}
  if facts['train_mlp']:
    layers |= {'gate', 'up', 'down'}
  if facts['train_unembed']:
    layers |= {row_adapters.HEAD}
  return frozenset(layers)


def peft_files(
  model: TinkerModel, snapshot: TenantSnapshot, facts: JsonObject
) -> dict[str, bytes]:
  """Returns adapters as the files that PEFT reads.

  Args:
    model: The model.
    snapshot: The adapters.
    facts: Which layers are trained.
  """
  from safetensors.numpy import load_file, save

  from jaxrl.models.peft_export import PEFT_CONFIG, PEFT_TENSORS, save_peft

  layers, rank = trained_layers(facts), facts['rank']
  targets = tuple(name for name in row_adapters.PART_OF if name in layers)
  config = model.config.replace(lora=Lora(rank, ALPHA, targets, 'float32'))
  branches: dict[str, Params] = {'attention': {}, 'mlp': {}}
  for name in targets:
    a, b = snapshot.adapters[name]
    branches[row_adapters.PART_OF[name]][name] = {'lora_a': a, 'lora_b': b}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    save_peft(path, config, {'layers': branches}, model.name)
    tensors = load_file(path / PEFT_TENSORS)
    settings = msgspec.json.decode((path / PEFT_CONFIG).read_bytes())
  if row_adapters.HEAD in layers:
    a, b = snapshot.adapters[row_adapters.HEAD]
    tensors['base_model.model.lm_head.lora_A.weight'] = np.ascontiguousarray(a.T)
    tensors['base_model.model.lm_head.lora_B.weight'] = np.ascontiguousarray(b.T)
    settings['target_modules'] = sorted([*settings['target_modules'], 'lm_head'])
  return {
    PEFT_TENSORS: save(tensors, metadata={'format': 'pt'}),
    PEFT_CONFIG: msgspec.json.encode(settings),
  }
