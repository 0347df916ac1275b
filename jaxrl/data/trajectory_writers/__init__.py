"""Trajectory writers store played trajectories in files, object stores or tables."""
