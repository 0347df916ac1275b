"""Samplers: where a step's groups come from.

A sampler is chosen by a call string, `--config.algorithm.sampler='replay(decay=1)'`;
one's own is a class of the form of `Sampler`, by dotted path: `my_lab.pick:Newest`.
"""

from typing import Any

from jaxrl import signature
from jaxrl.data.samplers.base import Sampler, Source
from jaxrl.data.samplers.expert import Mixed, Warmup
from jaxrl.data.samplers.played import Fifo, Staleness
from jaxrl.data.samplers.replay import Replay

__all__ = [
  'Fifo',
  'Mixed',
  'Replay',
  'Sampler',
  'Source',
  'Staleness',
  'Warmup',
  'find',
  'make',
]

SAMPLERS: dict[str, type[Sampler]] = {
  'fifo': Fifo,
  'mixed': Mixed,
  'replay': Replay,
  'staleness': Staleness,
  'warmup': Warmup,
}


def find(text: str) -> tuple[type[Sampler], dict[str, Any]]:
  """The class that a call string names, and its options, both checked.

  Raises ConfigError naming the samplers there are, the options the class has, or the
  methods that one's own class lacks.
  """
  where = f'--config.algorithm.sampler={text}'
  name, options = signature.parse_call(text)
  if ':' in name:
    made = signature.resolve(name)
    wanted = [key for key in vars(Sampler) if not key.startswith('_')]
    lacking = [key for key in wanted if not hasattr(made, key)]
    if lacking:
      raise signature.ConfigError(
        f'{where}: {name} has no {", ".join(lacking)}; derive it from '
        'jaxrl.data.samplers.Sampler'
      )
  elif name in SAMPLERS:
    made = SAMPLERS[name]
  else:
    raise signature.unknown(name, SAMPLERS, 'sampler', where)
  signature.check_options(made, options, where)
  return made, options


def make(text: str, source: Source) -> Sampler:
  """The sampler that a call string describes, over `source`. Raises ConfigError."""
  made, options = find(text)
  try:
    return made(source, **options)
  except signature.ConfigError as error:
    where = f'--config.algorithm.sampler={text}'
    raise signature.ConfigError(f'{where}: {error}') from error
