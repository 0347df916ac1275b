"""Algorithms: one file each, a maker function of the same name composing parts."""
