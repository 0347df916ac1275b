"""Mixers take the place of plain attention in the layers of some families."""
