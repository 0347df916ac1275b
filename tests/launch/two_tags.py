"""The varied config with a second tag, whose tasks are those of the first."""

from tests.launch import varied


def get_config(algorithm='grpo'):
  config = varied.get_config(algorithm)
  config.env.more = config.env.arithmetic.copy_and_resolve_references()
  config.batch.num_groups = 4
  return config
