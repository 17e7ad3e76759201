"""A matrix product for Triton's interpreter whose rows do not depend on their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ascending_dot() -> Iterator[None]:
    """Within the context `tl.dot` under the interpreter adds k ascending, one product at a time, in the result's type.

    The interpreter's own product is BLAS, where a row's bits depend on its place in the matrix; equal bits of one row
    in two tiles would then say nothing about the kernel. fp8 operands are not supported.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(_self: Any, a: Any, b: Any, d: Any, _precision: Any, _max_imprecise: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., None, k, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    original = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = original
