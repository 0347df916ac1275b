"""Native code is C: kernels that XLA calls on a CPU, and a malloc that keeps blocks."""
