"""Graders: what a reply is worth, by rules; see `combine.make_grader`."""
