"""Products of a model's layers, out = x @ weight.T: their workloads, and this package's beside torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.implementation import Call, Implementation
from benchmarks.peers import Peers
from triton_mla.companion import linear


@dataclass(frozen=True)
class Product:
    """x [rows, k] times weight [n, k] transposed; `label` names the layer."""

    label: str
    rows: int
    n: int
    k: int
    dtype: str = "bfloat16"
    op: str = "gemm"

    @property
    def name(self) -> str:
        return f"gemm {self.label} {self.rows}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.n * self.k

    @property
    def bytes(self) -> int:
        """x and weight read once, out written once."""
        return (self.rows * self.k + self.n * self.k + self.rows * self.n) * getattr(torch, self.dtype).itemsize

    @property
    def row(self) -> dict[str, Any]:
        """The fields that a result row repeats."""
        return {"op": self.op, "label": self.label, "rows": self.rows, "n": self.n, "k": self.k, "dtype": self.dtype}

    def make_inputs(self, device: torch.device | str, *, small: bool = False) -> Factors:
        """Random factors; the kernel depends on all sizes, so that `small` changes none."""
        generator = torch.Generator(device=device).manual_seed(0)
        x, weight = (torch.randn(n, self.k, generator=generator, device=device, dtype=getattr(torch, self.dtype)) for n in (self.rows, self.n))
        return Factors(x, weight)


@dataclass(frozen=True)
class Factors:
    """x [M, K] and weight [N, K]."""

    x: torch.Tensor
    weight: torch.Tensor

    def expected(self, limit: int = 8) -> tuple[list[int], torch.Tensor]:
        """At most `limit` rows, evenly spread, and their output [rows, N] in float64."""
        last = len(self.x) - 1
        rows = sorted({round(i * last / (limit - 1)) for i in range(limit)})
        return rows, torch.cat([self.x[rows].double() @ part.double().T for part in self.weight.split(8192)], dim=1)


def ours(inputs: Factors, peers: Peers) -> Call:
    """`companion.linear`, whose rows do not depend on one another."""
    out = torch.full((len(inputs.x), len(inputs.weight)), float("nan"), dtype=inputs.x.dtype, device=inputs.x.device)
    return lambda: linear(inputs.x, inputs.weight, out=out)


def plain(inputs: Factors, peers: Peers) -> Call:
    """torch's, by cuBLAS on a CUDA device."""
    return lambda: torch.nn.functional.linear(inputs.x, inputs.weight)


IMPLEMENTATIONS = (Implementation("triton_mla", ours, compiles=True), Implementation("torch", plain))

# (layer, n, k): DeepSeek-V3 whole and as one of eight ranks, and V2-Lite.
LAYERS = (
    ("V3 q_a, kv_a", 2112, 7168),
    ("V3 TP1 q_b", 24576, 1536),
    ("V3 TP8 q_b", 3072, 1536),
    ("V3 TP1 o", 7168, 16384),
    ("V3 TP8 o", 7168, 2048),
    ("V3 TP1 down", 7168, 18432),
    ("V3 TP8 gate_up", 4608, 7168),
    ("V3 TP8 lm_head", 16160, 7168),
    ("V2-Lite q", 3072, 2048),
    ("V2-Lite down", 2048, 10944),
)
PRODUCTS = [Product(label, rows, n, k) for rows in (1, 16, 128, 1024, 4096) for label, n, k in LAYERS]
