"""Runs the parts of a run in one process, or as Ray actors.

`runtime_interface.Runtime` is what the assembly is written against. `local_runtime`
implements it with plain objects in one process, `ray_runtime` with Ray actors. Ray is
imported in this package only.
"""
