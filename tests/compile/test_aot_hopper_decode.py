"""The Hopper decode, compiled for sm_90 without one: it fits, uses the tensor cores and TMA, and spills nothing that a tensor core waits for.
The forms for few work items too."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import aot
import pytest
import torch
from test_aot_hopper import NoGpu
from triton.runtime import driver
from uniform_registers import read_before_written

from triton_mla import hopper_decode
from triton_mla.kernels.hopper import available
from triton_mla.launch import INTERPRETED, Arguments, Strides, attention_steps
from triton_mla.plan import AttentionPlan, plan_attention
from triton_mla.tuning import ARCHITECTURES, DEFAULT_ORDER, ReductionOrder, Schedule

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing can be compiled; run with TRITON_INTERPRET=0"),
    pytest.mark.skipif(not available(), reason="written for the Gluon of triton 3.6"),
]

HOPPER = ARCHITECTURES["sm_90"].hopper.many
# Spilled registers of a warpgroup in the loop over pairs of KV tiles, stores and loads: (without lse, with it). Scalars and addresses, for the
# most part used when a split is stored.
SPILLS = (32, 48)
SLICED_SPILLS = 20  # a warpgroup then has half the accumulators, or a quarter
FEW = Schedule("hopper_few", 16, num_warps=8, pdl=True)
TWO_PHASE = {rows: Schedule("hopper_two_phase", rows, num_warps=8, num_stages=2, pdl=True) for rows in (16, 32, 64)}


def plan_of(num_heads: int = 128, page_size: int = 64, dtype: torch.dtype = torch.bfloat16, decode: bool = True, **options: Any) -> AttentionPlan:
    facts = {"num_tokens": 16, "batch_size": 16, "max_seq_len": 8192, "schedule": HOPPER, **options}
    return plan_attention(num_heads=num_heads, page_size=page_size, dtype=dtype, decode=decode, **facts)


def strides_of(plan: AttentionPlan) -> Strides:
    H = plan.num_heads
    return Strides((H * 576, 576), (H * 576, 576), (plan.page_size * 576, 576), 128, (H * 512, 512))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that compiles what a plan launches: list of work where there is one, attention, combine."""

    def compile_steps(plan: AttentionPlan, with_lse: bool) -> list[Any]:
        kernels = []
        T, H = plan.num_tokens, plan.num_heads
        q = torch.zeros(T, H, 576, dtype=plan.dtype)
        ints, floats = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
        out, cache = torch.zeros(T, H, 512, dtype=plan.dtype), torch.zeros(2, plan.page_size, 576, dtype=plan.dtype)
        args = Arguments(q[..., :512], q[..., 512:], cache, ints, ints, ints, out, floats, floats, floats, 0.1)
        for step in attention_steps(plan, strides_of(plan), plan.max_seq_len, with_lse):
            assert list(step.constants) == step.kernel.arg_names[-len(step.constants) :]  # as a launch from addresses gives them
            options = {k: v for k, v in step.options.items() if k != "launch_pdl"}
            kernels.append(step.kernel.warmup(*step.arguments(args), grid=(1,), **step.constants, **options, enable_fp_fusion=False))
            step.kernel.device_caches.clear()
        return kernels

    monkeypatch.setattr(driver, "_active", NoGpu())
    return compile_steps


@pytest.mark.parametrize("num_heads, page_size, dtype, with_lse, slices", [
    (128, 64, torch.bfloat16, False, 1), (128, 64, torch.bfloat16, True, 1), (16, 16, torch.float16, False, 1), (64, 480, torch.float16, True, 1),
    (128, 64, torch.bfloat16, True, 2), (16, 16, torch.float16, False, 2),
])
def test_attention(compiled: Any, num_heads: int, page_size: int, dtype: torch.dtype, with_lse: bool, slices: int) -> None:
    schedule = replace(HOPPER, value_slices=slices)
    work, kernel, combine = compiled(plan_of(num_heads, page_size, dtype, decode=num_heads > 64, schedule=schedule), with_lse)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= ARCHITECTURES["sm_90"].shared_memory
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    # one atomic, which counts the items that programs have taken
    assert [re.findall(r"\b(?:atom|red)\.\S+", k.asm["ptx"]) for k in (work, kernel, combine)] == [[], ["atom.global.gpu.relaxed.add.u32"], []]
    code = aot.machine_code(kernel)
    assert not read_before_written(code)
    # of a pair of tiles: 36 products for one tile's scores and 4 with the values of each, of warpgroup 1 also 4 row sums of each; with lse those of rests
    loops = {n: min((body for body in aot.loops(kernel) if body.count("HGMMA") == n), key=len) for n in ((48, 56) if with_lse else (44, 52))}
    for body in loops.values():
        assert len(re.findall(r"\b(?:STL|LDL)\b", body)) <= (SPILLS[with_lse] if slices == 1 else SLICED_SPILLS)
        assert not _spills_between_products(body)


