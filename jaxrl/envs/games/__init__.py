"""Text games that are drawn from a seed and need no other package."""
