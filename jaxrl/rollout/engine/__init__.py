"""Rollout engines: the JAX engine, its scheduler, and a router to several engines."""

from jaxrl.component_table import ComponentTable

# Where each engine's class is, so that only the one that a run names is imported.
ENGINES = ComponentTable(
  'engine',
  'rollout.engine',
  {
    'jax': 'jaxrl.rollout.engine.jax_engine:JaxEngine',
    'vllm': 'jaxrl.rollout.vllm.vllm_engine:VllmEngine',
  },
  base='jaxrl.rollout.engine.engine_base:EngineBase',
)
