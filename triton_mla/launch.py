"""From a plan to kernel launches, and launching without paying Triton's argument binder at every call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from .kernels.one_pass import one_pass_kernel
from .kernels.partials import combine_kernel
from .kernels.two_phase import scores_kernel, values_kernel
from .plan import AttentionPlan

INTERPRETED = not isinstance(one_pass_kernel, triton.runtime.JITFunction)
LOG2E = 1.4426950408889634
COMBINE_WIDTH = 128
COMBINE_AHEAD = 2 if INTERPRETED else 8  # the interpreter computes the idle ones too

_compiled: dict[tuple[Any, ...], Any] = {}
_thread = threading.local()


class Launch(NamedTuple):
    """One launch as it was made: see `launch`."""

    compiled: Any
    grid: tuple[int, int]
    args: tuple[Any, ...]
    constants: dict[str, Any]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches that this thread makes within, as they are made."""
    launches: list[Launch] = []
    before, _thread.launches = getattr(_thread, "launches", None), launches
    try:
        yield launches
    finally:
        _thread.launches = before


def launch(kernel: Any, key: tuple[Any, ...], grid: tuple[int, int], args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]) -> Any:
    """Run ``kernel`` on the current device and stream; returns the compiled kernel, or None under the interpreter or for an empty grid.

    ``key`` names all that the compiled code depends on. Triton's own cache look-up costs more than a small decode; with the compiled
    kernel in hand, only its C launcher is left. A profiler's launch hook takes the ordinary way.

    Raises:
        ValueError: the device has not the shared memory or registers that the caller's schedule needs.
    """
    if 0 in grid:
        return None
    if INTERPRETED:
        kernel[grid](*args, **constants)
        return None
    device = driver.active.get_current_device()
    key = (id(kernel), device, key)
    compiled = _compiled.get(key)
    if compiled is None or hooked():
        try:
            compiled = kernel[grid](*args, **constants, **options, enable_fp_fusion=False)
        except OutOfResources as error:
            raise ValueError(f"schedule of {kernel.__name__} with {options} and {constants} must fit the device: {error}") from error
        if not hooked():  # a profiler may have had it compiled with instruments
            _compiled[key] = compiled
    else:
        stream = driver.active.get_current_stream(device)
        compiled.run(grid[0], grid[1], 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants.values())
    launches = getattr(_thread, "launches", None)
    if launches is not None:
        launches.append(Launch(compiled, grid, args, constants))
    return compiled


def hooked() -> bool:
    """Whether a profiler wants to see each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))


class Step(NamedTuple):
    """One launch of a call. ``pick`` takes the kernel's own out of the call's arguments, in the order of `Arguments`; the first of them are
    given to the kernel as what ``describe`` makes of them."""

    kernel: Any
    grid: tuple[int, int]
    pick: itemgetter[Any]
    integers: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    describe: tuple[Callable[[Any], Any], ...] = ()

    def arguments(self, args: Arguments) -> tuple[Any, ...]:
        """Of the kernel, but for the constants. ``args`` are tensors."""
        picked = self.pick(args)
        described = [describe(tensor) for describe, tensor in zip(self.describe, picked, strict=False)]
        return (*described, *picked[len(described) :], *self.integers)


class Arguments(NamedTuple):
    """What changes from call to call: tensors, or their addresses, and the scale."""

    q_nope: Any
    q_pe: Any
    kv_cache: Any
    block_table: Any
    cu_seqlens_q: Any
    seq_lens: Any
    out: Any
    lse: Any
    partials: Any
    scores: Any
    scale_log2: float


def pick(*names: str) -> itemgetter[Any]:
    return itemgetter(*(Arguments._fields.index(name) for name in names))


_ONE_PASS = pick("q_nope", "q_pe", "kv_cache", "block_table", "cu_seqlens_q", "seq_lens", "out", "lse", "partials", "scale_log2")
_SCORES = pick("q_nope", "q_pe", "kv_cache", "block_table", "cu_seqlens_q", "seq_lens", "scores")
_VALUES = pick("kv_cache", "block_table", "cu_seqlens_q", "seq_lens", "scores", "out", "lse", "partials", "scale_log2")
_COMBINE = pick("out", "lse", "partials")


class Strides(NamedTuple):
    """Element strides of a call's tensors: token and head of the queries, page and slot of the cache, row of the table, token and head of out."""

    q_nope: tuple[int, ...]
    q_pe: tuple[int, ...]
    kv_cache: tuple[int, ...]
    block_table: int
    out: tuple[int, ...]


