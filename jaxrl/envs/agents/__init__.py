"""The agent environment: a user's own agent plays through an OpenAI-style endpoint."""
