"""Kernels are pure functions of arrays, each with a plain jnp reference."""
