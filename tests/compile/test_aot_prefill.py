"""The prefill kernels, compiled for every architecture of the tables: they fit, hold no atomics, use the matrix instruction meant, and do not spill."""

from __future__ import annotations

import dataclasses
from typing import Any

import aot
import pytest
import torch
import triton
from test_aot import PRODUCTS, SMALLEST, check_fits
from uniform_registers import read_before_written

from triton_mla import prefill_launch
from triton_mla.launch import INTERPRETED
from triton_mla.plan import plan_prefill
from triton_mla.tuning import DEFAULT_PREFILL_ORDER, PREFILL_TABLES, PrefillSchedule

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing can be compiled; run with TRITON_INTERPRET=0"),
]

ARCHS = [arch for arch in PREFILL_TABLES if arch != "interpreter"]
HEADS = {"narrow": (128, 64, 128), "wide": (192, 64, 256)}
# Stores and loads of spilled registers in the loop over whole tiles, at most, as measured with triton 3.6.
SPILLS = {"narrow": 0, "wide": 8}


def launches(monkeypatch: pytest.MonkeyPatch, arch: str, dtype: torch.dtype, heads: str, max_seq_len: int = 1) -> list[aot.Launch]:
    """What a paged prefill of 128 heads launches on this architecture: of each chunk the gathering of its rows, the up-projection and the attention."""
    nope, rope, value = HEADS[heads]
    caught = []

    def launch(kernel: Any, _key: Any, _grid: Any, args: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        types = {name: f"tensordesc<bf16{list(arg.block_shape)}>" for name, arg in zip(kernel.arg_names, args, strict=False) if hasattr(arg, "block_shape")}
        caught.append(aot.Launch(kernel, constants, options, types))

    monkeypatch.setattr(prefill_launch, "launch", launch)
    monkeypatch.setattr(prefill_launch, "device_facts", lambda _device: (arch, 1))
    plan = plan_prefill(num_tokens=1, batch_size=1, num_heads=128, max_seq_len=max_seq_len, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
                        dtype=dtype, chunk_tokens=128)
    ints = torch.zeros(1, 1, dtype=torch.int32)
    prefill_launch.attend_paged(
        plan, torch.zeros(1, 128, nope + rope, dtype=dtype), torch.zeros(1, 64, 512 + rope, dtype=dtype), torch.zeros(128 * (nope + value), 512, dtype=dtype),
        ints, torch.zeros(2, dtype=torch.int32), ints[0], 1.0, torch.zeros(1, 128, value, dtype=dtype), torch.zeros(1, 128),
        torch.zeros(plan.workspace_bytes, dtype=torch.uint8), DEFAULT_PREFILL_ORDER, None, max_seq_len)
    return caught


def plain(launch: aot.Launch) -> aot.Launch:
    """The same attention over keys that are all there."""
    return aot.Launch(launch.kernel, {**launch.constants, "CHUNKED": False}, launch.options)


def products(arch: str, dtype: torch.dtype, rows: int) -> set[str]:
    if arch.startswith("gfx"):
        return {"mfma"}
    if dtype == torch.float32:
        return set()
    return {"wgmma"} if arch == "sm_90" and rows >= 64 else {"tcgen05"} if arch == "sm_100" and rows >= 64 else {"mma"}


# Wide heads where their schedule is an own one, and where there is the least shared memory; there in fp32 too, whose schedule is the same for all.
CASES = [pytest.param(arch, "narrow", torch.bfloat16, id=f"{arch}-narrow-bf16") for arch in ARCHS]
CASES += [pytest.param(arch, "wide", torch.bfloat16, id=f"{arch}-wide-bf16") for arch in ("sm_80", "sm_90", *SMALLEST)]
CASES += [pytest.param(arch, "wide", torch.float32, id=f"{arch}-wide-fp32") for arch in SMALLEST]


@pytest.mark.parametrize(("arch", "heads", "dtype"), CASES)
def test_every_architecture(monkeypatch: pytest.MonkeyPatch, arch: str, heads: str, dtype: torch.dtype) -> None:
    gathering, up_projection, attention = launches(monkeypatch, arch, dtype, heads)
    check_fits(arch, gathering, gathering.compile(arch, dtype))
    for launch, rows in ((plain(attention), attention.constants["BLOCK_M"]), (up_projection, up_projection.constants["BLOCK_S"])):
        text = check_fits(arch, launch, launch.compile(arch, dtype))
        used = {kind for kind, instruction in PRODUCTS.items() if instruction in text}
        assert used == products(arch, dtype, rows), launch.kernel.__name__


def test_an_up_projection_by_pointers_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves sizes and strides that TMA does not."""
    tables = prefill_launch.PREFILL_TABLES
    monkeypatch.setattr(prefill_launch, "PREFILL_TABLES", {**tables, "sm_90": dataclasses.replace(tables["sm_90"], product_tma=None)})
    launch = launches(monkeypatch, "sm_90", torch.bfloat16, "narrow")[1]
    assert launch.kernel.__name__ == "up_projection_kernel"
    compiled = launch.compile("sm_90", torch.bfloat16)
    check_fits("sm_90", launch, compiled)
    assert aot.loop_spills(compiled, "HGMMA")[1] == 0


def test_chunks_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk, which keeps a state, one between, and the last."""
    attention = launches(monkeypatch, "sm_90", torch.bfloat16, "narrow", max_seq_len=300)[2::3]
    assert [(a.constants["RESUME"], a.constants["KEEP"]) for a in attention] == [(False, True), (True, True), (True, False)]
    for launch in attention:
        check_fits("sm_90", launch, launch.compile("sm_90", torch.bfloat16))


@pytest.mark.parametrize("change", [{"CAUSAL": False}, {"HAS_POSITIONS": True, "KEEP": True}, {"WITH_LSE": False}], ids=str)
def test_forms_on_hopper(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    launch = plain(launches(monkeypatch, "sm_90", torch.bfloat16, "narrow")[2])
    launch.constants.update(change)
    check_fits("sm_90", launch, launch.compile("sm_90", torch.bfloat16))


@pytest.mark.parametrize("heads", SPILLS)
def test_spills_in_the_loop(monkeypatch: pytest.MonkeyPatch, heads: str) -> None:
    launch = plain(launches(monkeypatch, "sm_90", torch.bfloat16, heads)[2])
    found, spills = aot.loop_spills(launch.compile("sm_90", torch.bfloat16), "HGMMA")
    assert found >= 20  # Q.K^T of nope and rope, and P.V
    assert spills <= SPILLS[heads]


def small_heads(monkeypatch: pytest.MonkeyPatch, schedule: PrefillSchedule, **constants: Any) -> Any:
    """An attention over heads of 64 + 32 and 64 columns, compiled for sm_90."""
    caught: list[aot.Launch] = []
    monkeypatch.setattr(prefill_launch, "launch", lambda kernel, _key, _grid, _args, found, options: caught.append(aot.Launch(kernel, found, options)))
    kv, pe, starts = torch.zeros(1, 4, 128, dtype=torch.bfloat16), torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    prefill_launch.attend(kv[..., :96], kv[..., :64], pe, kv[..., 64:], kv[..., :64], torch.zeros(1, 4), None, starts, starts, None, 1.0, DEFAULT_PREFILL_ORDER,
                          schedule, resume=False, keep=False, causal=True, kv_limit=1, mean_keys=1)
    return aot.Launch(caught[0].kernel, {**caught[0].constants, **constants}, caught[0].options).compile("sm_90", torch.bfloat16)


def test_narrow_rope_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows on 8 warps, one stage: K and k_pe share an address, and would have two swizzles if k_pe had its own 32 columns."""
    schedule = PrefillSchedule(block_m=64, num_warps=8, num_stages=1)
    assert not read_before_written(aot.machine_code(small_heads(monkeypatch, schedule)))


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the fault is that of one ptxas")
def test_control_the_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = PrefillSchedule(block_m=64, num_warps=8, num_stages=1)
    faults = read_before_written(aot.machine_code(small_heads(monkeypatch, schedule, BLOCK_P=32)))
    assert faults and all("UIADD3" in fault for fault in faults)
