"""Graders score replies by rules; see `composite.make_grader`."""
