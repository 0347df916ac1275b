"""Objectives are pure functions of arrays, for use from any JAX program.

>>> from jaxrl.functional import losses, advantages, kl, aggregation
"""
