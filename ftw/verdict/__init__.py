"""May a lookup table leave the GPU, why, and what that gains."""
