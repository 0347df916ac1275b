"""Algorithms compose functional components; the registry builds them by name."""
