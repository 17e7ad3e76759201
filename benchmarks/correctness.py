"""Every implementation must agree with float64 before it is timed."""

from __future__ import annotations

import torch

TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
"""Largest relative error (Frobenius norm over the checked rows)."""


def relative_error(out: torch.Tensor, rows: list[int], want: torch.Tensor) -> float:
    """||out - want|| / ||want|| over the checked rows; NaN where any element of the whole output is not finite."""
    if not torch.isfinite(out).all():
        return float("nan")
    got = out[rows].double()
    return float((got - want).norm() / want.norm())
