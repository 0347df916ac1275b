"""What is added to an episode's reward at its end: graders, judges, reward models."""
