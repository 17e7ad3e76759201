"""The launches of a matrix product: prepared once for its shapes, strides and dtype, then given tensors, or no more than their addresses."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ..calls import device_facts, on_device
from ..hopper_decode import Encoded
from ..kernels.companion.matmul import add_splits_kernel, matmul_kernel, matmul_tma_kernel
from ..kernels.hopper import available
from ..launch import INTERPRETED, hooked, launch
from .tiles import Tile, tile_for

COMBINE_WIDTH = 256
Strides = tuple[int, ...]


class Facts(NamedTuple):
    """All that the launches depend on, but for addresses. Strides are those of batch, row and column."""

    batch: int
    M: int
    N: int
    K: int
    a: Strides
    b: Strides
    out: Strides
    biased: bool
    aligned: bool  # all addresses are multiples of 16
    dtype: torch.dtype
    device: torch.device
    split_k: int
    tile: Tile | None


class _Step(NamedTuple):
    kernel: Any
    key: tuple[Any, ...]
    grid: tuple[int, int]
    integers: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, int]


class Product:
    """a [B, M, K] . b [B, K, N] (+ bias [N]) -> out [B, M, N], rounded once from fp32, K cut every ``split_k``.

    Once it has run with aligned tensors it is `ready` for addresses alone, and encodes the TMA descriptor of each but once.
    """

    def __init__(self, f: Facts) -> None:
        arch, num_sms = device_facts(f.device)
        splits = max(1, -(-f.K // f.split_k)) if f.K else 1
        tile = f.tile or tile_for(f.M, f.N, f.dtype, arch, batch=f.batch, split=splits > 1, num_sms=num_sms)
        across = tile.across and splits > 1
        results = f.batch * splits if across else f.batch
        to = (f.M * f.N, f.N, 1) if across else f.out
        tiles = -(-f.M // tile.block_m) * -(-f.N // tile.block_n) * results
        fits = splits == 1 or f.split_k % tile.block_k == 0  # no block of k straddles two splits
        tma = tile.tma and fits and f.aligned and f.K > 0 and all(_has_descriptor(f.batch, x, f.dtype) for x in (f.a, f.b, to))
        persistent = tma and tile.per_sm > 0
        stages = tile.num_stages if persistent else min(tile.num_stages, -(-min(f.K, f.split_k) // tile.block_k) + 1)
        constants: dict[str, Any] = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m, "SWAP": tile.swap,
                     "SPLIT_K": f.split_k if splits > 1 else 0, "SPLITS": splits, "ACROSS": across, "HAS_BIAS": f.biased and not across}
        emulate = {"EMULATE_BF16": INTERPRETED and f.dtype == torch.bfloat16}
        kinds: tuple[Any, ...] = ()
        if tma:
            constants |= {"A_BY_ROWS": f.a[2] == 1, "B_BY_ROWS": f.b[2] == 1, "SUBTILES": tile.subtiles}
            integers: tuple[int, ...] = (f.batch, f.M, f.N, f.K)
        else:
            constants |= {"EVEN_K": f.K % tile.block_k == 0 and fits, "PRECISION": "ieee", **emulate}
            integers = (*f.a, *f.b, *to[:2], f.M, f.N, f.K)
            kinds = tuple(map(kind, (*integers[:8], f.N, f.K)))
        self.facts, self.ready = f, False
        self._partials = (results, f.M, f.N) if across else None
        self._describe = (
            partial(_descriptor, (f.batch, f.M, f.K), f.a, (tile.block_m, tile.block_k)),
            partial(_descriptor, (f.batch, f.K, f.N), f.b, (tile.block_k, tile.block_n)),
            partial(_descriptor, (results, f.M, f.N), to, (tile.block_m, tile.block_n // tile.subtiles)),
        ) if tma else ()
        options = {"num_warps": tile.num_warps, "num_stages": stages}
        programs = min(tiles, num_sms * tile.per_sm) if persistent else tiles
        self._steps = [_Step(matmul_tma_kernel if tma else matmul_kernel, (f.dtype, *options.values(), *constants.values(), *kinds), (programs, 1), integers,
                             constants, options)]
        if across:
            constants = {"SPLITS": splits, "WIDTH": COMBINE_WIDTH, "HAS_BIAS": f.biased, **emulate}
            self._steps.append(_Step(add_splits_kernel, (f.dtype, *constants.values(), *map(kind, (*f.out[:2], f.N))),
                                     (f.batch * f.M, -(-f.N // COMBINE_WIDTH)), (*f.out[:2], f.M, f.N), constants, {"num_warps": 2}))
        self._launchers: list[Any] = []

    def run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Launch for tensors of these facts."""
        f, added = self.facts, out if bias is None else bias
        unaligned = () if f.aligned else tuple(x.data_ptr() % 16 for x in (a, b, out, added))
        to = out if self._partials is None else out.new_empty(self._partials, dtype=torch.float32)
        operands = [describe(x) for describe, x in zip(self._describe, (a, b, to), strict=True)] if self._describe else (a, b, to)
        arguments = ((*operands, added), (to, out, added))
        with on_device(f.device):
            compiled = [launch(step.kernel, (step.key, unaligned), step.grid, (*tensors, *step.integers), step.constants, step.options)
                        for step, tensors in zip(self._steps, arguments, strict=False)]
        if f.aligned and not INTERPRETED and (available() or not self._describe) and not hooked():
            runs = [Encoded(compiled[0], self._describe, f.dtype) if self._describe else compiled[0].run, *[c.run for c in compiled[1:]]]
            self._launchers = [(run, *step.grid, c.function, c.packed_metadata, (*step.integers, *step.constants.values()))
                               for run, step, c in zip(runs, self._steps, compiled, strict=True)]
            self.ready = True

    def run_ready(self, a: int, b: int, out: int, bias: int, like: torch.Tensor) -> bool:
        """Launch for addresses, that of ``out`` in the place of one of no bias; False if `run` must do it. ``like``: a tensor of the device."""
        if not self.ready or (a | b | out | bias) % 16 or hooked():
            return False
        device = self.facts.device
        with on_device(device):
            stream = driver.active.get_current_stream(device.index)
            partials = None if self._partials is None else like.new_empty(self._partials, dtype=torch.float32)
            to = out if partials is None else partials.data_ptr()
            run, x, y, function, metadata, rest = self._launchers[0]
            run(x, y, 1, stream, function, metadata, None, None, None, a, b, to, bias, *rest)
            if partials is not None:
                run, x, y, function, metadata, rest = self._launchers[1]
                run(x, y, 1, stream, function, metadata, None, None, None, to, out, bias, *rest)
        return True


