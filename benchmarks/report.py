"""The result file and the printed tables."""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton

import triton_mla
from benchmarks.peers import Peers
from triton_mla.cli.text import columns
from triton_mla.fingerprint import MODEL, source_digest


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


def origin() -> dict[str, Any]:
    """Of a result file that is not of the command: device, versions, date and digest of the sources that a model takes."""
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "kernel_sources": source_digest(MODEL),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}


def default_path(gpu: str, suite: str) -> Path:
    """benchmarks/results/<gpu>_<suite>.json, the GPU's name in lower case letters and digits."""
    return Path(__file__).parent / "results" / f"{re.sub('[^a-z0-9]+', '_', gpu.lower()).strip('_')}_{suite}.json"


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


def read(path: Path) -> dict[str, Any]:
    """The content of a result file.

    Raises:
        ValueError: it cannot be read, or is no result file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all({"workload", "impl", "us_median"} <= set(row) for row in rows):
        raise ValueError(f"{path} is no result file of the benchmarks")
    return content


def by_workload(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians in microseconds by workload, then by implementation; those that have none are not in it."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        found = times.setdefault(row["workload"], {})
        if row["us_median"] is not None:
            found[row["impl"]] = row["us_median"]
    return times


def line(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows of one workload: our time, every other implementation's time and its ratio to ours, and what failed."""
    cells, rows = [], list(rows)
    times = by_workload(rows)[rows[0]["workload"]]
    ours = times.get("triton_mla")
    for row in rows:
        impl, us = row["impl"], row["us_median"]
        if us is None:
            cells += [f"{impl} FAILED: {row['failed']}"] if "failed" in row else []
        elif impl == "triton_mla":
            cells.append(f"{impl} {us:.1f} ±{row['us_spread'] / 2:.1f}")
        else:
            cells.append(f"{impl} {us:.1f}" + (f" ({us / ours:.2f}x)" if ours else ""))
        if impl == "floor" and ours and "flops" in row:
            cells.append(f"{row['flops'] / ours / 1e6:.0f} TFLOP/s, {row['bytes'] / ours / 1e6:.2f} TB/s")
    return f"{rows[0]['workload']}: " + " | ".join(cells)


def ratio_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Our time, and the times of the others over it (above 1: triton_mla is faster), one workload a line."""
    times = by_workload(rows)
    others = list(dict.fromkeys(impl for found in times.values() for impl in found if impl != "triton_mla"))
    table = [["", "us", *others]]
    for workload, found in times.items():
        ours = found.get("triton_mla")
        table.append([workload, f"{ours:.1f}" if ours else "-", *(f"{found[o] / ours:.2f}" if ours and o in found else "-" for o in others)])
    return columns(table, right=range(1, len(others) + 2))
