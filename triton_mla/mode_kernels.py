"""What `batch_invariant_mode` puts in the place of torch's kernels.

Each has the arguments of the op that it stands for. It raises `Missing` where there is nothing batch-invariant, and returns NotImplemented where
torch's own kernel has an error for this, or asks ops that are covered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import checks
from .companion import products, rows
from .plan import DTYPES
from .uncovered import UNCOVERED

Number = int | float
Kernel = Callable[..., Any]


class Missing(Exception):
    """There is no batch-invariant kernel for this."""


def nothing(*args: Any, **kwargs: Any) -> Any:
    said = [f"{a.dtype}" if a.layout == torch.strided else f"{a.layout} {a.dtype}" for a in args if isinstance(a, Tensor)]
    raise Missing(", ".join(dict.fromkeys([*said, *[f"dtype={a}" for a in args if isinstance(a, torch.dtype)]])))


def _floats(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise Missing(str(dtype))


def _multiply(a: Tensor, b: Tensor, *, dims: tuple[int, int], bias: Tensor | None = None) -> Any:
    if (a.dim(), b.dim()) != dims or a.shape[-1] != b.shape[-min(2, b.dim())] or a.shape[:-2] != b.shape[:-2] or (a.dtype, a.device) != (b.dtype, b.device):
        return NotImplemented
    _floats(a.dtype)
    return products.matmul(a, b) if bias is None else products.linear(a, b.t(), bias)


def _add(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1, dims: tuple[int, int]) -> Any:
    """``beta * c + alpha * (a @ b)``, where c is not read if beta is 0."""
    if (c.dtype, c.device) != (a.dtype, a.device) or isinstance(alpha, complex) or isinstance(beta, complex):
        return NotImplemented
    if dims == (2, 2) and c.dim() == 1 and c.shape == b.shape[1:] and beta == alpha == 1:
        return _multiply(a, b, dims=dims, bias=c)
    product = _multiply(a, b, dims=dims)
    if product is NotImplemented or c.dim() > product.dim() or any(n not in (1, m) for n, m in zip(c.shape[::-1], product.shape[::-1], strict=False)):
        return NotImplemented
    total = product.float() if alpha == 1 else product.float() * alpha
    if beta != 0:
        total = total + (c.float() if beta == 1 else c.float() * beta)
    return total.to(product.dtype)


def _multi_dot(matrices: Sequence[Tensor], *, dims: tuple[int, ...] = (1, 2)) -> Any:
    """From the left, whatever the sizes. ``dims``: which the first and the last may have."""
    if any(t.dim() not in (dims if i in (0, len(matrices) - 1) else (2,)) for i, t in enumerate(matrices)):
        return NotImplemented
    fits = all(a.shape[-1] == b.shape[0] and (a.dtype, a.device) == (b.dtype, b.device) for a, b in pairwise(matrices))
    return reduce(torch.matmul, matrices) if len(matrices) > 1 and fits else NotImplemented


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """In one form for all shapes and strides: a product of matrices."""
    plain = all(t is None or t.layout == torch.strided for t in (x, weight, bias))
    if not plain or x.dim() == 0 or weight.dim() != 2 or (bias is not None and bias.dim() != 1) or x.shape[-1] != weight.shape[1]:
        return NotImplemented
    lines = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    out = torch.mm(lines, weight.t()) if bias is None else torch.addmm(bias, lines, weight.t())
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], weight.shape[0]])  # no view, as torch's is none


def _matmul(a: Tensor, b: Tensor) -> Any:
    """A matrix by a batch, where torch multiplies the transposed ones if the matrix requires grad: its rows would be columns."""
    if a.dim() != 2 or b.dim() < 3 or a.shape[1] != b.shape[-2] or not a.layout == b.layout == torch.strided:
        return NotImplemented
    *batch, K, N = b.shape
    out = torch.bmm(a.expand(prod(batch), *a.shape), b.reshape(prod(batch), K, N))
    return torch.ops.aten._unsafe_view(out, [*batch, len(a), N])


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Any:
    if bias is not None or x.dtype != weight.dtype:
        return NotImplemented
    _floats(x.dtype)
    if out_dtype not in (None, x.dtype):
        raise Missing(f"{x.dtype} with out_dtype={out_dtype}")
    if offs is None:
        return _multiply(x, weight, dims=(3, 3))
    if (x.dim(), weight.dim()) != (2, 3):
        raise Missing(f"groups of {x.dim()}-dimensional by {weight.dim()}-dimensional operands")
    if x.shape[1] != weight.shape[1] or offs.shape != weight.shape[:1] or offs.dtype != torch.int32:
        return NotImplemented
    return products.grouped_linear(x.contiguous(), weight.transpose(1, 2), torch.nn.functional.pad(offs, (1, 0)))


def _softmax(x: Tensor, dim: int, half_to_float: bool, *, log: bool = False) -> Any:
    if not checks.are_dims(x, (dim,)):
        return NotImplemented
    _floats(x.dtype)
    return (rows.log_softmax if log else rows.softmax)(x if x.dim() else x.unsqueeze(0), dim, dtype=torch.float32 if half_to_float else None).view(x.shape)


def _mean(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Any:
    if not checks.are_dims(x, dim or ()) or (dtype is None and out is None and not x.is_floating_point() and not x.is_complex()):
        return NotImplemented
    dtype = dtype or (x if out is None else out).dtype
    _floats(dtype)
    result = rows.mean(x.to(dtype), dim, keepdim)
    return result if out is None else _into(out, result)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    """The norm and, where a gradient may be wanted, 1 / root; else the second result has no elements."""
    lead = x.shape[: x.dim() - len(shape)]
    if tuple(x.shape) != (*lead, *shape) or (weight is not None and tuple(weight.shape) != tuple(shape)):
        return NotImplemented
    for operand in (x,) if weight is None else (x, weight):
        _floats(operand.dtype)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    lines = x.reshape(*lead, prod(shape))
    out: Any = rows.rms_norm(lines, None if weight is None else weight.reshape(-1), eps)
    if not torch.is_grad_enabled():
        return out.view(x.shape), x.new_empty(0, dtype=torch.float32)
    inverse = torch.rsqrt(rows.mean(lines.float().square(), -1) + eps)
    return out.view(x.shape), inverse.view(*lead, *[1] * len(shape))


def _into(out: Tensor, result: Any, resize: bool = True) -> Any:
    """What ``out=`` and, without ``resize``, an op in place do with a result."""
    if result is NotImplemented or (out.dtype, out.device) != (result.dtype, result.device) or not (resize or out.shape == result.shape):
        return NotImplemented
    return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)


def _with_out(kernel: Kernel) -> Kernel:
    return lambda *args, out, **kwargs: _into(out, kernel(*args, **kwargs))


def _chain_with_out(kernel: Kernel) -> Kernel:
    def run(matrices: Sequence[Tensor], *, out: Tensor) -> Any:
        lost = torch.is_grad_enabled() and any(t.requires_grad for t in (*matrices, out))  # torch's own refuses it
        return NotImplemented if lost else _into(out, kernel(matrices))

    return run


def _in_place(kernel: Kernel) -> Kernel:
    return lambda c, *args, **kwargs: _into(c, kernel(c, *args, **kwargs), resize=False)


_RESULTS: dict[str, Kernel] = {
    "mm": partial(_multiply, dims=(2, 2)), "bmm": partial(_multiply, dims=(3, 3)), "_softmax": _softmax, "_log_softmax": partial(_softmax, log=True)
}
_SUMS: dict[str, Kernel] = {"addmm": partial(_add, dims=(2, 2)), "baddbmm": partial(_add, dims=(3, 3)), "addmv": partial(_add, dims=(2, 1))}
_CHAINS: dict[str, Kernel] = {"linalg_multi_dot": _multi_dot, "chain_matmul": partial(_multi_dot, dims=(2,))}
# Ops that torch composes of others, here of other ones: in its `linear` operands with strides of their own are rounded before the bias, and the
# order of its chains follows the sizes, the number of rows included.
COMPOSED: dict[str, Kernel] = {"linear": _linear, "matmul": _matmul, **_CHAINS, **{f"{name}.out": _chain_with_out(k) for name, k in _CHAINS.items()}}
KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(("dot", "vdot"), partial(_multiply, dims=(1, 1))), **dict.fromkeys(("mean.dim", "mean.out"), _mean),
    "_fused_rms_norm": _rms_norm, "_grouped_mm": _grouped_mm, "_foreach_mm": lambda a, b: [torch.mm(*pair) for pair in zip(a, b, strict=True)],
    **_RESULTS, **_SUMS, **{f"{name}.out": _with_out(kernel) for name, kernel in {**_RESULTS, **_SUMS}.items()},
    **{f"{name}_": _in_place(kernel) for name, kernel in _SUMS.items()},
    **dict.fromkeys(UNCOVERED, nothing),
}
