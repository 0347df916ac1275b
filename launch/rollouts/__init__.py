"""What plays, stores and reads the groups that a run learns from."""
