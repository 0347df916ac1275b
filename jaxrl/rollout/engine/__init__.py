"""Rollout engines: the JAX engine, its scheduler, and a router to several engines."""

# Where each engine's class is, so that only the one that a run names is imported.
ENGINES = {
  'jax': 'jaxrl.rollout.engine.jax_engine:JaxEngine',
  'vllm': 'jaxrl.rollout.vllm.vllm_engine:VllmEngine',
}