def _spills_between_products(body: str) -> list[str]:
    """Spill instructions between products that ptxas has not split into several waits: it would have run out of registers for operands."""
    lines = [line for line in body.splitlines() if re.search(r"\b(?:HGMMA|STL|LDL|BRA|SYNCS|BAR)\b", line)]
    return [b for a, b, c in zip(lines, lines[1:], lines[2:], strict=False) if "HGMMA" in a and "HGMMA" in c and re.search(r"\bSTL\b", b)]


@pytest.mark.parametrize("longest", [8192, 131072])
@pytest.mark.parametrize("num_heads, page_size, dtype, decode, with_lse, spills", [
    (128, 64, torch.bfloat16, True, False, 0), (128, 64, torch.bfloat16, True, True, 7), (16, 16, torch.float16, False, False, 3),
    (100, 48, torch.bfloat16, False, True, 20),
])
def test_few_items(
    compiled: Any, num_heads: int, page_size: int, dtype: torch.dtype, decode: bool, with_lse: bool, spills: int, longest: int
) -> None:
    """``spills``: stores and loads of spilled registers in the loop over KV tiles, at most. With ``longest`` programs have several splits."""
    plan = plan_of(num_heads, page_size, dtype, decode, schedule=FEW, max_seq_len=longest)
    assert (plan.num_programs < plan.num_splits) == (longest > 8192)
    kernel, combine = compiled(plan, with_lse)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= ARCHITECTURES["sm_90"].shared_memory
    assert "mma.sync.aligned.m16n8k16" in ptx and "cp.async.bulk.tensor" in ptx
    assert not re.search(r"\b(?:atom|red)\.", ptx + combine.asm["ptx"])
    assert not read_before_written(aot.machine_code(kernel))
    loop = min((body for body in aot.loops(kernel) if "HMMA" in body), key=len)
    # of 64 tokens: 36 products for the scores, 32 with the values, 4 for the row sums; with lse those of rests
    assert loop.count("HMMA") == 72 + 4 * with_lse
    assert len(re.findall(r"\b(?:STL|LDL)\b", loop)) <= spills
    assert loop.count("BAR.SYNC") <= 4


@pytest.mark.parametrize("rows, value_rows, num_heads, page_size, dtype, decode, with_lse, kv_split", [
    (16, 16, 16, 64, torch.bfloat16, True, False, 2048), (32, 16, 64, 128, torch.float16, True, True, 64),
    (64, 64, 128, 64, torch.bfloat16, True, False, 2048), (64, 32, 128, 64, torch.bfloat16, True, False, 2048),
    (16, 16, 16, 16, torch.float16, False, True, 192), (32, 32, 100, 48, torch.bfloat16, False, False, 2048),
    (64, 64, 128, 480, torch.float16, False, True, 65536),
])
def test_two_phases(
    compiled: Any, rows: int, value_rows: int, num_heads: int, page_size: int, dtype: torch.dtype, decode: bool, with_lse: bool, kv_split: int
) -> None:
    plan = plan_of(num_heads, page_size, dtype, decode, schedule=TWO_PHASE[rows], order=ReductionOrder(kv_split=kv_split), max_seq_len=2 * kv_split,
                   num_tokens=2, batch_size=2)
    kernels = compiled(replace(plan, value_rows=value_rows), with_lse)
    scores, weights, values, combine = kernels
    for kernel in kernels:
        assert kernel.metadata.shared <= ARCHITECTURES["sm_90"].shared_memory
        assert not re.search(r"\b(?:atom|red)\.", kernel.asm["ptx"])
        code = aot.machine_code(kernel)
        assert not read_before_written(code)
        assert not re.search(r"\b(?:STL|LDL)\b", code)
    for kernel in (scores, values):  # whose multiprocessors have room for a program of the next kernel
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"] and ".maxnreg 128" in kernel.asm["ptx"]
    assert weights.asm["ptx"].count("griddepcontrol.wait") == 1 and values.asm["ptx"].count("griddepcontrol.wait") == 2
    # of a KV tile: 36 products, and a wait for each part of the tile, for each of the two warpgroups
    tiles = [body for body in aot.loops(scores) if body.count("HGMMA") == 36]
    assert aot.machine_code(scores).count("HGMMA") == 72 and min(body.count("WARPGROUP.DEPBAR") for body in tiles) == 3
    # of a slot: 4 products of each tile with the values, 4 for the row sums and with lse 4 for those of rests; all in flight until the next slot's are
    products = (4 if value_rows < 64 else 2) * 4 * (2 + with_lse)
    chain = min((body for body in aot.loops(values) if "HGMMA" in body), key=len)
    assert (chain.count("HGMMA"), chain.count("WARPGROUP.DEPBAR")) == (products, 1)
    assert "gsb0, 0x0" not in chain
    assert aot.machine_code(values).count("HGMMA") == 2 * products  # and once more for slots with a rescale


