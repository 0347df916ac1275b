"""Decoding runs a model for one token of every slot, over caches laid out for it."""
