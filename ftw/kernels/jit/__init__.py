"""Triton's kernels and what they share, without checks. Nothing is offered but to `ftw.kernels`."""
