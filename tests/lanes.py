"""Where the tests run, and memory as they want it: for conftest.py, which sets the interpreter's variable first, and for the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@contextmanager
def dirty_memory() -> Iterator[None]:
    """Memory that torch leaves uninitialised holds NaN, or the largest integer of its type."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill
