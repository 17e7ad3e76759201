"""Every schedule of the tables, compiled for its GPU without one: it fits, holds no atomics, and uses the matrix instruction meant for it."""

from __future__ import annotations

import re
from dataclasses import fields

import aot
import pytest
import torch
from uniform_registers import read_before_written

from triton_mla.launch import INTERPRETED
from triton_mla.tuning import ARCHITECTURES, Schedule

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing can be compiled; run with TRITON_INTERPRET=0"),
]

# The two ways to a page id: from registers where a page holds whole tiles, else by a load in the loop.
PAGE_SIZES = (64, 16)
ATOMIC = {"sm": re.compile(r"\b(?:atom|red)\."), "gfx": re.compile(r"atomic")}
PRODUCTS = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mfma": "v_mfma"}
# Stores and loads of spilled registers in the loop over the tiles, at most: of decode, and on sm_90 of extend, as measured with triton 3.6.
SPILLS = {
    ("sm_80", "rows16"): (0,),
    ("sm_80", "rows64"): (0,),
    ("sm_86", "rows16"): (0,),
    ("sm_89", "rows16"): (0,),
    ("sm_90", "rows16"): (0, 0),
    ("sm_90", "full16"): (18, 0),
    ("sm_90", "rows64"): (18, 49),
    ("sm_100", "rows16"): (18,),
    ("sm_120", "rows16"): (0,),
}
# Architectures for kernels that are the same for all: the oldest, those of their own matrix instructions, and the one of AMD.
FEW_ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Those with the least shared memory.
SMALLEST = ("sm_86", "gfx942")


def schedules(arch: str) -> dict[str, Schedule]:
    """The portable schedules of a table by the name of their field."""
    table = ARCHITECTURES[arch]
    return {f.name: value for f in fields(table) if isinstance(value := getattr(table, f.name), Schedule) and value.form != "hopper"}


# sm_90 takes everything; of the others each takes a decode, and in fp32, whose schedule is the same for all, those where it fits least.
CASES = [
    pytest.param(arch, name, decode, page_size, id=f"{arch}-{name}-{'decode' if decode else 'extend'}-{page_size}")
    for arch in ARCHITECTURES
    if arch != "interpreter"
    for name in schedules(arch)
    for decode in (True, False)
    for page_size in PAGE_SIZES
    if arch == "sm_90" or (decode and page_size == PAGE_SIZES[0] and (name != "fp32" or arch in SMALLEST))
]


def expected_products(arch: str, dtype: torch.dtype, schedule: Schedule) -> set[str]:
    """fp32 goes to the matrix unit only where it multiplies fp32 exactly."""
    if arch.startswith("gfx"):
        return {"mfma"}
    if dtype == torch.float32:
        return set()
    return {"wgmma"} if arch == "sm_90" and schedule.block_rows >= 64 else {"mma"}


def check_fits(arch: str, launch: aot.Launch, compiled: object) -> str:
    """The assembly, after what holds for every kernel."""
    text = aot.assembly(compiled)
    shared, limit = compiled.metadata.shared, ARCHITECTURES[arch].shared_memory  # type: ignore[attr-defined]
    assert shared <= limit, f"{launch.kernel.__name__} needs {shared} bytes of shared memory, {arch} has {limit}"
    assert not (found := ATOMIC["gfx" if arch.startswith("gfx") else "sm"].findall(text)), f"{launch.kernel.__name__} on {arch}: {found}"
    if arch in ("sm_80", "sm_86", "sm_89", "sm_90"):  # later machine code names its uniform registers' users differently
        assert not (faults := read_before_written(aot.machine_code(compiled))), f"{launch.kernel.__name__} on {arch}: {faults}"
    return text


@pytest.mark.parametrize(("arch", "name", "decode", "page_size"), CASES)
def test_schedule(arch: str, name: str, decode: bool, page_size: int) -> None:
    schedule = schedules(arch)[name]
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    for launch in aot.attention(schedule, decode, page_size):
        text = check_fits(arch, launch, launch.compile(arch, dtype))
        used = {kind for kind, instruction in PRODUCTS.items() if instruction in text}
        assert used == expected_products(arch, dtype, schedule), f"{launch.kernel.__name__} on {arch}"


@pytest.mark.parametrize("arch", FEW_ARCHS)
def test_other_kernels(arch: str) -> None:
    for launch in aot.others(ARCHITECTURES[arch].few.pdl):
        check_fits(arch, launch, launch.compile(arch, torch.bfloat16))


@pytest.mark.parametrize(("arch", "name", "op"), [(*key, op) for key, most in SPILLS.items() for op, _ in zip(("decode", "extend"), most, strict=False)])
def test_spills_in_the_loop(arch: str, name: str, op: str) -> None:
    schedule = schedules(arch)[name]
    (launch,) = aot.attention(schedule, op == "decode", PAGE_SIZES[0])
    product = "HGMMA" if arch == "sm_90" and schedule.block_rows >= 64 else "HMMA"
    products, spills = aot.loop_spills(launch.compile(arch, torch.bfloat16), product)
    # Q.K^T, P.V and two row sums, all in this loop: a wrong loop would hold fewer
    assert products >= 64
    assert spills <= SPILLS[arch, name][op == "extend"]


def test_every_one_pass_schedule_of_a_cuda_gpu_is_looked_at_for_spills() -> None:
    one_pass = {(arch, name) for arch in ARCHITECTURES if arch.startswith("sm_") for name, s in schedules(arch).items() if s.form == "one_pass"}
    assert one_pass == SPILLS.keys()
