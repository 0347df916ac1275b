"""Writes report.html: a run's curves, evaluations and samples in one file."""
