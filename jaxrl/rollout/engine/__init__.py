"""Rollout engines: the JAX engine, its scheduler, and a router to several engines."""
