"""Adapters that play the environments of other packages as text environments."""
