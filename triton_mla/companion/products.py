"""Matrix products whose rows have bits of their own: `matmul`, `linear`, `bmm`, and those of a mixture of experts.

Row m of a result depends on row m of the left operand, the right one and the bias, and on nothing else: neither on how many rows there are
nor on where the row lies. The order of additions is a property of (N, K) alone (`split_length`); a `Tile` cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from math import prod
from typing import Any, NamedTuple

import torch

from .. import checks
from ..calls import MAX_CALLS, device_facts, on_device
from ..kernels.companion.grouped import add_slots_kernel, grouped_kernel
from ..launch import INTERPRETED, launch
from .multiply import COMBINE_WIDTH, Product, in_place, kind, multiply, product_of
from .rows import silu_and_mul
from .tiles import Tile, tile_for


def split_length(N: int, K: int) -> int:
    """How many of K each accumulator adds: K, or about a quarter where N <= 2560 and K >= 6144.

    A product with so few columns and so many terms leaves most of a GPU idle when it has few rows. So its K is cut in four, the first three
    of K / 4 rounded up to a multiple of 256: in each part k ascends in an fp32 accumulator, and these are added to 0 in ascending order.
    Neither the number of rows nor the dtype nor the device has a say in it.
    """
    return K if N > 2560 or K < 6144 else -(-K // 1024) * 256


def matmul(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b`` with the shapes of `torch.matmul`, vectors and broadcast batches included.

    Args:
        a: [..., M, K] or [K], fp16, bf16 or fp32, with any strides.
        b: [..., K, N] or [K] of the same dtype and device. An operand with a contiguous dimension among its last two is read in place, any
            other is copied first. So are batches of several dimensions that are not one in memory.
        out: preallocated result, with any strides. It must not share memory with an operand.

    Returns:
        [..., M, N], rounded once from fp32. Additions: k ascending in one fp32 accumulator, or in four as `split_length` says.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written.
    """
    return product_call(_check_matmul, ("a", "b", ""), a, b, None, out)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, the bias added to the fp32 sum before it is rounded. The rest is as in `matmul`.

    Args: x [..., K] or [K]; weight [N, K]; bias [N], all of one dtype; out [..., N].
    """
    return product_call(_check_linear, ("x", "weight", "bias"), x, weight, bias, out)


def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``a[i] @ b[i]`` for each i. The rest is as in `matmul`.

    Args: a [B, M, K]; b [B, K, N]; out [B, M, N], written in place where its last dimension is contiguous.
    """
    return product_call(_check_bmm, ("a", "b", ""), a, b, None, out)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, group_starts: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Each row times the matrix of its group: ``out[s] = x[s] @ weight[e].T`` for ``group_starts[e] <= s < group_starts[e + 1]``.

    Args:
        x: [S, K], fp16, bf16 or fp32, rows sorted by group; the last dimension is contiguous.
        weight: [E, N, K] of the same dtype; one of its last two dimensions is contiguous, or it is copied.
        group_starts: [E + 1] int32 on the same device, from 0 and never falling. It is read on the device only.
        out: preallocated [S, N], its last dimension contiguous.

    Returns:
        [S, N], rounded once from one fp32 accumulator, k ascending. A row's bits depend on that row and the matrix of its group. Rows from
        ``group_starts[E]`` on get 0.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written.
    """
    x = checks.tensor("x", x, dims=2)
    _operand("x", x)
    _operand("weight", weight, x, dims=3)
    checks.shape("weight", weight, (*weight.shape[:2], x.shape[1]), "its last dimension is that of x")
    starts = _indices("group_starts", group_starts, x, torch.int32, (weight.shape[0] + 1,), "one more than weight has matrices")
    if out is not None:
        out = checks.tensor("out", out, dims=2)
    _check_out(out, (x.shape[0], weight.shape[1]), x)
    if torch.compiler.is_compiling():
        result = torch.ops.triton_mla.grouped_linear(x, weight, starts)
        return result if out is None else out.copy_(result)
    checks.apart({"out": out}, {"x": x, "weight": weight, "group_starts": starts})
    return _grouped(x, None, weight, starts, out)


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """The experts' part of a mixture: ``out[t]`` = sum over slots j of ``topk_weights[t, j] * expert(topk_ids[t, j])(x[t])``.

    An expert is ``down[e] @ silu_and_mul(gate_up[e] @ x[t])``, rounded to the dtype after each product and after `silu_and_mul`.

    Args:
        x: [T, K], fp16, bf16 or fp32; the last dimension is contiguous.
        gate_up: [E, 2 * I, K] of the same dtype, the gate's rows first.
        down: [E, K, I] of the same dtype.
        topk_ids: [T, k] int32; a slot with an id outside of [0, E) counts as an expert that gives 0, whatever its weight.
        topk_weights: [T, k] fp32.

    Returns:
        [T, K]: slots added in the order 0 to k - 1 to an fp32 sum, each by one fma, rounded once. A token's bits do not depend on the others.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written.
    """
    x = checks.tensor("x", x, dims=2)
    _operand("x", x)
    _operand("gate_up", gate_up, x, dims=3)
    _operand("down", down, x, dims=3)
    E, double, K = gate_up.shape
    if double % 2 or E == 0:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}; it must have a matrix at least, and an even number of rows: gate, then up")
    checks.shape("gate_up", gate_up, (E, double, x.shape[1]), "its last dimension is that of x")
    checks.shape("down", down, (E, K, double // 2), "from half the rows of gate_up back to the dimension of x")
    slots = topk_ids.shape[-1] if isinstance(topk_ids, torch.Tensor) and topk_ids.dim() else 0
    ids = _indices("topk_ids", topk_ids, x, torch.int32, (x.shape[0], slots), "one row for each of x")
    weights = _indices("topk_weights", topk_weights, x, torch.float32, (x.shape[0], slots), "as topk_ids")
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.moe_experts(x, gate_up, down, ids, weights)
    return _moe(x, gate_up, down, ids, weights)


def _operand(name: str, value: object, like: torch.Tensor | None = None, dims: int | None = None) -> None:
    """Refuse what is no tensor of these dimensions, and of the dtype and device of ``like`` or such that a kernel takes."""
    value = checks.forward_only(name, checks.as_stored(name, value))
    if dims is not None and value.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must have {dims} dimensions")
    if like is None:
        checks.float_dtype(name, value)
        checks.runnable(value.device, name)
    elif value.dtype != like.dtype or value.device != like.device:
        raise ValueError(f"{name} is {value.dtype} on {value.device}; it must be {like.dtype} on {like.device}, as the first operand")


def _indices(name: str, value: object, like: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], why: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.device != like.device:
        what = f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name}={what} must be a tensor of {dtype} on {like.device}")
    checks.shape(name, checks.forward_only(name, checks.as_stored(name, value)), shape, why)
    return value.contiguous()


def _check_out(out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if out is not None:
        _operand("out", out, like)
        checks.shape("out", out, shape, "that of the result")
        checks.no_overlap("out", out)


class Operands(NamedTuple):
    """A product in the form that the kernels take: a [B, M, K], b [B, K, N], bias [N]."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    shape: tuple[int, ...]  # of the result
    rows_first: bool = False  # the result is [M, B, N]

    def place(self, out: torch.Tensor) -> torch.Tensor | None:
        """``out`` [shape] as [B, M, N], its last dimension contiguous; None if it does not lie so."""
        sizes = (*self.a.shape[:2], self.b.shape[2])
        if self.rows_first:
            out = out.transpose(0, 1)
        if out.shape == sizes and out.stride(2) == 1:
            return out
        return out.view(sizes) if out.is_contiguous() else None

    def computed(self, product: Callable[..., torch.Tensor]) -> torch.Tensor:
        """By `_product` or the operator of it, in a tensor of its own."""
        result = product(self.a, self.b, self.bias, self.rows_first)
        return (result.transpose(0, 1) if self.rows_first else result).view(self.shape)


