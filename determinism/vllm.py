"""Proof in vLLM itself: logprobs of a model under the plugin, alone against in a batch and under every schedule, beside controls that must differ.

python -m determinism.vllm                          all engines on one GPU, with a small model of DeepSeek-V3's shape and random weights
python -m determinism.vllm --engines ours,ours_keep --no-throughput
VLLM_TEST_MODEL=DIR VLLM_TP_SIZE=8 python -m determinism.vllm   the same on a checkpoint, one engine after another

Each engine is a process of its own. All of them compare first; then the throughput of some is measured, in windows of steps that they take in
turn. The exit code is 0 when every row of this package is without a mismatch and every control has some.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from determinism.vllm_engine import ENGINES, OURS, Engine, child, compare, make_model
from determinism.vllm_throughput import measure, speed
from triton_mla.fingerprint import VLLM, source_digest, source_files

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).resolve().parent / "records" / "vllm"


def environment(engine: Engine, folder: Path) -> dict[str, str]:
    """Of an engine's process. What the caller has set for the offline kit or for Triton stays."""
    paths = [str(ROOT), str(plugin_site(folder)), os.environ.get("PYTHONPATH", "")]
    defaults = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4", "TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONUNBUFFERED": "1"}
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(engine.own_process)), "VLLM_BATCH_INVARIANT": str(int(engine.invariant)),
             "VLLM_CACHE_ROOT": str(folder / f"cache_{engine.name}"), "PYTHONPATH": os.pathsep.join(filter(None, paths)), **engine.variables}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_MLA_")}
    return {**defaults, **kept, **fixed}


def plugin_site(folder: Path) -> Path:
    """A folder that makes the plugin of a checkout known to vLLM, where it is not installed."""
    site = folder / "site"
    if not any(point.value.startswith("triton_mla.") for point in entry_points(group="vllm.general_plugins")):
        info = site / "triton_mla_checkout-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-mla-checkout\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\ntriton_mla = triton_mla.integrations.vllm:register\n", encoding="utf-8")
    return site


class Process(NamedTuple):
    """Of an engine; `channel` is there when its throughput is measured."""

    popen: subprocess.Popen[bytes]
    channel: Connection | None