product = lru_cache(maxsize=1024)(Product)  # some 30 KB each where each of 60 layers' weights has its TMA descriptor


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, tile: Tile | None, split_k: int) -> torch.Tensor:
    """a [B, M, K] . b [B, K, N] + bias [N] -> out [B, M, N] of one dtype, K cut every ``split_k``. ``tile`` overrides the table.

    Each operand has a dimension of stride 1 among its last two, and ``out`` its last one.
    """
    if out is None:
        out = a.new_empty((*a.shape[:2], b.shape[2]))
    if out.numel():
        prepared, to = product_of(a, b, bias, out, tile, split_k), out.data_ptr()
        if not prepared.run_ready(a.data_ptr(), b.data_ptr(), to, to if bias is None else bias.data_ptr(), out):
            prepared.run(a, b, out, bias)
    return out


def product_of(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile | None, split_k: int) -> Product:
    """That of `multiply`'s arguments."""
    aligned = not any(x.data_ptr() % 16 for x in (a, b, out, bias) if x is not None)
    batch, M, K = a.shape
    return product(Facts(batch, M, b.shape[2], K, a.stride(), b.stride(), out.stride(), bias is not None, aligned, a.dtype, a.device, split_k, tile))


def in_place(x: torch.Tensor) -> torch.Tensor:
    """x if one of its last two dimensions is contiguous, else a copy."""
    return x if 1 in x.stride()[1:] else x.contiguous()


def kind(value: int) -> tuple[bool, bool, bool]:
    """What Triton compiles in of an integer."""
    return value == 1, value % 16 == 0, value >= 2**31


def _has_descriptor(batch: int, strides: Strides, dtype: torch.dtype) -> bool:
    """Whether TMA can walk these strides: one of the last two is 1, and the others are multiples of 16 bytes."""
    far = [strides[1] if strides[2] == 1 else strides[2]] + [strides[0]] * (batch > 1)
    return all(0 < n < 2**38 and n * dtype.itemsize % 16 == 0 for n in far)


def _descriptor(sizes: tuple[int, int, int], strides: Strides, block: tuple[int, int], base: Any) -> TensorDescriptor:
    """TMA descriptor of blocks of ``base``, a tensor or its address, [batch, rows, cols] as they lie in memory."""
    (batch, rows, cols), (of_batch, of_row, of_col) = sizes, strides
    if of_col != 1:
        rows, cols, of_row, block = cols, rows, of_col, block[::-1]
    return TensorDescriptor(base, [batch, rows, cols], [of_batch if batch > 1 else of_row, of_row, 1], [1, *block])
