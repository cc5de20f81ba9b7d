"""Triton's kernels alone, without checks; `ftw.kernels` launches them."""
