"""Parallelism: the mesh, sharding, and programs that span devices and processes."""