def run_engines(engines: Sequence[Engine], folder: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each engine's process left; all at once, or one after another for a checkpoint."""
    deadline = time.monotonic() + args.limit
    throughput: dict[str, Any] = {}
    for group in [[engine] for engine in engines] if args.model else [list(engines)]:
        processes = {engine.name: _start(engine, folder, args) for engine in group}
        ready = {name: p.channel for name, p in processes.items() if p.channel is not None and _is_ready(p.channel, deadline)}
        _wait([p.popen for name, p in processes.items() if name not in ready], deadline)  # so that nothing else runs meanwhile
        if ready:
            throughput.update(measure(ready, deadline))
        for channel in ready.values():
            with contextlib.suppress(OSError):
                channel.send(None)
        _wait([process.popen for process in processes.values()], deadline)
        for process in processes.values():
            if process.popen.poll() is None:
                os.killpg(process.popen.pid, signal.SIGKILL)  # with the workers that it started
            process.popen.wait()
    return {engine.name: {**_read(folder, engine.name), **({"throughput": cells} if (cells := throughput.get(engine.name)) else {})} for engine in engines}


def _is_ready(channel: Connection, deadline: float) -> bool:
    """Waits until an engine has compared; False where it has ended, or is late."""
    try:
        return channel.poll(max(0.0, deadline - time.monotonic())) and bool(channel.recv())
    except EOFError:
        return False


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _start(engine: Engine, folder: Path, args: argparse.Namespace) -> Process:
    (folder / f"{engine.name}.json").unlink(missing_ok=True)  # of an earlier run in this folder
    model = args.model or str(folder / engine.model)
    command = [sys.executable, "-m", "determinism.vllm", "--child", engine.name, "--folder", str(folder), "--model", model, "--tp", str(args.tp)]
    command += ["--checkpoint"] if args.model else []
    command += ["--no-compare"] if args.no_compare else []
    ours, theirs = Pipe() if engine.throughput and not args.no_throughput else (None, None)
    command += [] if theirs is None else ["--channel", str(theirs.fileno())]
    with (folder / f"{engine.name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(engine, folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                   pass_fds=[] if theirs is None else [theirs.fileno()])
    if theirs is not None:
        theirs.close()  # so that the end of the process is the end of the channel
    return Process(process, ours)


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


UNFINISHED = {"row": "did not finish: its log tells why", "pairs": 0, "mismatches": 0, "requests": 0, "requests_hit": 0, "max_difference": 0.0, "needs": {}}


BETWEEN = {"ours_no_graphs": "CUDA graphs on and off", "ours_drafts": "drafts on and off"}
"""Rows of what one engine has and the default has not."""


def rows_of(engines: Sequence[Engine], left: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every row with whether it passed; an engine that did not finish is a row that failed."""
    for engine in engines:
        data = left[engine.name]
        for row in data.get("rows", []):
            as_wanted = (row["mismatches"] == 0) == (engine.kind == OURS)
            yield {**row, "passed": bool(as_wanted and row["pairs"] and all(row["needs"].values()))}
        if data.get("state") != "done":
            yield {"engine": engine.name, "kind": engine.kind, **UNFINISHED, "passed": False}
    for name, between in BETWEEN.items():
        without, with_it = (left.get(engine, {}).get("results", {}).get("long") for engine in ("ours", name))
        if without and with_it:
            row = compare(without, with_it)
            yield {"engine": name, "kind": OURS, "row": between, **row, "needs": {}, "passed": row["mismatches"] == 0}


def aims_of(left: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the throughput is to reach, of the small model on an H200."""
    def cell(name: str, key: str, what: str) -> float | None:
        return left.get(name, {}).get("throughput", {}).get(key, {}).get(what)

    aims = [(f"{key}: tokens/s at least {wanted}", cell("ours", key, "tokens_per_second"), wanted, 1)
            for key, wanted in (("32768 x 1", 430.0), ("32768 x 32", 8200.0))]
    aims += [(f"{ratio['key']}: at most 3 % behind {ratio['other']}", ratio["median"], 0.97, 1)
             for ratio in speeds_of(left) if ratio["key"].startswith("4096 ") and ratio["engine"] == "ours"]
    fast = cell("flash_attn_mla", "32768 x 32", "prefill_seconds")
    aims.append(("32768 x 32: seconds of prefill at most 1.2 times FLASH_ATTN_MLA's", cell("ours", "32768 x 32", "prefill_seconds"), (fast or 0) * 1.2, -1))
    return [{"aim": aim, "measured": got, "bound": round(bound, 2), "met": (got - bound) * sign >= 0} for aim, got, bound, sign in aims if got and bound]


def speeds_of(left: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How fast this package's engines were against each other one, in every cell that both have."""
    cells = {name: data["throughput"] for name, data in left.items() if data.get("throughput")}
    others = [engine.name for engine in ENGINES if engine.kind != OURS and engine.name in cells]
    return [{"engine": own.name, "other": other, "key": key, **found}
            for own in ENGINES if own.kind == OURS for other in others for key, cell in cells.get(own.name, {}).items()
            if key in cells[other] and (found := speed(cell, cells[other][key]))]


def show(rows: Sequence[Mapping[str, Any]], left: Mapping[str, Mapping[str, Any]], aims: Sequence[Mapping[str, Any]]) -> None:
    print("\n| engine | row | mismatching pairs | requests | max difference | |\n|---|---|---|---|---|---|")
    for row in rows:
        verdict = ("ok" if row["passed"] else "**FAILED**") if row["kind"] == OURS else ("differs, as it must" if row["passed"] else "**NO DIFFERENCE**")
        needs = "".join(f", {name} {count}" for name, count in row["needs"].items())
        print(f"| {row['engine']} | {row['row']}{needs} | {row['mismatches']} of {row['pairs']} | {row['requests_hit']} of {row['requests']} | "
              f"{row['max_difference']:.3g} | {verdict} |")
    measured = {name: data["throughput"] for name, data in left.items() if data.get("throughput")}
    if measured:
        print("\n| engine | context x requests | tokens/s | ms a step, quartiles | prefill, s |\n|---|---|---|---|---|")
        for name, cells in measured.items():
            for key, cell in cells.items():
                low, high = cell["ms_quartiles"]
                print(f"| {name} | {key} | {cell['tokens_per_second']} | {cell['ms_per_step']}, {low} to {high} | {cell['prefills']} |")
    if ratios := speeds_of(left):
        print("\n| engine | against | context x requests | other's time over its own, 95 % interval | rounds |\n|---|---|---|---|---|")
        for row in ratios:
            low, high = row["interval"]
            print(f"| {row['engine']} | {row['other']} | {row['key']} | {row['median']:.3f}, {low:.3f} to {high:.3f} | {row['rounds']} |")
    for aim in aims:
        print(f"{'reached' if aim['met'] else 'MISSED'}: {aim['aim']} (measured {aim['measured']}, bound {aim['bound']})")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m determinism.vllm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="", help=f"comma-separated, of {', '.join(engine.name for engine in ENGINES)}")
    parser.add_argument("--no-throughput", action="store_true", help="compare only")
    parser.add_argument("--no-compare", action="store_true", help="measure throughput only, of the engines that it is measured of")
    parser.add_argument("--model", default=os.environ.get("VLLM_TEST_MODEL", ""), help="a checkpoint's folder (default: VLLM_TEST_MODEL, else the small model)")
    parser.add_argument("--tp", type=int, default=int(os.environ.get("VLLM_TP_SIZE", "1")), help="tensor-parallel size (default: VLLM_TP_SIZE, else 1)")
    parser.add_argument("--limit", type=float, default=460, help="seconds after which what still runs is ended")
    parser.add_argument("--folder", type=Path, help="for logs, models and caches (default: a new one under the temporary folder)")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(args.child, args.folder, args.model, args.tp, args.checkpoint, not args.no_compare, args.channel and Connection(args.channel))
    wanted = args.engines.split(",") if args.engines else [engine.name for engine in ENGINES if not (args.model and engine.model != "small")]
    engines = [engine for engine in ENGINES if engine.name in wanted and _has_work(engine, args)]
    if unknown := set(wanted) - {engine.name for engine in ENGINES}:
        parser.error(f"--engines {', '.join(sorted(unknown))}: allowed are {', '.join(engine.name for engine in ENGINES)}")
    if missing := needs():
        parser.error(missing)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="determinism_vllm_"))
    folder.mkdir(parents=True, exist_ok=True)
    for model in {engine.model for engine in engines if not args.model}:
        if not (folder / model).exists():
            make_model(folder / model, v3_shape=model == "v3_shape")
    print(f"{len(engines)} engines, logs in {folder}", flush=True)
    left = run_engines(engines, folder, args)
    rows = list(rows_of(engines, left))
    record = _merged(args.out, rows, left, {engine.name for engine in engines if not args.no_compare})
    show(rows, left, record["aims"])
    passed = all(row["passed"] for row in rows)
    print(f"\n{'passed' if passed else 'FAILED'}")
    return 0 if passed else 1


def needs() -> str:
    """What this machine has not that engines need, if anything."""
    import torch

    if importlib.util.find_spec("vllm") is None:
        return "it runs engines of vLLM, which is not installed here"
    return "" if torch.cuda.is_available() else "it needs a CUDA device, and torch sees none"


def _has_work(engine: Engine, args: argparse.Namespace) -> bool:
    return bool((engine.phases and not args.no_compare) or (engine.throughput and not args.no_throughput))


def _merged(folder: Path, rows: Sequence[Any], left: Mapping[str, Mapping[str, Any]], compared: Collection[str]) -> dict[str, Any]:
    """Writes the day's record. One of the same sources keeps what this run did not do: rows of engines not compared, throughput not measured."""
    started = [data for data in left.values() if data.get("info")]
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    gpu = started[0]["info"]["gpu"].lower().replace(" ", "_") if started else "none"
    path = folder / f"{gpu}_{day}.json"
    digest = source_digest(VLLM)
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    old = old if old.get("source_digest") == digest else {}
    engines = {name: dict(data) for name, data in old.get("engines", {}).items()}
    for name, data in left.items():
        engines.setdefault(name, {}).update({key: data[key] for key in ("info", "seconds_to_start", "throughput") if data.get(key)})
    made = {(row["engine"], row["row"]) for row in rows}
    kept = [row for row in old.get("rows", []) if row["row"] in BETWEEN.values() or row["engine"] not in compared]
    rows = [row for row in kept if (row["engine"], row["row"]) not in made] + list(rows)
    record = {"created": day, "passed": all(row["passed"] for row in rows), "source_digest": digest, "sources": source_files(VLLM), "rows": rows,
              "engines": engines, "speeds": speeds_of(engines), "aims": aims_of(engines)}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")
    return record


if __name__ == "__main__":
    sys.exit(main())
