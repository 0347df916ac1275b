"""Model configuration: the shape of a model, and that of its layers of each kind."""

import copy
import dataclasses
import functools
from typing import Any

from jaxrl.models import families

LORA_TARGETS = (
  *('q', 'k', 'v', 'o'),
  *('q_a', 'q_b', 'kv_a', 'kv_b'),
  *('gate', 'up', 'down', 'router', 'lm_head'),
  *('output_gate', 'beta', 'decay'),
)
# Linear layers of latent attention → the targets that stand for them too.
LATENT_TARGETS = {
  'q_a': ('q',),
  'q_b': ('q',),
  'kv_a': ('k', 'v'),
  'kv_b': ('k', 'v'),
}
TOWER_TRAINING = ('frozen', 'full', 'lora')

MAX_PARAMETERS = 5 * 10**12  # more are a mistake, and would fail when memory runs out
SIZES = (
  'vocab_size',
  'hidden_size',
  'num_layers',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'intermediate_size',
)
LINEAR_SIZES = (
  'linear_key_heads',
  'linear_value_heads',
  'linear_key_dim',
  'linear_value_dim',
  'conv_width',
)
EXPERT_SIZES = (
  'num_experts',
  'num_experts_per_token',
  'moe_intermediate_size',
  'shared_expert_size',
)


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters; see `jaxrl.models.lora.lora_adapters`, which checks them.

  Attributes:
    rank: Their rank.
    alpha: They are scaled by alpha / rank.
    targets: The layers that have them, among LORA_TARGETS.
    base: The type that frozen parameters are kept in.
    transfer: What engines get: 'merged' weights or 'adapters'.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]
  base: str
  transfer: str = 'merged'

  @property
  def scale(self) -> float:
    """Returns alpha / rank."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """The tower that turns images into features in the place of tokens.

  An image is cut into patches; `merge_size`² of them become one feature, which stands
  at one placeholder token. Features taken between the tower's layers are added to the
  states after the first layers of the language model (arXiv 2406.04334).

  Attributes:
    num_layers: Layers of the tower.
    hidden_size: Their width.
    num_heads: Attention heads.
    intermediate_size: Inner width of an MLP.
    deepstack_layers: The layers after which features are taken.
    num_positions: Learned positions, of a square grid.
    channels: Colours of a pixel.
    patch_size: Pixels of a patch's side.
    frames_per_patch: Frames of a patch; an image is repeated.
    merge_size: Patches of the side of the square that becomes one feature.
    image_token: The id of the placeholder.
    video_token: That of videos, which are not supported.
    start_token: The id before an image's placeholders.
    end_token: The id after them.
    min_pixels: The least pixels that an image is resized to.
    max_pixels: The most.
    mean: What is subtracted from pixels between 0 and 1, by colour.
    std: What they are divided by then.
    train: 'frozen', 'full' to train the tower, or 'lora' to train adapters in it, of
      which the model's `lora` says the rank.
  """

  num_layers: int
  hidden_size: int
  num_heads: int
  intermediate_size: int
  deepstack_layers: tuple[int, ...] = ()
  num_positions: int = 2304
  channels: int = 3
  patch_size: int = 16
  frames_per_patch: int = 2
  merge_size: int = 2
  image_token: int = 151655
  video_token: int = 151656
  start_token: int = 151652
  end_token: int = 151653
  min_pixels: int = 65536
  max_pixels: int = 16777216
  mean: tuple[float, ...] = (0.5, 0.5, 0.5)
  std: tuple[float, ...] = (0.5, 0.5, 0.5)
  train: str = 'frozen'

  def __post_init__(self) -> None:
    if self.train not in TOWER_TRAINING:
      raise ValueError(
        f'vision={self.train!r} must be one of {", ".join(TOWER_TRAINING)}'
      )
    head_dim, rest = divmod(self.hidden_size, self.num_heads)
    if rest or head_dim % 4:
      raise ValueError(
        f'vision: hidden_size={self.hidden_size} must be num_heads={self.num_heads} '
        'times a multiple of 4, for rotary positions of rows and columns'
      )
    if round(self.num_positions**0.5) ** 2 != self.num_positions:
      raise ValueError(f'vision: num_positions={self.num_positions} must be a square')
    layers = set(range(self.num_layers))
    if list(self.deepstack_layers) != sorted(layers & set(self.deepstack_layers)):
      raise ValueError(
        f'vision: deepstack_layers={list(self.deepstack_layers)} must be numbers of '
        f'the {self.num_layers} layers, in ascending order'
      )

  @property
  def patch_shape(self) -> tuple[int, ...]:
    """Returns the axes of a patch: colours, frames, rows and columns."""
    return self.channels, self.frames_per_patch, self.patch_size, self.patch_size

  @property
  def merged(self) -> int:
    """Returns the patches that become one feature."""
    return self.merge_size**2


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Everything that fixes the parameters' shapes and the forward pass.

  Where layers differ, `layer_types` names the kind of each and `layer_kinds` the fields
  that a kind has of its own; `layer` gives the config as one layer sees it. Layers of
  one kind are compiled once where their order has a period.

  Attributes:
    vocab_size: Rows of the embedding table.
    hidden_size: Width D of the residual stream.
    num_layers: Layers.
    num_heads: Query heads.
    num_kv_heads: Key and value heads; they divide num_heads.
    head_dim: Width of a head, even.
    intermediate_size: Inner width of a dense MLP.
    family: The name of a model family, or the location of one's own `FamilySpec`; see
      `jaxrl.models.families`.
    rope_theta: The rotary base.
    rope_scaling: Sorted (name, value) pairs of the scaling's settings, `rope_type`
      among them, or None.
    rms_norm_eps: The norms' ε.
    max_position: The longest sequence.
    tie_embeddings: Whether tokens are scored by the table that embeds them.
    attention_bias: Whether query, key and value (and, if the family says so, the
      output) have biases.
    qk_norm: Whether query and key have an RMS norm over each head.
    value_head: Whether there is a linear value head beside the language model's.
    num_experts: Experts of every layer's feed-forward part, 0 for a dense one.
    num_experts_per_token: The experts that a token takes, those its router finds
      likeliest.
    moe_intermediate_size: Inner width of an expert.
    shared_expert_size: Inner width of the shared expert, which every token takes beside
      those that its router finds; 0 for none.
    norm_topk_prob: Whether the weights of a token's experts are made to sum to 1.
    router_groups: Groups of equally many experts; a token takes those of some only.
    router_top_groups: How many: those whose two best experts score highest together.
    routed_scaling: What the weights of a token's experts are multiplied by.
    window: How many keys a query sees at most, its own among them; 0 for all.
    use_rope: Whether queries and keys are rotated by their positions.
    rope_fraction: The part of a head, from its first element on, that is rotated.
    rope_dim: The width of the part that is rotated, in its place; 0 for the fraction.
    rope_interleaved: Whether neighbours are pairs of the rotation, not halves.
    query_growth: β: a query at position p is multiplied by 1 + β·log(1 + ⌊p / n⌋), n
      the scaling's original_max_position_embeddings; 0 leaves it.
    query_scale: The factor of the products of queries and keys; 0 is head_dim^−½.
    attention_softcap: A score s becomes c·tanh(s / c); 0 leaves it.
    logits_softcap: Likewise for a token's logit.
    keys_are_values: Whether values are the projected keys, before norm and rotation.
    kv_latent: The width of the latent that keys and values are computed from, in
      latent attention; 0 for none. A head of its queries and keys is not rotated but
      for its last `rope_dim` elements, which all heads of keys share.
    q_latent: Likewise for queries; 0 for none.
    value_dim: The width of a head of its values.
    kv_layer: The layer whose keys and values are read; −1 for own ones.
    kv_is_read: Whether other layers read those of this one.
    linear_attention: Whether a layer is a gated DeltaNet instead of attention: it keeps
      a state of fixed size instead of keys and values.
    linear_key_heads: Query and key heads of such a layer.
    linear_value_heads: Its value heads, a multiple of linear_key_heads.
    linear_key_dim: Width of its query and key heads.
    linear_value_dim: Width of its value heads.
    conv_width: Tokens that its convolutions see, the own among them.
    per_layer_width: The width of an input that each layer has of its own; 0 for none.
    layer_types: The kind of each layer; () where all are alike.
    layer_kinds: Pairs of a kind and of its own (field, value) pairs.
    lora: Adapters beside the linear layers, or None.
    rope_sections: For tokens with positions in time, row and column: how many
      frequencies each of the three turns, interleaved; () for one position.
    vision: The tower of a model that sees images, or None.
  """

  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  intermediate_size: int
  family: str = 'qwen3'
  rope_theta: float = 1e6
  rope_scaling: tuple[tuple[str, Any], ...] | None = None
  rms_norm_eps: float = 1e-6
  max_position: int = 32768
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = True
  value_head: bool = False
  num_experts: int = 0
  num_experts_per_token: int = 0
  moe_intermediate_size: int = 0
  shared_expert_size: int = 0
  norm_topk_prob: bool = True
  router_groups: int = 1
  router_top_groups: int = 1
  routed_scaling: float = 1.0
  window: int = 0
  use_rope: bool = True
  rope_fraction: float = 1.0
  rope_dim: int = 0
  rope_interleaved: bool = False
  query_growth: float = 0.0
  query_scale: float = 0.0
  attention_softcap: float = 0.0
  logits_softcap: float = 0.0
  keys_are_values: bool = False
  kv_latent: int = 0
  q_latent: int = 0
  value_dim: int = 0
  kv_layer: int = -1
  kv_is_read: bool = False
  linear_attention: bool = False
  linear_key_heads: int = 0
  linear_value_heads: int = 0
  linear_key_dim: int = 0
  linear_value_dim: int = 0
  conv_width: int = 0
  per_layer_width: int = 0
  layer_types: tuple[str, ...] = ()
  layer_kinds: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
  lora: Lora | None = None
  rope_sections: tuple[int, ...] = ()
  vision: VisionConfig | None = None

  def __post_init__(self) -> None:
    self._check_sizes()
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads={self.num_heads} must be a multiple of '
        f'num_kv_heads={self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim={self.head_dim} must be even for rotary positions')
    self._check_layers()
    if self.has_linear_attention:
      self._check_linear_attention()
    turned = self.rotated_dim // 2
    if self.rope_sections and (
      len(self.rope_sections) != 3 or sum(self.rope_sections) != turned
    ):
      raise ValueError(
        f'rope_sections={list(self.rope_sections)} must be three numbers that add up '
        f'to the {turned} frequencies of a head'
      )
    self._check_latents()
    self._check_router()
    self._check_family()
    targets = self.lora.targets if self.lora else ()
    if (unknown := set(targets) & set(LATENT_TARGETS)) and not self.kv_latent:
      raise ValueError(
        f'lora: targets={min(unknown)!r} needs a model with latent attention, and this '
        'one has none'
      )
    self._check_gated_targets(targets)
    if 'router' in targets and not self.num_experts:
      raise ValueError(
        "lora: targets='router' needs a model with experts, and this one has none"
      )
    if 'lm_head' in targets and self.tie_embeddings:
      raise ValueError(
        "lora: targets='lm_head' has no effect: this model ties its output "
        'layer to the embeddings (tie_embeddings)'
      )

  def _check_family(self) -> None:
    """Raises ValueError if the options are not those of the family."""
    family = self.spec
    if family.qk_norm is not None and self.qk_norm != family.qk_norm:
      raise ValueError(f'family {self.family!r} needs qk_norm={family.qk_norm}')
    bias = family.attention_bias
    if bias is not None and self.attention_bias != bias:
      raise ValueError(f'family {self.family!r} needs attention_bias={bias}')
    if bool(family.tower_tensors) != (self.vision is not None):
      has = 'needs a' if family.tower_tensors else 'has no'
      raise ValueError(f'family {self.family!r} {has} vision tower')
    sizes = {
      name: getattr(self, name)
      for name in ('num_experts', 'num_experts_per_token', 'moe_intermediate_size')
    }
    text = ', '.join(f'{name}={size}' for name, size in sizes.items())
    if family.has_experts is None and not any(sizes.values()):
      return
    if family.has_experts is False:
      if self.shared_expert_size:
        text = f'shared_expert_size={self.shared_expert_size}, {text}'
      if any(sizes.values()) or self.shared_expert_size:
        raise ValueError(f'{text}: family {self.family!r} has no experts')
    elif min(sizes.values()) < 1 or self.num_experts_per_token > self.num_experts:
      raise ValueError(
        f'{text}: family {self.family!r} needs all three, with '
        'num_experts_per_token at most num_experts'
      )

  def _check_gated_targets(self, targets: tuple[str, ...]) -> None:
    """Raises ValueError for adapters of gates that no layer has."""
    available = {'output_gate'} if self.spec.gates_attention else set()
    if self.has_linear_attention:
      available = {'output_gate', 'beta', 'decay'}
    if missing := ({'output_gate', 'beta', 'decay'} & set(targets)) - available:
      raise ValueError(
        f'lora: targets={min(missing)!r} needs layers with that gate, and family '
        f'{self.family!r} has none'
      )

  def _check_linear_attention(self) -> None:
    """Raises ValueError for sizes that make up no gated DeltaNet."""
    for name in LINEAR_SIZES:
      size = getattr(self, name)
      if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f'{name}={str(size)[:40]} must be a whole number from 1 on')
    if self.linear_value_heads % self.linear_key_heads:
      raise ValueError(
        f'linear_value_heads={self.linear_value_heads} must be a multiple of '
        f'linear_key_heads={self.linear_key_heads}'
      )

  def _check_layers(self) -> None:
    """Raises ValueError if the kinds of layers are not told in full."""
    kinds = dict(self.layer_kinds)
    if self.layer_types and len(self.layer_types) != self.num_layers:
      raise ValueError(
        f'layer_types names the kinds of {len(self.layer_types)} layers, but '
        f'num_layers={self.num_layers}'
      )
    if unknown := set(self.layer_types) ^ set(kinds):
      raise ValueError(
        f'layer_types and layer_kinds must name the same kinds; {min(unknown)!r} is in '
        'one of them only'
      )
    names = {field.name for field in dataclasses.fields(self)}
    for kind, kind_fields in kinds.items():
      for name, _ in kind_fields:
        if name not in names:
          raise ValueError(f'layer_kinds: {kind!r} sets {name!r}, which is not a field')

  def _check_latents(self) -> None:
    """Raises ValueError for sizes that make up no latent attention."""
    if not self.kv_latent:
      if self.q_latent or self.value_dim:
        raise ValueError('q_latent and value_dim are for models with kv_latent')
      return
    sizes = {name: getattr(self, name) for name in ('kv_latent', 'rope_dim')}
    sizes |= {'value_dim': self.value_dim, 'num_kv_heads': self.num_kv_heads}
    is_whole = min(sizes.values()) > 0 and self.rope_dim % 2 == 0
    narrow = max(self.rope_dim + 1, self.value_dim) <= self.head_dim
    if not (is_whole and narrow and self.num_kv_heads == self.num_heads):
      text = ', '.join(f'{name}={size}' for name, size in sizes.items())
      raise ValueError(
        f'{text}: latent attention needs all of them, with rope_dim even and below '
        f'head_dim={self.head_dim}, value_dim at most that, and '
        f'num_kv_heads=num_heads={self.num_heads}'
      )

  def _check_router(self) -> None:
    """Raises ValueError if experts cannot be chosen by groups."""
    groups, top = self.router_groups, self.router_top_groups
    if groups == 1 and top == 1:
      return
    size = self.num_experts // max(groups, 1)
    whole = groups > 0 and self.num_experts % groups == 0 and size >= 2
    if not (whole and 0 < top <= groups and size * top >= self.num_experts_per_token):
      raise ValueError(
        f'router_groups={groups}, router_top_groups={top}: {self.num_experts} experts '
        f'must be groups of two or more, of which {self.num_experts_per_token} experts '
        'of a token can be taken'
      )

  @property
  def spec(self) -> families.FamilySpec:
    """Returns the model's family."""
    return families.find_family(self.family)

  @property
  def layer_configs(self) -> tuple['ModelConfig', ...]:
    """Returns the config of each layer, of which those of a kind are one object."""
    types = self.layer_types or ('',) * self.num_layers
    return tuple(kind_config(self, kind) for kind in types)

  @property
  def has_linear_attention(self) -> bool:
    """Returns whether any layer is a gated DeltaNet."""
    return any(layer.linear_attention for layer in self.layer_configs)

  @property
  def rotated_dim(self) -> int:
    """Returns how many elements of a head are rotated."""
    return self.rope_dim or int(self.head_dim * self.rope_fraction)

  @property
  def cached_width(self) -> int:
    """Returns how many numbers a layer keeps of a token for attention."""
    if self.kv_layer >= 0 or self.linear_attention:
      return 0
    if self.kv_latent:
      return self.kv_latent + self.rope_dim
    return 2 * self.num_kv_heads * self.head_dim

  @property
  def span(self) -> int:
    """Returns how many keys a layer's query sees, 0 for all that there may be."""
    return self.window if self.window < self.max_position else 0

  def layer(self, index: int) -> 'ModelConfig':
    """Returns the config as one layer sees it, with the fields of its kind.

    Args:
      index: The layer's number.
    """
    return kind_config(self, self.layer_types[index]) if self.layer_types else self

  def _check_sizes(self) -> None:
    """Raises ValueError for sizes that make up no model, or one too large."""
    for name in SIZES:
      size = getattr(self, name)
      if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f'{name}={str(size)[:40]} must be a whole number from 1 on')
    for name in EXPERT_SIZES:
      if getattr(self, name) < 0:
        raise ValueError(f'{name}={getattr(self, name)} must not be negative')
    width, heads = self.hidden_size, self.num_heads + self.num_kv_heads
    wide = self.intermediate_size
    if self.num_experts:
      wide = self.num_experts * self.moe_intermediate_size + self.shared_expert_size
    layer = width * (2 * heads * self.head_dim + 3 * wide)
    count = self.num_layers * layer + self.vocab_size * width
    if count > MAX_PARAMETERS:
      raise ValueError(
        f'a model of these sizes has about {count:.2g} parameters, which need '
        f'{4 * count / 2**40:,.0f} TiB in float32; at most {MAX_PARAMETERS:.0g} are '
        'accepted: '
        + ', '.join(f'{name}={str(getattr(self, name))[:40]}' for name in SIZES)
      )

  @property
  def output_bias(self) -> bool:
    """Returns whether the attention's output projection has a bias."""
    return self.attention_bias and self.spec.output_bias

  def adapters(self, name: str) -> Lora | None:
    """Returns the adapters of a linear layer, or None.

    Args:
      name: One of LORA_TARGETS.
    """
    names = {name, *(LATENT_TARGETS.get(name, ()) if self.kv_latent else ())}
    return self.lora if self.lora and names & set(self.lora.targets) else None

  def replace(self, **changes: object) -> 'ModelConfig':
    """Returns the config with some fields replaced.

    Args:
      **changes: New values by field.
    """
    return dataclasses.replace(self, **changes)


@functools.lru_cache(maxsize=1024)
def kind_config(config: ModelConfig, kind: str) -> ModelConfig:
  """Returns a model's config with the fields that layers of a kind have of their own.

  Args:
    config: The model's config.
    kind: One of its `layer_types`; '' where it has none.
  """
  kind_fields = dict(config.layer_kinds).get(kind, ())
  layer_config = copy.copy(config)
  for name, value in (*kind_fields, ('layer_types', ()), ('layer_kinds', ())):
    # Past the checks: what holds for a model need not hold for a layer.
    object.__setattr__(layer_config, name, value)
  return layer_config
