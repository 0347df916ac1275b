"""Environments in which an agent works in a shell: SWE-bench and Terminal-Bench."""
