"""The rollout side plays episodes with an engine and queues them for training."""
