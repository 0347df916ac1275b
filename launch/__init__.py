"""Contains the commands and their settings, runtime, logging and planning."""
