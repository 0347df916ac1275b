"""Environments: text games, math, code, shells, tools, sandboxes and graders."""
