"""A matrix product for Triton's interpreter that adds as a tensor core does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GROUP = 16
"""Products that one step of a 16-bit tensor-core chain adds."""


@contextmanager
def tensor_core_dot() -> Iterator[None]:
    """Within the context `tl.dot` under the interpreter is one chain from the accumulator, k ascending in groups of 16.

    So a row's bits do not depend on its place, as they do with the interpreter's own product, which is BLAS; and a cut
    between two splits, or a token at another column of its tile, leaves a trace. fp8 operands are not supported.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(_self: Any, a: Any, b: Any, d: Any, _precision: Any, _max_imprecise: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = d.data.copy()
        for start in range(0, left.shape[-1], GROUP):
            group = np.zeros_like(total)
            for k in range(start, min(start + GROUP, left.shape[-1])):
                with np.errstate(invalid="ignore"):  # infinity times zero is NaN, as on a GPU
                    group += left[..., :, k, None] * right[..., None, k, :]
            total += group
        return interpreter.TensorHandle(total, d.dtype.scalar)

    original = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = original
