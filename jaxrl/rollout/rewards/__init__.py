"""Rewards are added to an episode at its end: graders, judges and reward models."""
