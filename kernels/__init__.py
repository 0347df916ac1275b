"""Kernels: pure array functions, each with a plain jnp reference."""
