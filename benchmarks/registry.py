"""The registry: which implementations an op has, and which workloads a suite."""

from __future__ import annotations

from benchmarks import absorbed, absorbed_peers, gemm, prefill
from benchmarks.implementation import Implementation, Workload
from benchmarks.workloads import decode, extend, ragged, verify

OURS = Implementation("triton_mla", absorbed.ours, compiles=True)
ABSORBED = (
    OURS,
    Implementation("flashmla", absorbed_peers.flashmla, needs="flashmla"),
    Implementation("fa3_mla_auto", absorbed_peers.fa3_mla(0), needs="fa3"),
    Implementation("fa3_mla_1", absorbed_peers.fa3_mla(1), needs="fa3"),
    Implementation("flashinfer", absorbed_peers.flashinfer, needs="flashinfer"),
    Implementation("torch", absorbed.torch_gather),
)
DECODE = (
    *ABSORBED,
    Implementation("triton_mla_adaptive", absorbed.adaptive, compiles=True),
    Implementation("vllm_triton_auto", absorbed_peers.vllm_triton(automatic=True), needs="vllm_triton", compiles=True),
    Implementation("vllm_triton_1", absorbed_peers.vllm_triton(automatic=False), needs="vllm_triton", compiles=True),
    Implementation("sglang_det", absorbed_peers.sglang_det, needs="sglang", compiles=True),
)
REGISTRY: dict[str, dict[str, Implementation]] = {
    op: {i.name: i for i in implementations}
    for op, implementations in (
        ("decode", DECODE),
        ("verify", ABSORBED),
        ("extend", ABSORBED),
        ("prefill", prefill.IMPLEMENTATIONS),
        ("gemm", gemm.IMPLEMENTATIONS),
    )
}
"""Op -> name -> implementation. "floor" is the one name more in results: computed, not run."""

NAMES = tuple(dict.fromkeys(name for implementations in REGISTRY.values() for name in implementations))

HEADS = (16, 64, 128)
"""Of a rank: DeepSeek-V3 as one of eight, and all of V2-Lite; Kimi-like; DeepSeek-V3 whole."""
AIMED = [decode(h, b, n) for n in (8192, 32768, 4096) for b in (1, 128, 16, 64, 4) for h in HEADS]
MIXED = [w for h in HEADS for w in ragged(h)]
EDGES = [decode(h, b, n) for b, n in ((1, 1024), (256, 1024), (256, 8192), (1, 131072), (64, 131072)) for h in HEADS]
STEPS = [(h, b) for h in (16, 128) for b in (1, 16, 64, 128)]

SUITES: dict[str, list[Workload]] = {
    "decode": [*AIMED, *MIXED, *EDGES],
    "verify": [w for h, b in STEPS for w in (decode(h, b, 8192), *(verify(h, b, 8192, q) for q in (2, 3, 4)))],
    "extend": [extend(h, new, prefix) for new, prefix in ((512, 8192), (2048, 0), (64, 32768)) for h in HEADS],
    "prefill": [*prefill.PROMPTS, *prefill.CONTINUED, *(prefill.Prompt(h, 1, 4096, 4096) for h in (128, 16))],
    "gemm": list(gemm.PRODUCTS),
    "quick": [
        *(decode(h, b, 8192) for h in (16, 128) for b in (1, 128)),
        verify(16, 64, 8192, 4),
        extend(16, 512, 8192),
        prefill.Prompt(128, 1, 4096, 4096),
        gemm.Product("V3 TP8 o", 128, 7168, 2048),
    ],
}
"""Named workloads, those that a target names first."""
