"""Matrix products whose rows have bits of their own: `matmul`, `linear`, `bmm`, and those of a mixture of experts.

Row m of a result depends on row m of the left operand, the right one and the bias, and on nothing else: neither on how many rows there are
nor on where the row lies. The order of additions is a property of (N, K) alone (`split_length`); a `Tile` cannot change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

import torch
import triton

from .. import checks
from ..calls import device_facts, on_device
from ..kernels.companion.grouped import add_slots_kernel, grouped_kernel
from ..kernels.companion.matmul import add_splits_kernel, matmul_kernel, matmul_tma_kernel
from ..launch import INTERPRETED, launch
from .rows import silu_and_mul

SPLITS = 4
SPLIT_UNIT = 256  # no block of k straddles two splits
COMBINE_WIDTH = 256


@dataclass(frozen=True)
class Tile:
    """How a product is spread over the machine. No field can change a bit.

    Attributes:
        swap: the accumulator is held transposed, so that few rows are the narrow operand of the matrix unit.
        across: where K is split, each split is a program's own; else each program takes them one after the other.
        tma: operands come by descriptors where their strides allow it, on sm_90.
        per_sm: with ``tma``, programs that stay on a multiprocessor and take tile after tile; 0: each program takes one.
        subtiles: with ``tma``, the runs of columns, 1 or 2, in which a tile is stored.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    swap: bool = False
    across: bool = False
    tma: bool = False
    per_sm: int = 0
    subtiles: int = 1


# Rows of (most M, most N, tile); the first that holds is taken. fp32 products are unrolled multiplications, which want small tiles.
TILES = {
    "sm_90": (
        (16, 4096, Tile(16, 16, 256, 4, 4, across=True)),
        (16, inf, Tile(16, 32, 256, 4, 4, across=True)),
        (32, 4096, Tile(32, 32, 128, 4, 5, across=True)),
        (32, inf, Tile(32, 64, 128, 4, 4, across=True)),
        (64, 4096, Tile(64, 32, 128, 4, 5, across=True)),
        (64, inf, Tile(64, 64, 128, 4, 4, across=True)),
        (128, inf, Tile(128, 64, 128, 4, 3, across=True)),
        (512, 8192, Tile(128, 128, 64, 8, 4, tma=True, per_sm=1)),
        (inf, 2560, Tile(128, 128, 64, 8, 4, tma=True, per_sm=1)),
        (inf, inf, Tile(128, 256, 64, 8, 4, tma=True, per_sm=1, subtiles=2)),
    ),
    "other": (
        (16, inf, Tile(16, 64, 128, 4, 3, across=True)),
        (64, inf, Tile(64, 64, 64, 4, 3, across=True)),
        (inf, inf, Tile(128, 128, 64, 8, 3)),
    ),
    "fp32": ((inf, inf, Tile(16, 64, 32, 4, 2, across=True)),),
    "interpreter": ((inf, inf, Tile(64, 64, 128, 4, 1)),),
}


def tile_for(M: int, N: int, dtype: torch.dtype, arch: str) -> Tile:
    """The tile of a product; one for all under the interpreter, whose products follow the shape of the tile."""
    table = "fp32" if dtype == torch.float32 and arch != "interpreter" else arch
    return next(tile for most_m, most_n, tile in TILES.get(table, TILES["other"]) if most_m >= M and most_n >= N)


