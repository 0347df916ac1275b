"""What of a device's memory is the learner's, as the run itself will share it out."""

import dataclasses

from jaxrl.config import Config
from jaxrl.signature import defaults
from launch import placement
from launch.targets import NODE, Target

PREALLOCATED = 0.75  # of a GPU's memory, what JAX takes unless it is told


@dataclasses.dataclass(frozen=True)
class Room:
  """limit: bytes of each device that the learner's process may take. engine: bytes that
  an engine in another process has of the same devices; 0 if it has its own, or lives in
  the learner's process. told: why, for people; '' where the learner has all there is.
  """

  limit: float
  engine: float = 0.0
  told: str = ''


def of(config: Config, target: Target) -> Room:
  """On a target whose devices are the learner's: where a run would split those that it
  finds, the engines have further ones. Raises ConfigError for a placement that cannot
  be there.
  """
  memory = target.chip.memory
  if target.chip.platform != 'cuda':
    return Room(memory)
  name, options = placement.parse(config)
  if not config.cluster.ray:
    share = options['memory'] if name == 'colocated' else PREALLOCATED
    told = "JAX's own share, unless --config.cluster.placement='colocated(memory=.9)'"
    return Room(memory * share, 0.0, '' if name == 'colocated' else told)
  if name == 'split' or (name == 'auto' and target.size > 1):
    share = options.get('memory', defaults(placement.split)['memory'])
    return Room(memory * share, 0.0, 'engines have devices of their own')
  count = min(target.size, NODE)
  found = placement.plan(config, [placement.Node(count)] * (target.size // count))
  learner, engine = found.learners[0].memory, found.engines[0].memory
  return Room(memory * learner, memory * engine, found.told)
