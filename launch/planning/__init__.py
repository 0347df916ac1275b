"""Predicts what a run needs and costs on machines that are not here."""