@pytest.mark.parametrize("schedule", [HOPPER, replace(HOPPER, value_slices=2), FEW, *TWO_PHASE.values()],
                         ids=lambda schedule: f"{schedule.form}-{schedule.block_rows}-{schedule.value_slices}")
def test_sizes_that_it_serves(schedule: Schedule) -> None:
    plan = plan_of(schedule=schedule)
    strides = strides_of(plan)

    def serves(strides: Strides = strides, pages: int = 100, **changes: Any) -> bool:
        return hopper_decode.serves(replace(plan, **changes), strides, pages)

    assert serves()
    for page_size in (16, 48, 64, 480):
        assert serves(page_size=page_size)
    assert not serves(page_size=1)
    assert not serves(kv_lora_rank=256)
    assert not serves(qk_rope_head_dim=0)
    assert not serves(dtype=torch.float32)
    assert not serves(arch="sm_80")
    assert not serves(num_heads=4)
    assert not serves(order=ReductionOrder(block_n=32))
    assert not serves(order=ReductionOrder(reference_step=1))
    assert not serves(strides._replace(q_pe=(128 * 576, 580)))
    assert not serves(strides._replace(kv_cache=(64 * 576 + 8, 576)))
    assert not serves(pages=1 << 25)


@pytest.mark.parametrize("page_size, form", [(64, "hopper"), (1, "one_pass")])
def test_what_the_table_takes(page_size: int, form: str) -> None:
    plan = plan_attention(num_tokens=64, batch_size=64, num_heads=128, max_seq_len=8192, page_size=page_size)
    assert (plan.schedule.form, plan.schedule.block_rows) == (form, 64)
    assert plan.portable().schedule == ARCHITECTURES["sm_90"].rows64
    assert plan.workspace_bytes >= plan.portable().workspace_bytes


def test_few_items_are_planned_as_one_pass() -> None:
    """What another form serves in its place has the same waves and the same scratch memory. Its own programs are a few for each multiprocessor."""
    facts = {"num_tokens": 500, "batch_size": 20, "decode": False, "max_seq_len": 131072}
    plan, portable = plan_of(**facts, schedule=FEW), plan_of(**facts, schedule=replace(FEW, form="one_pass"))
    assert plan.portable() == portable == replace(plan, schedule=portable.schedule, num_programs=0)
    assert plan.workspace_bytes == portable.workspace_bytes
    steps, others = (attention_steps(p, strides_of(p), p.max_seq_len, True) for p in (plan, portable))
    assert [step.grid for step in steps[1::2]] == [step.grid for step in others[1::2]]
    assert [step.kernel for step in steps[1::2]] == [step.kernel for step in others[1::2]]
    assert [step.grid[0] for step in steps[::2]] == [step.grid[0] for step in others[::2]]
    assert {step.grid[1] for step in others[::2]} == {128} and {step.grid[1] for step in steps[::2]} == {plan.num_programs}
    assert 8 * 132 <= plan.wave_row_tiles * plan.num_programs < 16 * 132
    assert [step.integers[-3:] for step in steps[::2]] == [step.integers[-3:] for step in others[::2]]
    assert plan_of(num_tokens=16, batch_size=16, max_seq_len=3000, num_heads=16, schedule=FEW).num_programs == 3


@pytest.mark.parametrize("rows", TWO_PHASE)
@pytest.mark.parametrize("max_seq_len", [1, 1024, 1025, 8192, 131072])
def test_two_phases_in_waves(rows: int, max_seq_len: int) -> None:
    """Weights, what rounding took from them, scores, two references and flags lie behind the partials, for as many row tiles as there is room for."""
    plan = plan_of(num_tokens=500, batch_size=20, decode=False, max_seq_len=max_seq_len, schedule=TWO_PHASE[rows])
    steps = attention_steps(plan, strides_of(plan), max_seq_len, True)
    step = 4 if max_seq_len > DEFAULT_ORDER.kv_split else 3
    scores, weights, values = (steps[i::step] for i in range(3))
    waves = range(0, plan.num_row_tiles, plan.wave_row_tiles)
    assert [w.integers[5] for w in weights] == list(waves) and [s.integers[-3] for s in scores] == list(waves) == [v.integers[-5] for v in values]
    blocks = plan.wave_row_tiles * plan.num_tiles
    assert {s.integers[-2:] for s in (*scores, *weights, *values)} == {(blocks, plan.num_tiles)}
    assert sum(s.grid[0] for s in scores) == sum(w.grid[0] for w in weights) == plan.num_row_tiles
    assert plan.value_rows == rows and sum(v.grid[0] for v in values) == 8 * plan.num_row_tiles
    assert plan.scores_size == blocks * (2 * rows * 64 + 2 * rows + 1)
    assert 4 * (plan.partials_size + plan.scores_size) <= 1 << 30 and plan.partials_size % 4 == 0
    assert plan.portable().schedule == replace(plan.schedule, form="one_pass") and plan.workspace_bytes >= plan.portable().workspace_bytes