Check = Callable[[Any, Any, Any, Any], Operands]
_calls: dict[tuple[Any, ...], tuple[Product, tuple[int, ...]]] = {}


def product_call(check: Check, names: tuple[str, str, str], a: Any, b: Any, bias: Any, out: Any) -> torch.Tensor:
    """The product that ``check`` makes of a caller's arguments of these names; see `matmul`.

    Arguments of equal shapes, strides, dtypes and devices have passed the checks before: on a GPU those take longer than a small product.
    """
    if torch.compiler.is_compiling():
        result = check(a, b, bias, out).computed(torch.ops.triton_mla.product)
        return result if out is None else out.copy_(result)
    facts: tuple[Any, ...] = ()
    known = None
    try:
        facts = (check, checks.recording(), *[None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad)
                                              for t in (a, b, bias, out)])
        known = _calls.get(facts)
    except (AttributeError, TypeError, RuntimeError):
        pass  # the checks say which argument it is
    if known is not None:
        if out is not None:
            checks.apart({"out": out}, dict(zip(names, (a, b, bias), strict=True)))
        result = a.new_empty(known[1]) if out is None else out
        to = result.data_ptr()
        if known[0].run_ready(a.data_ptr(), b.data_ptr(), to, to if bias is None else bias.data_ptr(), a):
            return result
    x = check(a, b, bias, out)
    checks.apart({"out": out}, dict(zip(names, (a, b, bias), strict=True)))
    result = x.a.new_empty(x.shape) if out is None else out
    if result.numel() == 0:
        return result
    to = x.place(result)
    if to is None:
        return result.copy_(x.computed(_product))
    left, right = in_place(x.a), in_place(x.b)
    prepared = product_of(left, right, x.bias, to, None, split_length(x.b.shape[2], x.b.shape[1]))
    prepared.run(left, right, to, x.bias)
    if prepared.ready and all(t is None or t.data_ptr() == given.data_ptr() for t, given in ((left, a), (right, b), (x.bias, bias))):  # none is a copy
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[facts] = prepared, x.shape
    return result


