"""Agentic reinforcement learning for language models, on JAX."""
