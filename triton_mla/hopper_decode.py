"""The launches of the Hopper forms of decode and extend. For many rows: a list of work, made on the device, one persistent kernel, and the
combine. For few work items: one kernel in the place of one_pass_kernel, or three, which are the two phases and what lies between them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from .kernels.hopper import available
from .launch import COMBINE_AHEAD, Step, Strides, pick
from .plan import HOPPER_ROWS, AttentionPlan, hopper_refusal, hopper_tile
from .tuning import VALUE_SLICES

AXIS = 1 << 30
MAX_MAPS = 1024
_WORK = pick("cu_seqlens_q", "seq_lens", "out", "lse", "partials")
_ATTEND = pick("q_nope", "q_pe", "kv_cache", "block_table", "out", "lse", "partials", "scale_log2")
_FEW = pick("kv_cache", "q_nope", "q_pe", "block_table", "cu_seqlens_q", "seq_lens", "out", "lse", "partials", "scale_log2")
_SCORES = pick("kv_cache", "q_nope", "q_pe", "block_table", "cu_seqlens_q", "seq_lens", "scores", "scale_log2")
_WEIGHTS = pick("out", "cu_seqlens_q", "seq_lens", "scores", "scale_log2")
_VALUES = pick("scores", "kv_cache", "block_table", "cu_seqlens_q", "seq_lens", "scores", "out", "lse", "partials")
_COMBINE = pick("out", "lse", "partials")
RING_BYTES = 200 << 10


def machine_refusal(arch: str) -> str | None:
    """Why no call takes these forms on an architecture, or None."""
    if arch != "sm_90":
        return f"it is for sm_90, not {arch}"
    return None if available() else f"it is written for the Gluon of triton 3.6, not {triton.__version__}, and has no interpreter"


def refusal(plan: AttentionPlan, strides: Strides, num_pages: int) -> str | None:
    """Why these forms do not serve the calls of a plan with these strides, or None. Addresses, which it wants aligned to 16, are seen at a call."""
    if reason := machine_refusal(plan.arch) or hopper_refusal(
            num_heads=plan.num_heads, kv_lora_rank=plan.kv_lora_rank, qk_rope_head_dim=plan.qk_rope_head_dim, dtype=plan.dtype, page_size=plan.page_size,
            order=plan.order):
        return reason
    if not plan.num_tokens:
        return "there are no query tokens"
    page, slot = strides.kv_cache
    if any(not 0 < s < 1 << 33 or s % 8 for s in (*strides.q_nope, *strides.q_pe, slot)):
        return f"TMA reads rows at positive multiples of 16 bytes: the strides are {strides.q_nope}, {strides.q_pe} and {slot} elements"
    if page % slot or page < 0 or not 0 < num_pages * (page // slot) < AXIS:
        return f"pages must lie whole rows apart, and {AXIS} rows in all: {num_pages} pages are {page} elements apart, rows {slot}"
    return None


def serves(plan: AttentionPlan, strides: Strides, num_pages: int) -> bool:
    return refusal(plan, strides, num_pages) is None


class Address(NamedTuple):
    """What a TMA descriptor asks of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def segment(page_size: int) -> int:
    """Tokens of a KV tile that are sure to lie in one page."""
    return math.gcd(page_size, 64)


def cache_rows(plan: AttentionPlan, strides: Strides) -> Callable[[Any], Any]:
    """From the cache, or its address, to a TMA descriptor whose boxes are a segment's rows and 64 columns.

    A row past the last visible token comes as zeros, whatever lies there: the coordinates [AXIS, row + n, AXIS - n, column] wrap around to the
    address of (row, column), since the strides of the first three add up to 2^64 bytes at AXIS, and from its n-th row on the box lies outside
    the third axis.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.hopper.copies import SHARED4

    slot = strides.kv_cache[1]
    shape = [0x7FFF0000, 0x7FFF0000, AXIS, plan.kv_lora_rank + plan.qk_rope_head_dim]
    return lambda base: TensorDescriptor(base, shape, [2**34 - slot, slot, slot, 1], [1, 1, segment(plan.page_size), 64], SHARED4.value)


def descriptions(plan: AttentionPlan, strides: Strides) -> tuple[Callable[[Any], Any], ...]:
    """From q_nope, q_pe and kv_cache, or their addresses, to TMA descriptors.

    Boxes of queries are the rows of a tile and 64 columns; heads and tokens outside come as zeros.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.hopper.decode_copies import SHARED3

    heads, tokens, _ = hopper_tile(plan.num_heads)

    def query(columns: int, rows: tuple[int, ...]) -> Callable[[Any], Any]:
        shape = [plan.num_tokens, plan.num_heads, columns]
        return lambda base: TensorDescriptor(base, shape, [*rows, 1], [tokens, heads, 64], SHARED3.value)

    return query(plan.kv_lora_rank, strides.q_nope), query(plan.qk_rope_head_dim, strides.q_pe), cache_rows(plan, strides)