def _check_matmul(a: Any, b: Any, _: None, out: Any) -> Operands:
    _operand("a", a)
    _operand("b", b, a)
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; both must have a dimension at least")
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    (M, K), N = left.shape[-2:], right.shape[-1]
    if right.shape[-2] != K:
        raise ValueError(f"b has shape {tuple(b.shape)}; it must have {K} rows, as a of shape {tuple(a.shape)} has columns")
    try:
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except RuntimeError:
        raise ValueError(f"b has shape {tuple(b.shape)}; its batch must broadcast with that of a, {tuple(a.shape)}") from None
    shape = (*batch, *([M] if a.dim() > 1 else []), *([N] if b.dim() > 1 else []))
    _check_out(out, shape, a)
    if right.dim() == 2:
        return Operands(left.reshape(1, prod(left.shape[:-1]), K), right.unsqueeze(0), None, shape)
    size = prod(batch)
    return Operands(left.expand(*batch, M, K).reshape(size, M, K), right.expand(*batch, K, N).reshape(size, K, N), None, shape)


def _check_linear(x: Any, weight: Any, bias: Any, out: Any) -> Operands:
    _operand("x", x)
    _operand("weight", weight, x, dims=2)
    N, K = weight.shape
    if x.dim() == 0 or x.shape[-1] != K:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be {K}, as that of weight of shape {tuple(weight.shape)}")
    if bias is not None:
        _operand("bias", bias, x, dims=1)
        checks.shape("bias", bias, (N,), "one value for each row of weight")
        bias = bias.contiguous()
    shape = (*x.shape[:-1], N)
    _check_out(out, shape, x)
    return Operands(x.reshape(1, prod(x.shape[:-1]), K), weight.t().unsqueeze(0), bias, shape)


def _check_bmm(a: Any, b: Any, _: None, out: Any) -> Operands:
    _operand("a", a, dims=3)
    _operand("b", b, a, dims=3)
    checks.shape("b", b, (a.shape[0], a.shape[2], b.shape[2]), "one matrix for each of a, with a row for each of its columns")
    shape = (*a.shape[:2], b.shape[2])
    _check_out(out, shape, a)
    return Operands(a, b, None, shape)


