"""What a process of the learner is made of: its factory, and its teachers."""