@pytest.mark.parametrize("max_seq_len, value_rows", [(1024, 16), (2048, 16), (2049, 32), (4096, 32), (4097, 64), (131072, 64)])
def test_rows_of_the_second_phase(max_seq_len: int, value_rows: int) -> None:
    plan = plan_of(num_tokens=1, batch_size=1, max_seq_len=max_seq_len, schedule=TWO_PHASE[64])
    assert plan.value_rows == value_rows
    scores, weights, values, *_ = attention_steps(plan, strides_of(plan), max_seq_len, False)
    assert scores.grid == (2, min(66, plan.num_tiles)) and weights.grid == (2, min(1056, plan.num_tiles))
    assert values.grid == (2 * (64 // value_rows) * 8, plan.num_splits)
    assert values.constants["BLOCK_ROWS"] == 64 and values.constants["ROWS"] == value_rows
    assert plan.portable().value_rows == 0


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("max_seq_len", [1, 1024, 1025, 8192, 131072])
def test_scratch_memory(max_seq_len: int, slices: int) -> None:
    """Partials, the list of work and the folds lie behind each other, and there are no waves."""
    plan = plan_of(num_tokens=500, batch_size=20, decode=False, max_seq_len=max_seq_len, schedule=replace(HOPPER, value_slices=slices))
    work, attend, *combine = hopper_decode.steps(plan, strides_of(plan), max_seq_len, False)
    work_at, fold_at = attend.integers[-3:-1]
    assert work.integers[-1] == work_at == plan.partials_size // 64
    assert (fold_at - work_at) * 64 >= 8 * (1 + work.integers[-2])
    assert fold_at * 64 + plan.num_programs * (64 * 512 + 2 * 3 * 64) == plan.partials_size + plan.scores_size <= plan.workspace_bytes // 4
    assert 4 * plan.partials_size <= 2 << 30
    assert len(combine) == (max_seq_len > DEFAULT_ORDER.kv_split)
    assert (work.integers[-3], attend.constants["SLICES"]) == (slices, slices)


def test_slices_are_planned_as_more_programs() -> None:
    """Each slice of an item is a program's; the list of work and what portable calls do are those of one slice."""
    sliced = replace(HOPPER, value_slices=2)
    for tokens, programs in ((1, 16), (4, 64), (64, 132)):
        one, plan = (plan_of(num_tokens=tokens, batch_size=tokens, schedule=schedule) for schedule in (HOPPER, sliced))
        assert (one.num_programs, plan.num_programs) == (min(132, programs), min(132, 2 * programs))
        assert (plan.num_row_tiles, plan.num_splits) == (one.num_row_tiles, one.num_splits) == (2 * tokens, 8)
        assert plan.portable().schedule == one.portable().schedule
        assert plan.wave_row_tiles == min(2 * tokens, -(-8 * 132 // (9 * 2)))
        assert plan.workspace_bytes >= plan.portable().workspace_bytes


def test_descriptors_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From addresses, and with all that Triton's own launcher passes on."""
    from triton.backends.nvidia import driver as nvidia

    calls, encoded = [], []

    def launcher(*args: Any) -> None:
        calls.append(args)

    def encode(descriptor: Any, meta: Any) -> list[Any]:
        encoded.append((descriptor.base.data_ptr(), meta))
        return [f"map {descriptor.base.data_ptr()}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", encode)
    plan = plan_of()
    describe = hopper_decode.descriptions(plan, strides_of(plan))
    run = type("Launcher", (), {"launch_cooperative_grid": 0, "launch_pdl": 1})()
    run.launch = nvidia.wrap_handle_tensordesc(launcher, {0: "tensordesc<a>", 1: "tensordesc<b>", 2: "tensordesc<c>", 3: "i32"}, ["a", "b", "c"])
    ours = hopper_decode.Encoded(type("Compiled", (), {"run": run})(), describe, plan.dtype)
    descriptors = [d(hopper_decode.Address(a, plan.dtype)) for d, a in zip(describe, (16, 32, 48), strict=True)]
    run.launch(1, 2, 3, 4, 5, 0, 1, None, None, 6, None, None, None, *descriptors, 7)
    for _ in range(2):
        ours(1, 2, 3, 4, 5, 6, None, None, None, 16, 32, 48, 7)
    assert calls[0] == calls[1] == calls[2]
    assert encoded == 2 * [(16, "a"), (32, "b"), (48, "c")]