def _grouped(x: torch.Tensor, rows: torch.Tensor | None, weight: torch.Tensor, starts: torch.Tensor, out: torch.Tensor | None, top_k: int = 0,
             tile: Tile | None = None) -> torch.Tensor:
    """`grouped_linear`; with ``rows`` [S] int32, row s is ``x[rows[s] // top_k]``."""
    weight = in_place(weight)
    (E, N, K), S = weight.shape, x.shape[0] if rows is None else rows.shape[0]
    if out is None:
        out = torch.empty((S, N), dtype=x.dtype, device=x.device)
    if tile is None:
        arch, num_sms = device_facts(x.device)
        tile = tile_for(-(-S // max(1, E)), N, x.dtype, arch, batch=E, num_sms=num_sms)
    strides = (x.stride(0), *weight.stride(), out.stride(0))
    flags = {"EVEN_K": K % tile.block_k == 0, "SWAP": tile.swap, "PRECISION": "ieee", "EMULATE_BF16": INTERPRETED and x.dtype == torch.bfloat16}
    rows = starts if rows is None else rows
    key = (x.dtype, top_k, *astuple(tile), *flags.values(), *map(kind, (*strides, N, K)), *(t.data_ptr() % 16 for t in (x, rows, weight, starts, out)))
    with on_device(x.device):
        launch(grouped_kernel, key, (-(-N // tile.block_n) * (S // tile.block_m + E + 1 if S else 0), 1),
               (x, rows, weight, starts, out, *strides, S, E, N, K),
               {"TOP_K": top_k, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, **flags},
               {"num_warps": tile.num_warps, "num_stages": tile.num_stages})
    return out


def _moe(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    (T, K), E, slots = x.shape, gate_up.shape[0], ids.shape[1]
    out = torch.empty((T, K), dtype=x.dtype, device=x.device)
    by_expert, pairs = torch.sort(torch.where((ids < 0) | (ids >= E), E, ids).flatten(), stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(E + 1, dtype=torch.int32, device=x.device), out_int32=True)
    places = torch.empty_like(pairs, dtype=torch.int32).scatter_(0, pairs, torch.arange(T * slots, dtype=torch.int32, device=x.device))
    hidden = silu_and_mul(_grouped(x, pairs.int(), gate_up, starts, None, top_k=slots))
    y = _grouped(hidden, None, down, starts, None)
    constants = {"TOP_K": slots, "WIDTH": COMBINE_WIDTH, "EMULATE_BF16": INTERPRETED and x.dtype == torch.bfloat16}
    with on_device(x.device):
        launch(add_slots_kernel, (x.dtype, slots, kind(K), ids.data_ptr() % 16, weights.data_ptr() % 16), (T, -(-K // COMBINE_WIDTH)),
               (y, places, ids, weights, out, y.stride(0), out.stride(0), E, K), constants, {"num_warps": 2})
    return out


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, rows_first: bool) -> torch.Tensor:
    """a [B, M, K] . b [B, K, N] (+ bias [N]) -> [B, M, N]; with ``rows_first`` it lies in memory as [M, B, N]."""
    return multiply(in_place(a), in_place(b), bias, _empty(a, b, bias, rows_first), None, split_length(b.shape[2], b.shape[1]))


def _empty(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, rows_first: bool) -> torch.Tensor:
    batch, M, N = *a.shape[:2], b.shape[2]
    return a.new_empty((M, batch, N)).transpose(0, 1) if rows_first else a.new_empty((batch, M, N))

torch.library.custom_op("triton_mla::product", _product, mutates_args=()).register_fake(_empty)


@torch.library.custom_op("triton_mla::grouped_linear", mutates_args=())
def _grouped_operator(x: torch.Tensor, weight: torch.Tensor, group_starts: torch.Tensor) -> torch.Tensor:
    return grouped_linear(x, weight, group_starts)

_grouped_operator.register_fake(lambda x, weight, group_starts: x.new_empty((x.shape[0], weight.shape[1])))

_moe_operator = torch.library.custom_op("triton_mla::moe_experts", moe_experts, mutates_args=())
_moe_operator.register_fake(lambda x, gate_up, down, topk_ids, topk_weights: x.new_empty(x.shape))
