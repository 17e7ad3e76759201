"""The companion operations along rows, compiled for GPUs without one: they fit, hold no atomics and spill nothing."""

from __future__ import annotations

import re
from typing import Any

import aot
import pytest
import torch
import triton
from test_aot import check_fits
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_mla import companion
from triton_mla.companion import rotary, routing, rows
from triton_mla.launch import INTERPRETED

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing can be compiled; run with TRITON_INTERPRET=0"),
]

POINTERS = {**aot.POINTERS, torch.int32: "*i32"}
X, WIDE = torch.zeros(300, 7168, dtype=torch.bfloat16), torch.zeros(300, 16, 64, dtype=torch.bfloat16)
LOGITS, FEW = torch.zeros(80, 129280, dtype=torch.bfloat16), torch.zeros(4, 129280, dtype=torch.bfloat16)
CALLS = {
    "rms_norm": lambda: companion.rms_norm(X, X[0], residual=X),
    "softmax": lambda: companion.softmax(X),
    "log_softmax": lambda: companion.log_softmax(LOGITS, dtype=torch.float32),
    "log_softmax of few rows": lambda: companion.log_softmax(FEW),
    "mean": lambda: companion.mean(X, -1),
    "silu_and_mul": lambda: companion.silu_and_mul(X),
    "rotary_embedding": lambda: companion.rotary_embedding(WIDE, WIDE[:, 0, :32], WIDE[:, 0, :32], interleaved=True),
    "route_tokens": lambda: companion.route_tokens(X[:, :256], top_k=8, num_groups=8, top_groups=4, correction_bias=X[0, :256].float()),
}


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", CALLS)
def test_compiles(monkeypatch: pytest.MonkeyPatch, name: str, arch: str) -> None:
    launches = []

    def start(kernel: Any, _grid: Any, tensors: Any, numbers: Any, constants: dict[str, Any], num_warps: int) -> None:
        signature = dict.fromkeys(kernel.arg_names, "constexpr")
        attributes = {}
        for i, value in enumerate((*tensors, *numbers)):
            kind = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"
            signature[kernel.arg_names[i]] = kind
            if kind != "fp32" and (isinstance(value, torch.Tensor) or (value % 16 == 0 and kernel.arg_names[i] not in kernel.do_not_specialize)):
                attributes[(i,)] = [["tt.divisibility", 16]]
        target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": False})
        launches.append(check_fits(arch, aot.Launch(kernel, constants, {}), compiled))

    for module in (rows, rotary, routing):
        monkeypatch.setattr(module, "start", start)
    monkeypatch.setattr(rows.checks, "runnable", lambda *_: None)
    CALLS[name]()
    assert launches
    for text in launches:
        assert not re.search(r"\.local\.|scratch_store", text), "registers are spilled"
