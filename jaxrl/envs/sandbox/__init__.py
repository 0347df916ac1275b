"""Sandboxes isolate the code and shell commands that a model writes."""
