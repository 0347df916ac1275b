"""Runs the parts of a run in one process, or as Ray actors.

The assembly is written against `runtime_base.Runtime`, which makes plain objects in one
process; `ray_runtime` makes Ray actors. Ray is imported in this package only.
"""