def split_length(N: int, K: int) -> int:
    """How many of K each accumulator adds: K, or about a quarter where N <= 2560 and K >= 6144.

    A product with so few columns and so many terms leaves most of a GPU idle when it has few rows. So its K is cut in four, the first three
    of K / 4 rounded up to a multiple of 256: in each part k ascends in an fp32 accumulator, and these are added to 0 in ascending order.
    Neither the number of rows nor the dtype nor the device has a say in it.
    """
    return K if N > 2560 or K < 6144 else triton.cdiv(triton.cdiv(K, SPLITS), SPLIT_UNIT) * SPLIT_UNIT


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
        return _finish(_product(left.reshape(1, prod(left.shape[:-1]), K), right.unsqueeze(0), None, None), shape, out)
    size = prod(batch)
    x, w = left.expand(*batch, M, K).reshape(size, M, K), right.expand(*batch, K, N).reshape(size, K, N)
    return _finish(_product(x, w, None, None), shape, out)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, the bias added to the fp32 sum before it is rounded. The rest is as in `matmul`.

    Args: x [..., K] or [K]; weight [N, K]; bias [N], all of one dtype; out [..., N].
    """
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
    direct = out.view(1, prod(shape[:-1]), N) if out is not None and out.is_contiguous() else None
    return _finish(_product(x.reshape(1, prod(x.shape[:-1]), K), weight.t().unsqueeze(0), bias, direct), shape, out)


def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``a[i] @ b[i]`` for each i. The rest is as in `matmul`.

    Args: a [B, M, K]; b [B, K, N]; out [B, M, N], written in place where its last dimension is contiguous.
    """
    _operand("a", a, dims=3)
    _operand("b", b, a, dims=3)
    checks.shape("b", b, (a.shape[0], a.shape[2], b.shape[2]), "one matrix for each of a, with a row for each of its columns")
    shape = (*a.shape[:2], b.shape[2])
    _check_out(out, shape, a)
    return _finish(_product(a, b, None, out if out is not None and out.stride(2) == 1 else None), shape, out)


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
    return _grouped(x, None, weight, starts, out)


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """The experts' part of a mixture: ``out[t]`` = sum over slots j of ``topk_weights[t, j] * expert(topk_ids[t, j])(x[t])``.

    An expert is ``down[e] @ silu_and_mul(gate_up[e] @ x[t])``, rounded to the dtype after each product and after `silu_and_mul`.

    Args:
        x: [T, K], fp16, bf16 or fp32; the last dimension is contiguous.
        gate_up: [E, 2 * I, K] of the same dtype, the gate's rows first.
        down: [E, K, I] of the same dtype.
        topk_ids: [T, k] int32; a slot with an id outside of [0, E) counts as an expert that gives 0.
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
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}={value!r} must be a torch.Tensor")
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
    checks.shape(name, value, shape, why)
    return value.contiguous()


def _check_out(out: object, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if out is not None:
        _operand("out", out, like)
        assert isinstance(out, torch.Tensor)
        checks.shape("out", out, shape, "that of the result")
        checks.no_overlap("out", out)


def _finish(result: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
    """The result in its shape, and in ``out`` if it is not already there."""
    if out is None:
        return result.view(shape)
    return out if out.data_ptr() == result.data_ptr() and out.numel() else out.copy_(result.view(shape))


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    """a [B, M, K] . b [B, K, N] (+ bias [N]) -> [B, M, N]."""
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.product(a, b, bias)
    return multiply(a, b, bias, out, None, split_length(b.shape[2], b.shape[1]))


def multiply(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, tile: Tile | None, split_k: int
) -> torch.Tensor:
    """Launch a [B, M, K] . b [B, K, N] + bias [N] -> out [B, M, N] of one dtype, K cut every ``split_k``. ``tile`` overrides the table."""
    a, b = _in_place(a), _in_place(b)
    (batch, M, K), N, device = a.shape, b.shape[2], a.device
    if out is None:
        out = torch.empty((batch, M, N), dtype=a.dtype, device=device)
    if out.numel() == 0:
        return out
    arch, num_sms = device_facts(device)
    splits = max(1, triton.cdiv(K, split_k)) if K else 1
    if tile is None:
        tile = tile_for(M, N, a.dtype, arch)
    aligned = tuple(t.data_ptr() % 16 for t in (a, b, out)) + (0 if bias is None else bias.data_ptr() % 16,)
    tiles = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    shape = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m}
    split = {"SPLIT_K": split_k if splits > 1 else 0, "SPLITS": splits}
    with_bias = {"HAS_BIAS": bias is not None}
    emulate = {"EMULATE_BF16": INTERPRETED and a.dtype == torch.bfloat16}
    with on_device(device):
        if tile.tma and _descriptive(a) and _descriptive(b) and _descriptive(out) and not any(aligned):
            kinds = {"A_BY_ROWS": a.stride(2) == 1, "B_BY_ROWS": b.stride(2) == 1, "SWAP": tile.swap}
            key = (a.dtype, tile, split_k if splits > 1 else 0, splits, bias is None, *kinds.values())
            args = (_descriptor(a[0], tile.block_m, tile.block_k), _descriptor(b[0], tile.block_k, tile.block_n), out if bias is None else bias,
                    _descriptor(out[0], tile.block_m, tile.block_n // tile.subtiles), M, N, K)
            launch(matmul_tma_kernel, key, (min(tiles, num_sms * tile.per_sm) if tile.per_sm else tiles, 1), args,
                   {**shape, **kinds, **split, **with_bias, "SUBTILES": tile.subtiles}, options)
            return out
        across = tile.across and splits > 1
        to = torch.empty((batch * splits, M, N), dtype=torch.float32, device=device) if across else out
        strides = (*a.stride(), *b.stride(), *to.stride()[:2])
        flags = {"EVEN_K": K % tile.block_k == 0, "SWAP": tile.swap, **split, "ACROSS": across, "HAS_BIAS": bias is not None and not across}
        key = (a.dtype, tile, *flags.values(), *map(_kind, (*strides, N, K)), *aligned)
        launch(matmul_kernel, key, (tiles * batch * (splits if across else 1), 1), (a, b, to if bias is None else bias, to, *strides, M, N, K),
               {**shape, **flags, "PRECISION": "ieee", **emulate}, options)
        if across:
            strides = out.stride()[:2]
            launch(add_splits_kernel, (a.dtype, splits, bias is None, *map(_kind, (*strides, N)), *aligned), (batch * M, triton.cdiv(N, COMBINE_WIDTH)),
                   (to, out if bias is None else bias, out, *strides, M, N),
                   {"SPLITS": splits, "WIDTH": COMBINE_WIDTH, **with_bias, **emulate}, {"num_warps": 2})
    return out


def _grouped(x: torch.Tensor, rows: torch.Tensor | None, weight: torch.Tensor, starts: torch.Tensor, out: torch.Tensor | None, top_k: int = 0,
             tile: Tile | None = None) -> torch.Tensor:
    """`grouped_linear`; with ``rows`` [S] int32, row s is ``x[rows[s] // top_k]``."""
    weight = _in_place(weight)
    (E, N, K), S = weight.shape, x.shape[0] if rows is None else rows.shape[0]
    if out is None:
        out = torch.empty((S, N), dtype=x.dtype, device=x.device)
    if E == 0:
        return out.zero_()
    if tile is None:
        tile = tile_for(triton.cdiv(S, E), N, x.dtype, device_facts(x.device)[0])
    strides = (x.stride(0), *weight.stride(), out.stride(0))
    flags = {"EVEN_K": K % tile.block_k == 0, "SWAP": tile.swap, "PRECISION": "ieee", "EMULATE_BF16": INTERPRETED and x.dtype == torch.bfloat16}
    rows = starts if rows is None else rows
    key = (x.dtype, top_k, tile, *flags.values(), *map(_kind, (*strides, N, K)), *(t.data_ptr() % 16 for t in (x, rows, weight, starts, out)))
    with on_device(x.device):
        launch(grouped_kernel, key, (triton.cdiv(N, tile.block_n), S // tile.block_m + E + 1 if S else 0),
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
    emulate = INTERPRETED and x.dtype == torch.bfloat16
    with on_device(x.device):
        launch(add_slots_kernel, (x.dtype, slots, _kind(K), weights.data_ptr() % 16), (T, triton.cdiv(K, COMBINE_WIDTH)),
               (y, places, weights, out, y.stride(0), out.stride(0), K), {"TOP_K": slots, "WIDTH": COMBINE_WIDTH, "EMULATE_BF16": emulate}, {"num_warps": 2})
    return out


def _in_place(x: torch.Tensor) -> torch.Tensor:
    """x if one of its last two dimensions is contiguous, else a copy."""
    return x if 1 in x.stride()[1:] else x.contiguous()


def _kind(value: int) -> tuple[bool, bool, bool]:
    """What Triton compiles in of an integer."""
    return value == 1, value % 16 == 0, value >= 2**31


def _descriptive(x: torch.Tensor) -> bool:
    """Whether TMA takes the one matrix of x: rows or columns contiguous, the others 16 bytes apart or a multiple of that."""
    far = x.stride(1) if x.stride(2) == 1 else x.stride(2)
    return x.shape[0] == 1 and x.numel() > 0 and 1 in x.stride()[1:] and far * x.element_size() % 16 == 0


def _descriptor(x: torch.Tensor, rows: int, cols: int) -> object:
    """TMA descriptor of blocks of ``x`` [rows, cols] as they lie in memory."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if x.stride(1) == 1:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, cols])
    return TensorDescriptor(x, [x.shape[1], x.shape[0]], [x.stride(1), x.stride(0)], [cols, rows])


@torch.library.custom_op("triton_mla::product", mutates_args=())
def _product_operator(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What `torch.compile` sees of `matmul`, `linear` and `bmm`."""
    return _product(a, b, bias, None)


_product_operator.register_fake(lambda a, b, bias: a.new_empty((*a.shape[:2], b.shape[2])))


@torch.library.custom_op("triton_mla::grouped_linear", mutates_args=())
def _grouped_operator(x: torch.Tensor, weight: torch.Tensor, group_starts: torch.Tensor) -> torch.Tensor:
    return grouped_linear(x, weight, group_starts)


_grouped_operator.register_fake(lambda x, weight, group_starts: x.new_empty((x.shape[0], weight.shape[1])))


@torch.library.custom_op("triton_mla::moe_experts", mutates_args=())
def _moe_operator(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    return moe_experts(x, gate_up, down, topk_ids, topk_weights)


_moe_operator.register_fake(lambda x, gate_up, down, topk_ids, topk_weights: x.new_empty(x.shape))
