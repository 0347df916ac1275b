"""Cache uses are options of an engine that need more of its cache than decoding does.

Both take rows of a decode step for tokens that no request has drawn yet, on one CPU
device, and need a cache that keeps what was written into it.
"""

import dataclasses
from typing import Any

from jaxrl.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class CacheUse:
  """Says which engines and models an option is not for, and why.

  Attributes:
    option: The option's name; 0 turns it off.
    work: What the engine does with it, as a sentence begins.
    images: Why it is not for models that see images.
    linear_attention: Why it is not for models with gated DeltaNet layers.
    windows: Why it is not for models with windows shorter than the context.
  """

  option: str
  work: str
  images: str
  linear_attention: str
  windows: str

  def obstacle(
    self, config: ModelConfig, *, platform: str, devices: int, keeps_prompts: bool
  ) -> str:
    """Returns why an engine cannot do it; '' if it can.

    Args:
      config: The model's shape.
      platform: JAX's name of the devices' platform.
      devices: Number of devices of the engine.
      keeps_prompts: What `kv_cache.keeps_prompts` says of its cache.
    """
    if platform != 'cpu' or devices > 1:
      kind = f'{devices} devices' if devices > 1 else f'a {platform.upper()}'
      return f'{self.work} on one CPU device, and this engine has {kind}'
    if config.has_linear_attention:
      return f'the model has gated DeltaNet layers, {self.linear_attention}'
    if config.vision is not None:
      return f'the model sees images, {self.images}'
    if not keeps_prompts:
      return f'the model has windows shorter than max_length, {self.windows}'
    return ''

  def check(self, value: int, config: ModelConfig, **engine: Any) -> None:
    """Checks that an engine can do it.

    Args:
      value: What the option is set to.
      config: The model's shape.
      **engine: As in `obstacle`.

    Raises:
      ValueError: If it cannot.
    """
    if problem := self.obstacle(config, **engine):
      raise ValueError(f'{self.option}={value}: {problem}; leave {self.option} at 0')


DRAFTS = CacheUse(
  option='draft_tokens',
  work='drafts are checked',
  images='whose positions are not those of its tokens',
  linear_attention='whose state cannot drop a rejected draft',
  windows='in whose cache a rejected draft overwrites older tokens',
)
PROMPT_BLOCKS = CacheUse(
  option='prompt_block',
  work='blocks are computed',
  images='whose prompts are computed whole',
  linear_attention='whose cache does not keep prompts',
  windows='whose cache does not keep prompts',
)
CACHE_USES = {use.option: use for use in (DRAFTS, PROMPT_BLOCKS)}
