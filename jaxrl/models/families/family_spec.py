"""A `FamilySpec` holds everything that distinguishes one model family from another."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxrl.options import JsonObject

ConfigJson = Mapping[str, Any]  # what a config.json holds
ConfigFields = dict[str, Any]  # fields of a `ModelConfig`, by name


def dense_options(*, tie_embeddings: bool = True) -> ConfigFields:
  """Returns the `ModelConfig` fields that a call string sets for a random dense model.

  Args:
    tie_embeddings: Whether tokens are scored by the table that embeds them.
  """
  return {'tie_embeddings': tie_embeddings}


@dataclasses.dataclass(frozen=True)
class StoredAs:
  """How a checkpoint stores a parameter, where it is not just a linear layer's weight.

  Parameters that a family stores under one name are one tensor there: their outputs
  follow one another, in the order of the family's table.

  Attributes:
    name: The name in a checkpoint, as in `FamilySpec.layer_tensors`.
    transposed: Whether a kernel is `[outputs, inputs]`.
    turns: The field of `ModelConfig` that says how often outputs of the parameters
      under one name take turns, with an equal share of each; '' for once.
    depthwise: Whether it is the kernel `[width, *channels]` of a depthwise convolution,
      there `[channels, 1, width]`.
    dtype: What it is written in; '' is what the folder is written in.
  """

  name: str
  transposed: bool = True
  turns: str = ''
  depthwise: bool = False
  dtype: str = ''


@dataclasses.dataclass(frozen=True)
class FamilySpec:
  """Describes a model family: its config.json, its tensors' names, its layers' options.

  Attributes:
    model_type: The name in config.json.
    architecture: The class in `transformers`, as config.json names it.
    read_config: `(config.json's contents, where) -> fields of ModelConfig`. Raises
      ValueError, beginning with `where`, for a setting that is not supported.
    write_config: `(ModelConfig) -> config.json's contents`, without `architectures`,
      `model_type` and `torch_dtype`.
    top_tensors: Parameter outside the layers, as a dotted path → name in a checkpoint.
    layer_tensors: Parameter of a layer → name in a checkpoint, where `{layer}` stands
      for the layer's number and `{expert}` for the expert's; without `{expert}`, a
      tensor holds all experts. See `StoredAs` for what is stored otherwise.
    tower_tensors: Parameter of the vision tower → name in a checkpoint, where `{layer}`
      stands for the number in the tower.
    later_layers: What the message calls layers after the last, which a checkpoint may
      have and which are left out.
    qk_norm: Whether query and key have an RMS norm; None if config.json says.
    qk_norm_over: Whether that is over each head, or over all heads of a token at once.
    v_norm: Whether values have an RMS norm over each head, without a scale.
    scales_layers: Whether a layer's output is multiplied by a scalar, not trained.
    norms: Where a layer normalizes: 'before' attention and MLP, 'after' them, before
      the residual stream takes their outputs, or 'both'.
    zero_centred_norms: Whether norms multiply by 1 + scale.
    scales_embeddings: Whether embeddings are multiplied by √hidden_size.
    activation: The function of the MLP's gate: 'silu', or 'gelu_tanh'.
    attention_bias: Whether query, key and value have biases; None if config.json says.
    output_bias: Whether the attention's output has a bias where the others have one.
    has_experts: Whether feed-forward layers are mixtures of experts; None if
      config.json says.
    experts_beside_mlp: Whether experts stand beside a dense MLP, each with own norms.
    expert_biases: Whether router and experts have biases.
    router_scores: What makes scores of experts of a router's outputs. Those of
      'sigmoid' get a bias when experts are chosen, which is not trained.
    gating: How an expert's gate works, a name in `kernels.experts.GATINGS`.
    gates_shared_expert: Whether the shared expert's output is multiplied by the sigmoid
      of a gate.
    gates_attention: Whether each head's output is multiplied by the sigmoid of a gate,
      which is projected beside the queries.
    sinks: Whether each head of attention has a sink, a score that no value belongs to.
    skipped_tensors: What a checkpoint may have beside, to be left out with a message:
      patterns of names → what they belong to.
    random_options: The options of a random model in a call string, as keyword-only
      parameters; returns fields of ModelConfig.
  """

  model_type: str
  architecture: str
  read_config: Callable[[ConfigJson, str], ConfigFields]
  # Any is ModelConfig, which refers to this class.
  write_config: Callable[[Any], JsonObject]
  top_tensors: Mapping[str, str]
  layer_tensors: Mapping[str, str | StoredAs]
  tower_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  later_layers: str = ''
  qk_norm: bool | None = False
  qk_norm_over: Literal['head', 'heads'] = 'head'
  v_norm: bool = False
  scales_layers: bool = False
  norms: Literal['before', 'after', 'both'] = 'before'
  zero_centred_norms: bool = False
  scales_embeddings: bool = False
  activation: Literal['silu', 'gelu_tanh'] = 'silu'
  attention_bias: bool | None = None
  output_bias: bool = True
  has_experts: bool | None = False
  experts_beside_mlp: bool = False
  expert_biases: bool = False
  router_scores: Literal['softmax', 'sigmoid'] = 'softmax'
  gating: str = 'silu'
  gates_shared_expert: bool = False
  gates_attention: bool = False
  sinks: bool = False
  skipped_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  random_options: Callable[..., ConfigFields] = dense_options
