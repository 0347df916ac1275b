"""Native kernels are C functions that XLA calls on a CPU."""
