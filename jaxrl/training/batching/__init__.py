"""Batching: from groups of trajectories to batches, minibatches and packed rows."""
