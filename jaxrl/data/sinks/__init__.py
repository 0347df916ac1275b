"""Where played trajectories are kept: files, object stores, tables."""
