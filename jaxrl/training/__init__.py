"""Training: the learner, its pure steps, batching, optimizers and parallelism."""
