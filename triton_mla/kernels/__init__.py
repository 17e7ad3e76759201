"""Triton kernels, one family a file. They see tensors and integers only: no environment, no device query, no allocation."""
