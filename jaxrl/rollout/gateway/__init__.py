"""The gateway serves OpenAI's API in front of a rollout engine, for agents."""
