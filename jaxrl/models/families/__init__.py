"""Model families: one file each, found by the `model_type` of a config.json.

To add a family to the package, write a file with a `FamilySpec` and add a line to
`BUILT_IN`. A family of your own stays in a file of its own: name it where a family is
asked for, as `path/file.py:NAME` or `package.module:NAME`, or `register` that name so
that folders with its `model_type` can be loaded.
"""

from jaxrl.models.families.family_spec import FamilySpec
from jaxrl.options import JsonObject, unknown_name_error
from jaxrl.user_code import import_object

# `model_type` → where its `FamilySpec` is.
BUILT_IN = {
  'qwen2': 'jaxrl.models.families.qwen2:QWEN2',
  'qwen3': 'jaxrl.models.families.qwen3:QWEN3',
  'qwen3_moe': 'jaxrl.models.families.qwen3_moe:QWEN3_MOE',
  'qwen3_next': 'jaxrl.models.families.qwen3_next:QWEN3_NEXT',
  'qwen3_5_text': 'jaxrl.models.families.qwen3_next:QWEN3_5',
  'qwen3_5_moe_text': 'jaxrl.models.families.qwen3_next:QWEN3_5_MOE',
  'qwen3_5': 'jaxrl.models.families.qwen3_5:QWEN3_5',
  'qwen3_5_moe': 'jaxrl.models.families.qwen3_5:QWEN3_5_MOE',
  'qwen3_vl': 'jaxrl.models.families.qwen3_vl:QWEN3_VL',
  'llama': 'jaxrl.models.families.llama3:LLAMA3',
  'mistral': 'jaxrl.models.families.mistral:MISTRAL',
  'ministral': 'jaxrl.models.families.mistral:MINISTRAL',
  'ministral3': 'jaxrl.models.families.ministral3:MINISTRAL3',
  'phi3': 'jaxrl.models.families.phi3:PHI3',
  'smollm3': 'jaxrl.models.families.smollm3:SMOLLM3',
  'olmo3': 'jaxrl.models.families.olmo3:OLMO3',
  'gemma2': 'jaxrl.models.families.gemma:GEMMA2',
  'gemma3_text': 'jaxrl.models.families.gemma:GEMMA3',
  'gemma4_text': 'jaxrl.models.families.gemma4:GEMMA4',
  'gpt_oss': 'jaxrl.models.families.gpt_oss:GPT_OSS',
  'glm4_moe': 'jaxrl.models.families.glm4_moe:GLM4_MOE',
  'glm4_moe_lite': 'jaxrl.models.families.glm4_moe_lite:GLM4_MOE_LITE',
  'deepseek_v3': 'jaxrl.models.families.deepseek_v3:DEEPSEEK_V3',
}
# Other names of an architecture, in config.json; folders are written with the first.
ALIASES = {'kimi_k2': 'deepseek_v3'}
# Models that see or hear, of which only the text model is computed: `model_type` → what
# `transformers` assumes where their text_config is silent.
TEXT_MODELS: dict[str, JsonObject] = {
  'gemma3': {
    'model_type': 'gemma3_text',
    'vocab_size': 262208,
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
  },
  'gemma4': {'model_type': 'gemma4_text'},
  'mistral3': {'model_type': 'mistral'},
}
_registered: dict[str, str] = {}  # `model_type` of a family from outside → its location


def family_names() -> list[str]:
  """Returns the names of the built-in families and of those registered."""
  return [*BUILT_IN, *_registered]


def model_types() -> list[str]:
  """Returns each `model_type` of a config.json that can be read."""
  return [*family_names(), *ALIASES, *TEXT_MODELS]


def find_family(name: str) -> FamilySpec:
  """Returns the family of this name, importing only its file.

  Args:
    name: A `model_type`, or the location of a `FamilySpec` outside the package,
      `path/file.py:NAME` or `package.module:NAME`.

  Raises:
    ValueError: If there is no such family.
  """
  location = name if ':' in name else {**BUILT_IN, **_registered}.get(name)
  if location is None:
    raise unknown_name_error(name, family_names(), 'family', 'model')
  spec = import_object(location, f'model family {name!r}')
  if not isinstance(spec, FamilySpec):
    raise ValueError(
      f'{location} is a {type(spec).__name__}; a model family is a FamilySpec'
    )
  return spec


def register(location: str) -> FamilySpec:
  """Makes a family from outside the package known by its `model_type`.

  Folders whose config.json has that `model_type` can then be loaded in this process.

  Args:
    location: `path/file.py:NAME` or `package.module:NAME` of a `FamilySpec`.

  Returns:
    The family.

  Raises:
    ValueError: If there is none, or if its `model_type` is that of another family.
  """
  spec = find_family(location)
  known = {**BUILT_IN, **_registered}.get(spec.model_type, location)
  if known != location:
    raise ValueError(
      f'{location}: model_type {spec.model_type!r} is already that of {known}'
    )
  _registered[spec.model_type] = location
  return spec


def family_name(model_type: str) -> str | None:
  """Returns what `ModelConfig.family` is for a config.json's `model_type`.

  Returns:
    The name of a built-in family; the location of a registered one, by which other
    processes find it too; None for neither.
  """
  name = ALIASES.get(model_type, model_type)
  return name if name in BUILT_IN else _registered.get(name)
