"""Companion products beside torch's, and operations along rows beside a copy: `python -m benchmarks.products [--json FILE]`, on a CUDA device.

Each graph holds several launches over inputs of their own, which leave L2; graphs are replayed in turn. A time is that of one launch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.report import origin
from benchmarks.timing import Replay, Timing, interleaved
from triton_mla.companion import bmm, linear, log_softmax, rms_norm, softmax

# (N, K) of DeepSeek-V3's and V2-Lite's layers; the head of V3 for few rows only.
LAYERS = ((2112, 7168), (7168, 2048), (24576, 1536), (32768, 512), (7168, 16384), (7168, 18432), (36864, 7168), (2048, 2048), (3072, 2048), (576, 2048),
          (4096, 512), (21888, 2048), (2048, 10944), (129280, 7168))
ROWS = (1, 8, 32, 64, 512, 2048, 4096)
HEADS = ((16, 128, 512), (16, 512, 128), (128, 128, 512), (128, 512, 128))  # (heads, K, N) of W_UK and W_UV
WIDE = (("rms_norm", 4096, 7168), ("softmax", 512, 129280), ("log_softmax", 512, 129280))
LEAVES_L2 = 250_000_000  # bytes of inputs in one graph
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Cell:
    """One operation on rows [M, K]: with a weight [N, K] ("linear"), one [N, K] of each head ("bmm"), or along the rows (N 0)."""

    op: str
    M: int
    N: int
    K: int
    heads: int = 1

    @property
    def name(self) -> str:
        return f"{self.op} M={self.M} K={self.K}" + f" N={self.N}" * (self.N > 0) + f" H={self.heads}" * (self.heads > 1)

    @property
    def read(self) -> int:
        """Elements of what is read in a launch and not by the one before."""
        return self.heads * self.N * self.K or self.M * self.K

    @property
    def launches(self) -> int:
        """Of a graph: over all of L2, and no more than about 1.5 ms."""
        seconds = max(2 * self.heads * self.M * self.N * self.K / 6e14, 2 * self.read / 4e12) + 2e-6
        return max(1, min(48, -(-LEAVES_L2 // (2 * self.read)), int(1.5e-3 / seconds)))

    def calls(self, values: torch.Tensor, launches: int) -> dict[str, list[Call]]:
        """Implementation -> one call for each launch. values: bf16, as many as the largest weight has, and `LEAVES_L2` bytes."""
        parts = [values[i * self.read : (i + 1) * self.read] for i in range(launches)]
        calls: dict[str, list[Call]] = {"triton_mla": [], "torch": []}
        if self.op == "linear":
            x = values[-self.M * self.K :].view(self.M, self.K)
            for part in parts:
                w = part.view(self.N, self.K)
                calls["triton_mla"].append(lambda w=w: linear(x, w))
                calls["torch"].append(lambda w=w: functional.linear(x, w))
        elif self.op == "bmm":  # W_UK [K, N] in memory, W_UV [N, K]
            x = values[-self.M * self.heads * self.K :].view(self.M, self.heads, self.K).transpose(0, 1)
            for part in parts:
                w = part.view(self.heads, self.K, self.N) if self.K < self.N else part.view(self.heads, self.N, self.K).transpose(1, 2)
                calls["triton_mla"].append(lambda w=w: bmm(x, w))
                calls["torch"].append(lambda w=w: torch.bmm(x, w))
        else:
            ours, theirs = {
                "rms_norm": (rms_norm, lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6)),
                "softmax": (lambda x, _: softmax(x), lambda x, _: functional.softmax(x, -1)),
                "log_softmax": (lambda x, _: log_softmax(x), lambda x, _: functional.log_softmax(x, -1)),
            }[self.op]
            weight = values[-self.K :]
            for part in parts:
                x = part.view(self.M, self.K)
                calls["triton_mla"].append(lambda x=x: ours(x, weight))
                calls["torch"].append(lambda x=x: theirs(x, weight))
                calls.setdefault("copy", []).append(x.clone)
        return calls


CELLS = (
    *(Cell("linear", M, N, K) for N, K in LAYERS for M in ROWS if N < 100_000 or M <= 64),
    *(Cell("bmm", M, N, K, heads) for heads, K, N in HEADS for M in ROWS if M < 4096),
    *(Cell(op, M, 0, K) for op, M, K in WIDE),
)


def random_values(count: int) -> torch.Tensor:
    """[count] of unit scale, bf16."""
    values = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    for part in values.split(1 << 27):
        part.copy_(torch.randn(part.numel(), device="cuda"))
    return values


def compile_cell(cell: Cell) -> None:
    """Fill Triton's cache."""
    values = torch.zeros(cell.read + cell.heads * cell.M * cell.K, dtype=torch.bfloat16, device="cuda")
    cell.calls(values, 1)["triton_mla"][0]()


def in_turn(calls: list[Call]) -> Call:
    """All of them, as one call that gives the last result."""
    def run() -> torch.Tensor:
        for call in calls[:-1]:
            call()
        return calls[-1]()

    return run


def measure(cell: Cell, values: torch.Tensor, repeats: int) -> dict[str, Timing]:
    """Time of one launch of each implementation.

    Raises:
        ValueError: the result is not torch's, but for rounding.
    """
    calls = cell.calls(values, cell.launches)
    ours, theirs = (calls[name][0]().float() for name in ("triton_mla", "torch"))
    if not float((ours - theirs).abs().max()) <= 0.02 * float(theirs.abs().max()):
        raise ValueError(f"{cell.name}: results differ by {float((ours - theirs).abs().max())} where torch's reach {float(theirs.abs().max())}")
    times = interleaved({name: Replay(in_turn(parts)) for name, parts in calls.items()}, repeats)
    return {name: Timing(*(x / cell.launches for x in (t.median, t.p10, t.p90))) for name, t in times.items()}


def rows(repeats: int) -> Iterator[dict[str, object]]:
    """A result of each cell, printed as it comes: its sizes, microseconds, and how many times faster than torch and than a copy."""
    values = random_values(max(cell.read for cell in CELLS) + LEAVES_L2)
    for cell in CELLS:
        times = measure(cell, values, repeats)
        ours = times["triton_mla"]
        ratios = {name: t.median / ours.median for name, t in times.items() if name != "triton_mla"}
        faster = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"{cell.name:34s} {ours.median:8.1f} ± {ours.spread / 2:.1f} us  {faster}", flush=True)
        yield {"cell": cell.name, "us": {name: vars(t) for name, t in times.items()}, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--repeats", type=int, default=9, help="timed turns of a cell (default: 9)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats={args.repeats} must be at least 1")
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device, and torch sees none")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_cell, CELLS, chunksize=4))
    results = {**origin(), "rows": list(rows(args.repeats))}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
