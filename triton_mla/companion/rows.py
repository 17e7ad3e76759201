"""Operations along rows whose bits depend on that row alone: norms, softmax, means, and a gated activation.

The order of additions is `row_order(N)`, a function of the row's length alone.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import triton

from .. import checks
from ..calls import on_device
from ..kernels.companion.rows import (
    mean_kernel,
    rms_norm_kernel,
    silu_and_mul_kernel,
    softmax_kernel,
    softmax_results_kernel,
    softmax_states_kernel,
)
from ..launch import INTERPRETED, launch
from ..plan import DTYPES

STEP = 1024  # columns of a part that are added between two loads: four chunks of 256
MAX_PARTS = 16
FEW_ROWS = 64  # below it whole rows do not fill a GPU


@dataclass(frozen=True)
class RowOrder:
    """How the N terms of a row are added.

    The row is cut into ``parts`` of ``length`` columns; of columns past its end there is nothing to add. A part is walked in chunks of ``width``
    columns, ascending, each added to ``width`` fp32 accumulators element by element. Then a tree adds neighbours until one value is
    left: of the accumulators of a part, then of the parts. ``chunks``: those of one step, for which a softmax takes one maximum.
    """

    width: int
    chunks: int
    parts: int
    length: int

    @property
    def single(self) -> bool:
        """Whether a part is one step."""
        return self.length == self.width * self.chunks


@lru_cache(maxsize=4096)
def row_order(N: int) -> RowOrder:
    """The order for rows of N columns: parts of 1024, and past 16384 columns 16 parts of the least multiple of 1024 that suffices."""
    width = min(STEP // 4, triton.next_power_of_2(max(N, 16)))
    parts = min(MAX_PARTS, triton.next_power_of_2(max(1, triton.cdiv(N, STEP))))
    if N <= STEP:
        chunks = max(1, triton.cdiv(N, width))
        return RowOrder(width, chunks, 1, width * chunks)
    return RowOrder(width, STEP // width, parts, triton.cdiv(N, parts * STEP) * STEP)


@dataclass(frozen=True)
class RowTile:
    """How rows are spread over the machine. No field can change a bit.

    Attributes:
        rows: whole rows of a program, a power of two.
        num_warps: of a program.
        split: a program for each part of a row instead, for a softmax of few long rows.
    """

    rows: int
    num_warps: int
    split: bool = False


def tile_for(num_rows: int, order: RowOrder) -> RowTile:
    """1024 accumulators or those of one row, 8 a thread: one load of 16 bytes for 16-bit types. The interpreter takes all rows at once."""
    if INTERPRETED:
        return RowTile(min(triton.next_power_of_2(max(1, num_rows)), max(1, 2**17 // (order.parts * order.width))), 1)
    rows = max(1, STEP // (order.parts * order.width))
    return RowTile(rows, max(1, rows * order.parts * order.width // 256))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, *, residual: torch.Tensor | None = None, tile: RowTile | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, computed in fp32 and rounded once.

    The squares are added as `RowOrder` tells, each by a fused multiply-add; division and root are correctly rounded.

    Args:
        x: [..., N], fp16, bf16 or fp32.
        weight: [N], fp16, bf16 or fp32; None is a weight of ones.
        eps: added to the mean, 0 or more, finite in fp32.
        residual: like x. Then x + residual, rounded to the dtype, takes the place of x.
        tile: overrides the choice by the number of rows; it cannot change a bit.

    Returns:
        [..., N] contiguous in the dtype of x; with ``residual`` a pair of it and the rounded sum.

    Raises:
        ValueError: an argument is wrong; nothing has been launched.
    """
    x = floats("x", x)
    shape = x.shape
    if weight is not None:
        floats("weight", weight, device=x.device)
        checks.shape("weight", weight, (shape[-1],), "one factor for each column of x")
        weight = weight.contiguous()
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= torch.finfo(torch.float32).max:
        raise ValueError(f"eps={reprlib.repr(eps)} must be a finite number of fp32 of at least 0")
    if residual is not None:
        floats("residual", residual, device=x.device, dtypes=(x.dtype,))
        checks.shape("residual", residual, tuple(shape), "one value for each of x")
    if torch.compiler.is_compiling():
        out, total = torch.ops.triton_mla.rms_norm(x, weight, float(eps), residual)
        return out if residual is None else (out, total)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    rows = as_rows(x)
    other = rows if residual is None else as_rows(residual)
    order = row_order(shape[-1])
    _launch_rows(rms_norm_kernel, order, tile, (rows, other, rows if weight is None else weight, out, total), (rows.stride(0), other.stride(0)),
                 rows.shape, {"WITH_RESIDUAL": residual is not None, "WITH_WEIGHT": weight is not None}, (float(eps),))
    return out if residual is None else (out, total)


def softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, tile: RowTile | None = None) -> torch.Tensor:
    """``exp(x - max) / sum(exp(x - max))`` along a dimension, computed in fp32 and rounded once.

    Each accumulator of `RowOrder` keeps a maximum of its own, which moves once a step, and the sum of exponentials against it. Sums are taken
    to the maximum of their part before its tree, and to that of the row before the tree of the parts. A row that holds NaN or +inf, or
    nothing but -inf, is NaN.

    Args:
        x: any shape with at least one dimension, fp16, bf16 or fp32. Rows that are not contiguous along ``dim`` are copied first.
        dim: the dimension whose sums are 1.
        dtype: of the result: that of x (the default) or torch.float32.
        tile: overrides the choice by the number of rows; it cannot change a bit.

    Returns:
        Contiguous, in the shape of x.

    Raises:
        ValueError: an argument is wrong; nothing has been launched.
    """
    return _softmax(x, dim, dtype, tile, log=False)


def log_softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, tile: RowTile | None = None) -> torch.Tensor:
    """``(x - max) - log(sum(exp(x - max)))`` along a dimension; all else is as in `softmax`."""
    return _softmax(x, dim, dtype, tile, log=True)


def mean(x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, tile: RowTile | None = None) -> torch.Tensor:
    """The mean over some dimensions, summed in fp32 and rounded once.

    The reduced dimensions, in row-major order of x whatever the order in ``dim``, are one row, added as `RowOrder` tells; then one division.

    Args:
        x: any shape, fp16, bf16 or fp32. Where the reduced dimensions are not one contiguous row, they are copied first.
        dim: one dimension or several; None or none are all.
        keepdim: keep the reduced dimensions with size 1.
        tile: overrides the choice by the number of rows; it cannot change a bit.

    Returns:
        The remaining dimensions of x, contiguous and in its dtype. The mean of nothing is NaN.

    Raises:
        ValueError: an argument is wrong; nothing has been launched.
    """
    x = floats("x", x, min_dims=0)
    dims = _dims(x, dim)
    checks.boolean("keepdim", keepdim)
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.mean(x, dims, keepdim)
    kept = [i for i in range(x.dim()) if i not in dims]
    moved = x.permute([*kept, *dims])
    N = prod(x.shape[i] for i in dims)
    out = torch.empty([1 if i in dims else x.shape[i] for i in range(x.dim()) if keepdim or i in kept], dtype=x.dtype, device=x.device)
    rows = as_rows(moved.reshape(out.numel(), N))
    _launch_rows(mean_kernel, row_order(N), tile, (rows, out), (rows.stride(0),), rows.shape)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(x[..., :I]) * x[..., I:]``, computed in fp32 and rounded once.

    Args: x [..., 2 * I], fp16, bf16 or fp32.
    Returns: [..., I] contiguous in the dtype of x.
    Raises: ValueError: an argument is wrong; nothing has been launched.
    """
    x = floats("x", x)
    if x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be even: gates, then factors")
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.silu_and_mul(x)
    half = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    if out.numel():
        rows = as_rows(x)
        width = min(1024, triton.next_power_of_2(half))
        tile = 1024 // width
        start(silu_and_mul_kernel, (triton.cdiv(len(rows), tile), triton.cdiv(half, width)), (rows, out), (rows.stride(0), len(rows), half),
              {"ROWS": tile, "WIDTH": width, "EMULATE_BF16": emulate_bf16(out)}, 4)
    return out


def floats(
    name: str, value: object, *, min_dims: int = 1, device: torch.device | None = None, dtypes: Sequence[torch.dtype] = DTYPES
) -> torch.Tensor:
    """``value`` if it is a tensor of one of these dtypes, of no lost gradient; on ``device``, or without it where kernels run."""
    value = checks.forward_only(name, checks.as_stored(name, value))
    if value.dim() < min_dims:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must have at least {min_dims} dimensions")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {value.dtype}; it must be one of {', '.join(str(d) for d in dtypes)}")
    if device is None:
        checks.runnable(value.device, name)
    elif value.device != device:
        raise ValueError(f"{name} is on {value.device}; it must be on {device}, where the call runs")
    return value


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, N] with contiguous rows, a view of [..., N] where that can be."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.shape[1] < 2 or rows.stride(1) == 1 else rows.contiguous()


def emulate_bf16(out: torch.Tensor) -> bool:
    return INTERPRETED and out.dtype == torch.bfloat16


def start(
    kernel: Any, grid: tuple[int, int], tensors: tuple[torch.Tensor, ...], numbers: tuple[int | float, ...], constants: dict[str, Any], num_warps: int
) -> None:
    """Launch a kernel whose arguments are tensors, numbers and constants, in this order."""
    facts = tuple((t.dtype, t.data_ptr() % 16) for t in tensors)
    kinds = tuple((n % 16 == 0, n == 1, n >= 2**31) for n in numbers if isinstance(n, int))
    with on_device(tensors[0].device):
        launch(kernel, (facts, kinds, tuple(constants.values()), num_warps), grid, (*tensors, *numbers), constants, {"num_warps": num_warps})


def _tile(tile: RowTile | None) -> RowTile | None:
    if tile is not None and not isinstance(tile, RowTile):
        raise ValueError(f"tile={reprlib.repr(tile)} must be a RowTile, or None")
    return tile


def _launch_rows(
    kernel: Any, order: RowOrder, tile: RowTile | None, tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...], shape: torch.Size,
    flags: dict[str, Any] | None = None, scalars: tuple[float, ...] = (),
) -> None:
    num_rows, N = shape
    tile = _tile(tile) or tile_for(num_rows, order)
    constants = {**(flags or {}), "ROWS": tile.rows, "PARTS": order.parts, "WIDTH": order.width, "CHUNKS": order.chunks, "SINGLE": order.single,
                 "EMULATE_BF16": emulate_bf16(tensors[1])}
    start(kernel, (triton.cdiv(num_rows, tile.rows), 1), tensors, (*strides, num_rows, N, order.length, *scalars), constants, tile.num_warps)


def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None, tile: RowTile | None, log: bool) -> torch.Tensor:
    x = floats("x", x)
    if dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"dtype={dtype!r} must be None, {x.dtype} or torch.float32")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim!r} must be an int from {-x.dim()} to {x.dim() - 1}")
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.softmax(x, dim, dtype or x.dtype, log)
    moved = x.movedim(dim, -1)
    out = torch.empty(moved.shape, dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out.view(x.shape)
    rows = as_rows(moved)
    num_rows, N = rows.shape
    order = row_order(N)
    tile = _tile(tile) or (tile_for(num_rows, order) if INTERPRETED or num_rows > FEW_ROWS or order.single else RowTile(1, 1, split=True))
    if not tile.split:
        _launch_rows(softmax_kernel, order, tile, (rows, out), (rows.stride(0),), rows.shape, {"LOG": log})
    else:
        states = torch.empty(num_rows * 2 * order.parts, dtype=torch.float32, device=x.device)
        numbers = (rows.stride(0), N, order.length)
        sizes = {"PARTS": order.parts, "WIDTH": order.width, "CHUNKS": order.chunks}
        grid = (num_rows, order.parts)
        start(softmax_states_kernel, grid, (rows, states), numbers, sizes, tile.num_warps)
        start(softmax_results_kernel, grid, (rows, states, out), numbers, {"LOG": log, **sizes, "EMULATE_BF16": emulate_bf16(out)}, tile.num_warps)
    return out.movedim(-1, dim).contiguous()


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    """Ascending indices of the dimensions that ``dim`` names; all of them for none."""
    given = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, (list, tuple)) else [] if dim is None else [dim]
    limit = max(1, x.dim())
    if any(isinstance(d, bool) or not isinstance(d, int) or not -limit <= d < limit for d in given) or len({d % limit for d in given}) < len(given):
        raise ValueError(f"dim={dim!r} must be None, or ints from {-limit} to {limit - 1} that name each dimension of x at most once")
    return sorted(d % limit for d in given)[: x.dim()] or list(range(x.dim()))


@torch.library.custom_op("triton_mla::rms_norm", mutates_args=())
def _rms_norm_operator(x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The second result is empty without a residual."""
    result = rms_norm(x, weight, eps, residual=residual)
    return result if isinstance(result, tuple) else (result, x.new_empty(0))


@_rms_norm_operator.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)


@torch.library.custom_op("triton_mla::softmax", mutates_args=())
def _softmax_operator(x: torch.Tensor, dim: int, dtype: torch.dtype, log: bool) -> torch.Tensor:
    return _softmax(x, dim, dtype, None, log)


@_softmax_operator.register_fake
def _(x: torch.Tensor, dim: int, dtype: torch.dtype, log: bool) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("triton_mla::mean", mutates_args=())
def _mean_operator(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    return mean(x, tuple(dim), keepdim)


@_mean_operator.register_fake
def _(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    return x.new_empty([1 if i in dim else n for i, n in enumerate(x.shape) if keepdim or i not in dim])


@torch.library.custom_op("triton_mla::silu_and_mul", mutates_args=())
def _silu_and_mul_operator(x: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(x)


@_silu_and_mul_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
