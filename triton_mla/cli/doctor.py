"""`triton-mla doctor`: what this machine has, what works, and what would be selected."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from triton_mla.cli.text import columns

DESCRIPTION = """\
Looks at this machine: versions, devices, the state of Triton's interpreter, whether a kernel runs,
which backends could serve a DeepSeek-V3-like model and which would be selected, and why.
A probe that fails is a row with its error; the others still run.

On a machine without a GPU, kernels run only with TRITON_INTERPRET=1 in the environment, and without it
the command fails. `triton-mla verify` needs no such setting: it turns the interpreter on by itself.
"""

EPILOG = """\
examples:
  triton-mla doctor
  triton-mla doctor --json
  TRITON_INTERPRET=1 triton-mla doctor       without a GPU
"""


@dataclass(frozen=True)
class Row:
    """One finding. `failed` means that the probe raised, and `value` is the error."""

    section: str
    name: str
    value: str
    failed: bool = False


Findings = Iterator[tuple[str, str]]


def versions() -> Findings:
    """Versions of Python and of the packages that matter."""
    from triton_mla.verification.environment import version_of

    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in ("triton_mla", "torch", "triton", "numpy"):
        yield name, version_of(name)


def devices() -> Findings:
    """Every GPU with its limits."""
    import torch

    from triton_mla.tuning import arch_of
    from triton_mla.verification.environment import describe_device

    count = torch.cuda.device_count()
    if count == 0:
        yield "GPU", "none that torch can use"
    for index in range(count):
        device = torch.device("cuda", index)
        about = describe_device(device)
        memory = f"{about['memory'] / 2**30:.0f} GiB"
        driver = f"driver {about['driver'] or 'unknown'}, CUDA {about['cuda'] or 'none'}"
        yield f"cuda:{index}", f"{about['name']}, {arch_of(device)}, {memory}, {driver}"


def interpreter() -> Findings:
    """Whether CPU tensors can be used."""
    from triton import knobs

    on = "on: kernels run on CPU tensors, slowly"
    off = "off: CPU tensors need TRITON_INTERPRET=1 before triton is imported; `triton-mla verify` sets it by itself"
    yield "TRITON_INTERPRET", on if knobs.runtime.interpret else off


def architecture() -> Findings:
    """The architecture that kernels are planned for, and its tables."""
    from triton_mla import hopper_decode
    from triton_mla.tuning import ARCHITECTURES, arch_of
    from triton_mla.verification.runner import default_device

    arch = arch_of(default_device())
    none = "no kernel runs without the interpreter" if arch == "cpu" else "no tables for it, so no kernel runs"
    yield "this device", arch if arch in ARCHITECTURES else f"{arch}: {none}"
    yield "with tables", ", ".join(ARCHITECTURES)
    serves = "used where the sizes allow it (plan.hopper_refusal), one for few work items, one for many"
    yield "Hopper forms of decode", hopper_decode.machine_refusal(arch) or serves


def launch() -> Findings:
    """Whether a decode of one token gives the token's own value."""
    import torch

    from triton_mla import mla_decode
    from triton_mla.tuning import ARCHITECTURES, arch_of
    from triton_mla.verification.runner import default_device

    device = default_device()
    if arch_of(device) not in ARCHITECTURES:
        yield "decode", f"not tried: no kernel runs on {arch_of(device)}"
        return
    cache = torch.arange(16 * 80, device=device).remainder(7).to(torch.float16).view(1, 16, 80)
    q = torch.ones(1, 2, 80, dtype=torch.float16, device=device)
    zero, one = (torch.tensor([value], dtype=torch.int32, device=device) for value in (0, 1))
    out: Any = mla_decode(q, cache, zero[None], one, softmax_scale=0.1, kv_lora_rank=64)
    if not torch.equal(out[0, 1], cache[0, 0, :64]):
        raise RuntimeError("a decode over one token did not return that token")
    yield "decode", f"works on {device}"


def selection() -> Findings:
    """Capabilities of each backend, and the choice, for DeepSeek-V3's dims with batch-invariant mode on."""
    from triton_mla import policy
    from triton_mla.config import Settings
    from triton_mla.dims import DEEPSEEK_V3
    from triton_mla.errors import UnsupportedError

    settings = Settings.from_env(batch_invariant=True)
    config = SimpleNamespace(block_size=None, enable_prefix_caching=False)
    try:
        data = policy.explain(policy.resolve(config, dims=DEEPSEEK_V3, settings=settings))
    except UnsupportedError as error:
        for name, reasons in error.reasons.items():
            yield name, "; ".join(reasons)
        raise ValueError(str(error).splitlines()[0]) from None
    for name, backend in data["backends"].items():
        for phase, reasons in backend["reasons"].items():
            yield f"{phase} {name}", "; ".join(reasons) or "capable"
    for phase, choice in data["selection"].items():
        yield f"{phase} selected", f"{choice['backend']} ({choice['origin']}): {choice['reason']}"


def fingerprint() -> Findings:
    """The numerics fingerprint of bf16 calls on this device."""
    from triton_mla.fingerprint import numerics_fingerprint

    yield "bfloat16", numerics_fingerprint()["digest"]


PROBES: tuple[Callable[[], Findings], ...] = (
    versions,
    devices,
    interpreter,
    architecture,
    launch,
    selection,
    fingerprint,
)


def examine(probes: tuple[Callable[[], Findings], ...] | None = None) -> list[Row]:
    """All findings. A probe that raises gives what it found so far and a row with the error."""
    rows = []
    for probe in PROBES if probes is None else probes:
        section = probe.__name__
        try:
            for name, value in probe():
                rows.append(Row(section, name, value))
        except Exception as error:  # the command exists to look at broken machines
            rows.append(Row(section, "error", f"{type(error).__name__}: {error}", failed=True))
    return rows


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="versions, device, capabilities, and what would be selected",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the findings; 1 when a probe failed."""
    rows = examine()
    if args.json:
        print(json.dumps({"ok": not any(row.failed for row in rows), "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        before = ["", *(row.section for row in rows)]
        print(columns([(r.section if r.section != before[i] else "", r.name, r.value) for i, r in enumerate(rows)]))
    return 1 if any(row.failed for row in rows) else 0
