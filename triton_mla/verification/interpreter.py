"""Triton's interpreter with a matrix product that adds as a tensor core does, and without its repeated work."""

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


@contextmanager
def patched_once() -> Iterator[None]:
    """Within the context the interpreter puts its own functions into triton.language once for a module and launch.

    It does so at every call of a function by a kernel, which takes half of its time (all rows of `verify` on two cores: 62 s
    -> 31 s). Of a launch the kernel comes first and restores last.
    """
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    modules: set[int] = set()

    def patch(fn: Any) -> Any:
        if id(fn.__globals__) in modules:
            return interpreter._LangPatchScope()
        scope = patch_lang(fn)
        if not modules:
            restore = scope.restore

            def finish() -> None:
                modules.clear()
                restore()

            scope.restore = finish
        modules.add(id(fn.__globals__))
        return scope

    interpreter._patch_lang = patch
    try:
        yield
    finally:
        interpreter._patch_lang = patch_lang
