"""The result file and the printed tables."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import triton_mla
from benchmarks.peers import Peers
from benchmarks.runner import Measured
from triton_mla.fingerprint import source_digest


def header(peers: Peers, ceilings: Mapping[str, float], repeats: int, flush: str) -> dict[str, Any]:
    """What a reader needs to judge the rows: device, versions, date, measured ceilings, digest of the sources."""
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": device.name if device else "none",
        "multiprocessors": device.multi_processor_count if device else 0,
        "versions": {
            "triton_mla": triton_mla.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "ceilings": dict(ceilings),
        "kernel_sources": source_digest(),
        "peer_files": peers.digests(),
        "repeats": repeats,
        "flush": flush,
        "times": "CUDA graph replays, implementations in turn, L2 flushed before each; us_spread is p90 - p10",
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON, one result row a line; the file is whole at every moment."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            body = ",\n".join(f"  {json.dumps(item)}" for item in value)
            parts.append(f"{json.dumps(key)}: [\n{body}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value, indent=1)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    temporary.replace(path)


def line(measured: Measured) -> str:
    """One workload: our time, then every other implementation's time and its ratio to ours."""
    times = {name: timing.median for name, timing in measured.timings.items()}
    ours = times.get("triton_mla")
    cells = []
    for name, timing in measured.timings.items():
        ratio = f" ({timing.median / ours:.2f}x)" if ours and name != "triton_mla" else ""
        spread = f" ±{timing.spread / 2:.1f}" if name == "triton_mla" else ""
        cells.append(f"{name} {timing.median:.1f}{spread}{ratio}")
    if ours:
        w = measured.workload
        cells.append(f"{w.flops / ours / 1e6:.0f} TFLOP/s, {w.bytes / ours / 1e6:.2f} TB/s")
    return f"{measured.workload.name}: " + " | ".join(cells)


def ratio_table(rows: Iterable[Mapping[str, Any]], implementations: Sequence[str]) -> str:
    """Ratios to triton_mla (above 1: triton_mla is faster), one workload a line."""
    by_shape: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        shape = (r["op"], r["heads"], r["batch"], r["seq_len"], r["q_len"])
        by_shape.setdefault(shape, {})[r["impl"]] = r["us_median"]
    others = [name for name in implementations if name != "triton_mla"]
    lines = [f"{'':36}{'us':>9}" + "".join(f"{name:>17}" for name in others)]
    for (op, heads, batch, seq_len, q_len), times in sorted(by_shape.items()):
        ours = times.get("triton_mla")
        title = f"{op} H={heads} B={batch} L={seq_len} q={q_len}"
        cells = [f"{times[name] / ours:.2f}" if ours and name in times else "-" for name in others]
        lines.append(f"{title:36}{ours or float('nan'):9.1f}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def share_of_ceiling(measured: Measured, ceilings: Mapping[str, float]) -> str | None:
    """TFLOP/s of an extend and its share of the measured matmul rate; None where it was not timed."""
    timing = measured.timings.get("triton_mla")
    if measured.workload.op != "extend" or timing is None:
        return None
    rate = measured.workload.flops / (timing.median * 1e-6)
    share = rate / ceilings["bf16_flops_per_s"]
    return f"{measured.workload.name}: {rate / 1e12:.0f} TFLOP/s, {share:.0%} of the measured matmul rate"
