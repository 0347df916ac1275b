"""Samplers decide which groups a training step learns from.

A sampler is chosen by a call string, `--config.algorithm.sampler='replay(decay=1)'`. A
user's own sampler is a subclass of `Sampler`, given by dotted path:
`my_lab.pick:Newest`.
"""

from typing import Any

from jaxrl import call_strings
from jaxrl.data.samplers.sampler import GroupSource, Sampler

__all__ = ['SAMPLERS', 'GroupSource', 'Sampler', 'find_sampler', 'make_sampler']

# Dotted paths, so that only the sampler that a run names is imported.
SAMPLERS = {
  'fifo': 'jaxrl.data.samplers.queue_samplers:FifoSampler',
  'mixed': 'jaxrl.data.samplers.expert_samplers:MixedSampler',
  'replay': 'jaxrl.data.samplers.replay_sampler:ReplaySampler',
  'staleness': 'jaxrl.data.samplers.queue_samplers:StalenessSampler',
  'warmup': 'jaxrl.data.samplers.expert_samplers:WarmupSampler',
}


def find_sampler(text: str) -> tuple[type[Sampler], dict[str, Any]]:
  """Returns the class that a call string names and its options, both checked.

  Args:
    text: The call string.

  Returns:
    A tuple of the sampler class and its options.

  Raises:
    ConfigError: If the sampler or an option is unknown, or if a user's own class lacks
      methods.
  """
  where = f'--config.algorithm.sampler={text}'
  name, options = call_strings.parse_call(text)
  if ':' in name:
    sampler_class = call_strings.resolve(name)
    required = [key for key in vars(Sampler) if not key.startswith('_')]
    missing = [key for key in required if not hasattr(sampler_class, key)]
    if missing:
      raise call_strings.ConfigError(
        f'{where}: {name} has no {", ".join(missing)}; derive it from '
        'jaxrl.data.samplers.Sampler'
      )
  elif name in SAMPLERS:
    sampler_class = call_strings.resolve(SAMPLERS[name])
  else:
    raise call_strings.unknown_name_error(name, SAMPLERS, 'sampler', where)
  call_strings.check_options(sampler_class, options, where)
  return sampler_class, options


def make_sampler(text: str, source: GroupSource) -> Sampler:
  """Builds the sampler that a call string describes.

  Args:
    text: The call string.
    source: What the sampler draws from.

  Returns:
    The sampler.

  Raises:
    ConfigError: If the call string or an option is wrong.
  """
  sampler_class, options = find_sampler(text)
  try:
    return sampler_class(source, **options)
  except call_strings.ConfigError as error:
    where = f'--config.algorithm.sampler={text}'
    raise call_strings.ConfigError(f'{where}: {error}') from error
