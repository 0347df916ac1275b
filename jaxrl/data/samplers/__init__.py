"""Samplers decide which groups a training step learns from.

A config chooses a sampler by `algorithm.sampler='replay(decay=1)'`, an
algorithm by `sampler=ComponentCall('replay', {'decay': 1})`. A user's own sampler is a
subclass of `Sampler`, given as it is or by dotted path: `my_lab.pick:Newest`.
"""

import re
from typing import cast

from jaxrl.component_table import Component, ComponentTable, component_name
from jaxrl.data.samplers.sampler import Sampler, SamplerSource
from jaxrl.options import OptionValues

__all__ = ['SAMPLERS', 'SamplerSource', 'Sampler', 'find_sampler', 'make_sampler']

_NAMES_OPTION = re.compile(r'\S+\.\w+=')  # of a section, where an error begins
# Dotted paths, so that only the sampler that a run names is imported.
SAMPLERS = ComponentTable(
  'sampler',
  'algorithm.sampler',
  {
    'fifo': 'jaxrl.data.samplers.queue_samplers:FifoSampler',
    'mixed': 'jaxrl.data.samplers.expert_samplers:MixedSampler',
    'replay': 'jaxrl.data.samplers.replay_sampler:ReplaySampler',
    'staleness': 'jaxrl.data.samplers.queue_samplers:StalenessSampler',
    'warmup': 'jaxrl.data.samplers.expert_samplers:WarmupSampler',
  },
  base=Sampler,
)


def find_sampler(sampler: Component) -> tuple[type[Sampler], OptionValues]:
  """Returns the class of a sampler and its options, both checked.

  Args:
    sampler: A call, a name, or the class itself.

  Returns:
    A tuple of the sampler class and its options.

  Raises:
    ValueError: If the sampler or an option is unknown, or if a user's own class lacks
      methods.
  """
  where = f'algorithm.sampler={component_name(sampler, whole=True)}'
  _, sampler_class, options = SAMPLERS.find(sampler, where)
  if not isinstance(sampler_class, type):
    raise ValueError(
      f'{where}: it is a function; a sampler is a class derived from '
      'jaxrl.data.samplers.Sampler'
    )
  return cast(type[Sampler], sampler_class), options


def make_sampler(sampler: Component, source: SamplerSource) -> Sampler:
  """Builds a sampler.

  Args:
    sampler: A call, a name, or the class itself.
    source: What the sampler draws from.

  Returns:
    The sampler.

  Raises:
    ValueError: If the name or an option is wrong.
  """
  sampler_class, options = find_sampler(sampler)
  try:
    return sampler_class(source, **options)
  except ValueError as error:
    if _NAMES_OPTION.match(str(error)):  # of the source's rows
      raise
    where = f'algorithm.sampler={component_name(sampler, whole=True)}'
    raise ValueError(f'{where}: {error}') from error
