"""Sandboxes: a place apart where a model's code or shell commands run."""