def attention_steps(plan: AttentionPlan, strides: Strides, capacity: int, with_lse: bool) -> list[Step]:
    """All launches of a call: for each wave one pass or two phases, then the combine if a row can have partials.

    ``capacity``: tokens of a request that the block table has room for.
    """
    if plan.schedule.form == "hopper":
        from . import hopper_decode

        return hopper_decode.steps(plan, strides, capacity, with_lse)
    schedule, order = plan.schedule, plan.order
    R, P = plan.kv_lora_rank, plan.qk_rope_head_dim
    sizes = (plan.num_tokens, plan.batch_size, plan.num_heads, min(plan.max_seq_len, capacity))
    split_tiles = triton.next_power_of_2(order.kv_split // order.block_n)
    tiling = {"ROWS": schedule.block_rows, "BLOCK_N": order.block_n}
    flags = {"PRECISION": order.input_precision, "DECODE": plan.decode, "PAGE_SIZE": plan.page_size}
    pdl = schedule.pdl and not INTERPRETED
    ends = {"PDL": pdl, "EMULATE_BF16": INTERPRETED and plan.dtype == torch.bfloat16}
    block_p = {"P": P, "BLOCK_P": triton.next_power_of_2(max(P, 16))}
    first: dict[str, Any] = {"num_warps": schedule.num_warps}
    dependent: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    slices = -(-R // schedule.block_v)
    width = min(COMBINE_WIDTH, triton.next_power_of_2(R))
    steps = []
    for first_row_tile in range(0, plan.num_row_tiles, plan.wave_row_tiles):
        row_tiles = min(plan.wave_row_tiles, plan.num_row_tiles - first_row_tile)
        wave = (first_row_tile, plan.num_splits, plan.wave_rows)
        if schedule.form == "hopper_few":
            from . import hopper_decode

            steps.append(hopper_decode.few_step(plan, strides, row_tiles, sizes, wave, with_lse))
        elif schedule.form == "hopper_two_phase":
            from . import hopper_decode

            steps += hopper_decode.two_phase_steps(plan, strides, row_tiles, sizes, wave, with_lse)
        elif schedule.form == "one_pass":
            steps.append(Step(
                one_pass_kernel, (row_tiles, plan.num_splits), _ONE_PASS,
                (*strides.q_nope, *strides.q_pe, *strides.kv_cache, strides.block_table, *strides.out, *sizes, order.kv_split, *wave),
                {**tiling, "SPLIT_TILES": split_tiles, "R": R, "BLOCK_R": triton.next_power_of_2(R), **block_p, "STEP": order.reference_step,
                 **flags, "STAGES": schedule.num_stages, "WITH_LSE": with_lse, **ends}, first))
        else:
            steps.append(Step(
                scores_kernel, (row_tiles, plan.num_score_programs), _SCORES,
                (*strides.q_nope, *strides.q_pe, *strides.kv_cache, strides.block_table, *sizes, first_row_tile, plan.num_tiles),
                {**tiling, "R": R, "BLOCK_K": min(schedule.block_k, triton.next_power_of_2(R)), **block_p, **flags, **ends},
                {"num_warps": schedule.score_warps}))
            steps.append(Step(
                values_kernel, (row_tiles * slices, plan.num_splits), _VALUES,
                (*strides.kv_cache, strides.block_table, *strides.out, *sizes, order.kv_split, *wave, plan.num_tiles),
                {**tiling, "SPLIT_TILES": split_tiles, "R": R, "BLOCK_V": schedule.block_v, "STEP": order.reference_step, **flags,
                 "STAGES": schedule.num_stages, "WITH_LSE": with_lse, **ends}, {**first, **dependent}))
        if plan.num_splits > 1:
            steps.append(Step(
                combine_kernel, (row_tiles * schedule.block_rows, -(-R // width)), _COMBINE,
                (*strides.out, plan.num_heads, plan.num_splits, plan.wave_rows),
                {"R": R, "WIDTH": width, "AHEAD": COMBINE_AHEAD, "WITH_LSE": with_lse, **ends}, {"num_warps": 1, **dependent}))
    return [step for step in steps if 0 not in step.grid]


class PreparedAttention:
    """The launches of every call with this plan and these strides. Once run with aligned tensors, it needs only their addresses."""

    def __init__(self, plan: AttentionPlan, strides: Strides, capacity: int, with_lse: bool) -> None:
        self.plan = plan
        self._steps = attention_steps(plan, strides, capacity, with_lse)
        self._unaligned = PreparedAttention(plan.portable(), strides, capacity, with_lse) if plan.schedule.form.startswith("hopper") else self
        self._key = (with_lse, plan.dtype, plan.schedule, plan.order, plan.kv_lora_rank, plan.qk_rope_head_dim, plan.decode, plan.page_size,
                     strides.q_nope, strides.q_pe, strides.kv_cache, strides.out)
        self._ready: list[tuple[Any, ...]] = []

    def run(self, args: Arguments) -> None:
        """Launch for tensors: partials, scores and lse fp32, the first two aligned to 16. Nothing is stored in lse without ``with_lse``."""
        aligned = tuple(t.data_ptr() % 16 for t in (args.q_nope, args.q_pe, args.kv_cache, args.out, args.partials))
        if any(aligned) and self._unaligned is not self:
            self._unaligned.run(args)  # TMA wants alignment
            return
        compiled = [launch(s.kernel, (*self._key, aligned, *s.constants.values()), s.grid, s.arguments(args), s.constants, s.options) for s in self._steps]
        if not (INTERPRETED or any(aligned) or hooked()):
            self._ready = [
                (self._launcher(s, c), s.grid[0], s.grid[1], c.function, c.packed_metadata, s.pick, (*s.integers, *s.constants.values()))
                for s, c in zip(self._steps, compiled, strict=True)
            ]

    def _launcher(self, step: Step, compiled: Any) -> Any:
        if not step.describe:
            return compiled.run
        from .hopper_decode import Encoded

        return Encoded(compiled, step.describe, self.plan.dtype)

    def run_ready(self, args: tuple[Any, ...], device: int) -> bool:
        """Launch for addresses on the current device, in the order of `Arguments`, all but those of integers divisible by 16; False if `run` must
        do it."""
        if not self._ready or hooked():
            return False
        stream = driver.active.get_current_stream(device)
        for run, x, y, function, metadata, pick, rest in self._ready:
            run(x, y, 1, stream, function, metadata, None, None, None, *pick(args), *rest)
        return True
