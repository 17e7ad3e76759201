"""Kernels of the operations around attention."""