def steps(plan: AttentionPlan, strides: Strides, capacity: int, with_lse: bool) -> list[Step]:
    """All launches of a call that the form for many rows serves."""
    from .kernels.hopper.decode import hopper_decode_kernel
    from .kernels.hopper.decode_work import hopper_decode_work_kernel
    from .kernels.partials import combine_kernel

    heads, _, _ = hopper_tile(plan.num_heads)
    R, split = plan.kv_lora_rank, plan.order.kv_split
    slot_tiles = plan.wave_row_tiles if plan.num_splits > 1 else 0
    work_at = plan.partials_size // HOPPER_ROWS
    fold_at = work_at + plan.work_size // HOPPER_ROWS
    batch = max(256, triton.next_power_of_2(plan.batch_size + 1))
    flags = {"WITH_LSE": with_lse, "PDL": plan.schedule.pdl}
    dependent: dict[str, Any] = {"launch_pdl": True} if plan.schedule.pdl else {}
    work = Step(
        hopper_decode_work_kernel, (min(plan.num_row_tiles, 8 * plan.num_programs), 1), _WORK,
        (*strides.out, plan.num_tokens, plan.batch_size, plan.num_heads, min(plan.max_seq_len, capacity), split, plan.num_splits, slot_tiles,
         plan.num_programs, plan.schedule.value_slices, plan.num_items, work_at),
        {"HEADS": heads, "BATCH": batch, "DECODE": plan.decode, **flags}, {"num_warps": min(8, batch // 256)})
    attend = Step(
        hopper_decode_kernel, (plan.num_programs, 1), _ATTEND,
        (strides.kv_cache[0] // strides.kv_cache[1], strides.block_table, *strides.out, plan.num_heads, split, plan.num_splits, plan.wave_rows,
         work_at, fold_at, 0),
        {"HEADS": heads, "PAGE_SIZE": plan.page_size, "SEG": segment(plan.page_size), "SLICES": plan.schedule.value_slices, **flags},
        {"num_warps": 4, **dependent}, descriptions(plan, strides))
    combine = Step(
        combine_kernel, (plan.wave_rows, 1), _COMBINE, (*strides.out, plan.num_heads, plan.num_splits, plan.wave_rows),
        {"R": R, "WIDTH": R, "AHEAD": COMBINE_AHEAD, **flags, "EMULATE_BF16": False}, {"num_warps": 4, **dependent})
    return [step for step in ((work, attend, combine) if plan.num_splits > 1 else (work, attend)) if 0 not in step.grid]


def few_step(plan: AttentionPlan, strides: Strides, row_tiles: int, sizes: tuple[int, ...], wave: tuple[int, ...], with_lse: bool) -> Step:
    """For a wave of row tiles; ``sizes`` and ``wave`` as one_pass_kernel has them."""
    from .kernels.hopper.few import WARPS, hopper_few_kernel

    page, slot = strides.kv_cache
    return Step(
        hopper_few_kernel, (row_tiles, plan.num_programs), _FEW,
        (*strides.q_nope, *strides.q_pe, page // slot, strides.block_table, *strides.out, *sizes, plan.order.kv_split, *wave),
        {"ROWS": plan.schedule.block_rows, "PAGE_SIZE": plan.page_size, "SEG": segment(plan.page_size), "DECODE": plan.decode, "WITH_LSE": with_lse,
         "MORE": plan.num_programs < plan.num_splits, "PDL": plan.schedule.pdl},
        {"num_warps": WARPS.value}, (cache_rows(plan, strides),))


def weight_tiles(plan: AttentionPlan) -> Callable[[Any], Any]:
    """From the scratch memory behind the partials, or its address, to a TMA descriptor whose boxes are the weights of a values program's rows
    and a KV tile."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.hopper.copies import SHARED

    shape = [2 * plan.wave_rows * plan.num_tiles, 64]
    return lambda base: TensorDescriptor(Address(base.data_ptr(), plan.dtype), shape, [64, 1], [plan.value_rows, 64], SHARED.value)


def two_phase_steps(
    plan: AttentionPlan, strides: Strides, row_tiles: int, sizes: tuple[int, ...], wave: tuple[int, ...], with_lse: bool
) -> list[Step]:
    """For a wave of row tiles: all scores, all weights, and the values; ``sizes`` and ``wave`` as values_kernel has them."""
    from .kernels.hopper.two_phase_scores import hopper_scores_kernel
    from .kernels.hopper.two_phase_values import hopper_values_kernel
    from .kernels.hopper.two_phase_weights import hopper_weights_kernel

    page, slot = strides.kv_cache
    block_rows, rows, split = plan.schedule.block_rows, plan.value_rows, plan.order.kv_split
    blocks = (plan.wave_row_tiles * plan.num_tiles, plan.num_tiles)
    paging = {"PAGE_SIZE": plan.page_size, "SEG": segment(plan.page_size), "DECODE": plan.decode}
    ends = {"WITH_LSE": with_lse, "PDL": plan.schedule.pdl}
    dependent: dict[str, Any] = {"launch_pdl": True} if plan.schedule.pdl else {}
    # At most 128 registers a thread: a multiprocessor then has room for a program of the next kernel, which waits there for this one.
    # A slot of the values' ring is as many tiles as make its products longer than the wait for it.
    tiles = 4 if rows < 64 else 2
    slots = min(5, RING_BYTES // (tiles * 64 * 2 * (64 + rows * (1 + with_lse))))
    scores = Step(
        hopper_scores_kernel, (row_tiles, plan.num_programs), _SCORES,
        (*strides.q_nope, *strides.q_pe, page // slot, strides.block_table, *sizes, wave[0], *blocks),
        {"ROWS": block_rows, **paging, "PDL": plan.schedule.pdl}, {"num_warps": 4, "maxnreg": 128}, (cache_rows(plan, strides),))
    weights = Step(
        hopper_weights_kernel, (row_tiles, plan.num_score_programs), _WEIGHTS, (*sizes, split, wave[0], *blocks),
        {"ROWS": block_rows, "STEP": plan.order.reference_step, "DECODE": plan.decode, **ends}, {"num_warps": 4, **dependent})
    values = Step(
        hopper_values_kernel, (row_tiles * (block_rows // rows) * VALUE_SLICES, plan.num_splits), _VALUES,
        (page // slot, strides.block_table, *strides.out, *sizes, split, *wave, *blocks),
        {"BLOCK_ROWS": block_rows, "ROWS": rows, "TILES": tiles, "SLOTS": slots, "SPLIT_TILES": max(32, triton.next_power_of_2(split // 64)), **paging,
         **ends},
        {"num_warps": 4, "maxnreg": 128, **dependent}, (weight_tiles(plan), cache_rows(plan, strides)))
    return [scores, weights, values]


@lru_cache(maxsize=1024)
def _inner_launcher(compiled: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    launcher = compiled.run
    inner = inspect.getclosurevars(launcher.launch).nonlocals
    return inner["launcher"], inner["tensordesc_meta"], (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)


class Encoded:
    """A compiled kernel's launcher, whose first arguments are addresses in place of TMA descriptors; each is encoded once.

    Triton's own launcher encodes them at every call. Its inner one, which takes them encoded, is a free variable of it (triton 3.6).
    """

    def __init__(self, compiled: Any, describe: tuple[Callable[[Any], Any], ...], dtype: torch.dtype, max_maps: int = MAX_MAPS) -> None:
        self._launch, self._metas, self._options = _inner_launcher(compiled)
        self._describe, self._dtype, self._max_maps = describe, dtype, max_maps
        self._maps: tuple[dict[int, list[Any]], ...] = tuple({} for _ in describe)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        metadata, arguments = rest[:4], rest[4:]
        encoded: list[Any] = []
        for i, maps in enumerate(self._maps):
            encoded += maps.get(arguments[i]) or self._encode(i, arguments[i])
        self._launch(x, y, z, stream, function, *self._options, *metadata, *encoded, *arguments[len(self._maps) :])

    def _encode(self, i: int, address: int) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        maps = self._maps[i]
        if len(maps) >= self._max_maps:
            maps.clear()
        encoded: list[Any] = make_tensordesc_arg(self._describe[i](Address(address, self._dtype)), self._metas[i])
        maps[address] = encoded  # another thread may clear it at any time
        return encoded
