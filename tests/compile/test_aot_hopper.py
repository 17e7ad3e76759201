"""The Hopper prefill, compiled for sm_90 without one: it fits, uses the tensor cores and TMA, and spills nothing in the loop over tiles."""

from __future__ import annotations

import re
from typing import Any

import aot
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from uniform_registers import read_before_written

from triton_mla import hopper_prefill
from triton_mla.launch import INTERPRETED
from triton_mla.prefill_launch import PrefillState
from triton_mla.tuning import ARCHITECTURES, PrefillSchedule

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing can be compiled; run with TRITON_INTERPRET=0"),
    pytest.mark.skipif(not hopper_prefill.available(), reason="written for the Gluon of triton 3.6"),
]


class NoGpu:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that compiles one of what `hopper_prefill.attend` launches: the list of work, or the attention."""
    launches = []

    def launch(kernel: Any, _key: Any, _grid: Any, args: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        launches.append((kernel, args, {**constants, **options}))

    def attend(which: str, dtype: torch.dtype, **options: Any) -> Any:
        launches.clear()
        kv, pe = torch.zeros(256, 16, 256, dtype=dtype), torch.zeros(256, 64, dtype=dtype)
        starts = torch.tensor([0, 256], dtype=torch.int32)
        state = PrefillState(torch.zeros(256, 16), torch.zeros(256, 16, 8), torch.zeros(256, 16, 128), hopper_prefill.ORDER)
        lse = torch.zeros(256, 16) if options.pop("with_lse", True) else None
        usual = {"resume": False, "keep": False, "causal": True, "kv_limit": 256, "mean_keys": 256, "requests": (0, 0), "chunk": None}
        hopper_prefill.attend(
            torch.zeros(256, 16, 192, dtype=dtype), kv[..., :128], pe, kv[..., 128:], torch.zeros(256, 16, 128, dtype=dtype), lse, state, starts, starts, None,
            0.1, PrefillSchedule(), **{**usual, **options})
        kernel, args, constants = launches[("work", "attention").index(which)]
        compiled = kernel.warmup(*args, grid=(1,), **constants, enable_fp_fusion=False)
        kernel.device_caches.clear()
        return compiled

    monkeypatch.setattr(hopper_prefill, "launch", launch)
    monkeypatch.setattr(hopper_prefill, "device_facts", lambda _device: ("sm_90", 132))
    monkeypatch.setattr(driver, "_active", NoGpu())
    return attend


# Any two of the flags in each of their four ways, and fp16.
@pytest.mark.parametrize("dtype, resume, keep, with_lse", [
    (torch.bfloat16, False, False, False), (torch.bfloat16, False, True, True), (torch.bfloat16, True, False, True), (torch.bfloat16, True, True, False),
    (torch.float16, False, False, True),
])
def test_attention(compiled: Any, dtype: torch.dtype, resume: bool, keep: bool, with_lse: bool) -> None:
    kernel = compiled("attention", dtype, resume=resume, keep=keep, with_lse=with_lse)
    ptx = kernel.asm["ptx"]
    assert kernel.metadata.shared <= ARCHITECTURES["sm_90"].shared_memory
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    # one atomic, which counts the items that programs have taken; the compiler may take its loop apart
    assert set(re.findall(r"\b(?:atom|red)\.\S+", ptx)) == {"atom.global.gpu.relaxed.add.u32"}
    assert not read_before_written(aot.machine_code(kernel))
    # a tile's 12 products with K and 8 with V, and the border between blocks: one such loop for each warpgroup
    loops = [body for body in aot.loops(kernel) if body.count("HGMMA") == 20 and "NANOSLEEP" in body]
    assert len(loops) == 2
    assert not re.findall(r"\b(?:STL|LDL)\b", "".join(loops))


def test_the_turn_has_barriers_of_its_own(compiled: Any) -> None:
    """Named barriers 8 and 9 pass the turn; the compiler's own stay below."""
    kernel = compiled("attention", torch.bfloat16, with_lse=False)
    used = {int(n): int(threads or 0) for n, threads in re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\s+(\d+)(?:, (\d+))?;", kernel.asm["ptx"])}
    assert {n: threads for n, threads in used.items() if n >= 8} == {8: 256, 9: 256}
    assert all(n < 8 for n, threads in used.items() if threads != 256)


@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": False, "resume": True, "keep": True}, {"chunk": (256, 256), "requests": (0, 2), "resume": True, "keep": True},
])
def test_list_of_work(compiled: Any, options: dict[str, Any]) -> None:
    work = compiled("work", torch.bfloat16, **options)
    assert not re.search(r"\b(?:atom|red)\.", work.asm["ptx"])


def test_arguments_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "device_facts", lambda _device: ("sm_90", 132))
    kv, pe, q = torch.zeros(9, 3, 256, dtype=torch.bfloat16), torch.zeros(9, 64, dtype=torch.bfloat16), torch.zeros(5, 3, 192, dtype=torch.bfloat16)

    def serves(q: torch.Tensor = q, k: torch.Tensor = kv[..., :128], pe: torch.Tensor = pe, v: torch.Tensor = kv[..., 128:]) -> bool:
        return hopper_prefill.serves(q, k, pe, v, hopper_prefill.ORDER)

    assert serves()
    assert serves(pe=torch.zeros(9, 576, dtype=torch.bfloat16)[:, 512:])
    assert not serves(pe=torch.zeros(9, 68, dtype=torch.bfloat16)[:, :64])  # stride
    assert not serves(pe=pe.flatten()[4:516].view(8, 64))  # address
    assert not serves(q=q[:0])
    assert not serves(q=q[..., :128], pe=pe[:, :0])
    assert not serves(*(t.float() for t in (q, kv[..., :128], pe, kv[..., 128:])))
    monkeypatch.setattr(hopper_prefill, "device_facts", lambda _device: ("sm_80", 108))
    assert not serves()
