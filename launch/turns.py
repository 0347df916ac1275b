"""Processes that have the memory of their devices in turns: what they need for it."""

from jaxrl.config import Config
from jaxrl.rollout import sync
from jaxrl.signature import ConfigError, parse_call

# For a learner that takes memory as it needs it, and gives back what it frees.
GIVES_BACK = {
  'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform',
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
}


def check(where: str, config: Config, kind: str) -> None:
  """Raises ConfigError for a run that cannot do so. kind: of its devices."""
  engine, _ = parse_call(config.rollout.engine)
  if engine != 'vllm':
    raise ConfigError(
      f'{where}: in processes of their own (cluster.ray=true) vLLM alone gives its '
      f'memory back, engine {engine} does not. Set --config.rollout.engine=vllm, or '
      '--config.cluster.ray=false'
    )
  if kind != 'GPU':
    raise ConfigError(
      f'{where}: what sleeps gives up the memory of a GPU, and there is none ({kind})'
    )
  if sync.parse(config.rollout.sync).waits != 'now':
    raise ConfigError(
      f'{where}: rollout.sync={config.rollout.sync} sends weights while the learner '
      'learns, when the engine has no memory. Take fixed or explorer'
    )
