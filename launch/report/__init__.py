"""report.html: a run's curves, evaluations and sample trajectories, in one file."""
