"""Presets are the built-in algorithms, one file and one builder function each."""
