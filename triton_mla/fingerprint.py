"""What the bits of a result depend on besides its inputs, as one readable and hashable record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import triton

from triton_mla.dims import check_dims
from triton_mla.plan import DTYPES
from triton_mla.tuning import DEFAULT_ORDER, DEFAULT_PREFILL_ORDER, PrefillOrder, ReductionOrder, arch_of

NUMERICS_REVISION = 1
"""Raised by a release whose results differ in any bit from those before it. `verify` compares golden digests under one
fingerprint, so a change of bits without a new revision is a failed check."""

ATTENTION = (
    "kernels/*.py", "kernels/hopper/*.py", "plan.py", "tuning.py", "attention.py", "calls.py", "launch.py", "repeat.py", "prefill.py", "prefill_launch.py",
    "hopper_prefill.py", "hopper_decode.py", "absorb.py", "kernels/companion/matmul.py", "companion/products.py", "companion/multiply.py",
    "companion/tiles.py", "paths.py", "step.py", "module.py")
"""Files of the package that decide what attention computes, as glob patterns: those that `triton-mla verify` proves."""
MODEL = (*ATTENTION, "kernels/companion/*.py", "companion/*.py", "mode.py", "mode_kernels.py", "switches.py",
         "uncovered.py", "integrations/transformers.py")
"""Those that decide what a whole model computes: what `python -m determinism.run` proves."""
VLLM = (*ATTENTION, "integrations/vllm/*.py", "policy.py", "backends.py", "capabilities.py")
"""Those that decide what an engine of vLLM takes of the package: what `python -m determinism.vllm` proves."""
ARCH = "sm_[1-9][0-9]{1,2}|gfx[1-9][0-9a-f]{2,3}|interpreter|cpu"
"""The form of an architecture's name."""


def source_files(patterns: tuple[str, ...] = ATTENTION) -> dict[str, str]:
    """SHA-256 (hex) of each file that decides bits or launches, by its name in the package; line ends do not matter."""
    root = Path(__file__).parent
    files = sorted({file for pattern in patterns for file in root.glob(pattern)})
    texts = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def source_digest(patterns: tuple[str, ...] = ATTENTION) -> str:
    """SHA-256 (hex) over the kernel files and the modules between them and the public operations (`source_files`)."""
    return _digest(source_files(patterns))


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def own_arch(device: torch.device) -> str:
    """Architecture of ``device`` by its own name: that of `tuning.arch_of`, except where a GPU has the schedules of another ("sm_103")."""
    if device.type != "cuda" or torch.version.hip:
        return arch_of(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def numerics_fingerprint(
    *,
    order: ReductionOrder = DEFAULT_ORDER,
    dtype: torch.dtype = torch.bfloat16,
    arch: str | None = None,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    prefill_order: PrefillOrder = DEFAULT_PREFILL_ORDER,
) -> dict[str, Any]:
    """Everything that can change the bits of `out` and `lse` for given inputs.

    Args:
        order: the reduction order of the calls.
        dtype: element type of q and of the cache.
        arch: name of the architecture ("sm_90", "interpreter", ...); None takes that of the current GPU, else that of
            the CPU (`own_arch`).
        kv_lora_rank, qk_rope_head_dim: latent and rope dims (elements) of a cached token.
        prefill_order: the order of `mla_prefill` and `mla_prefill_paged`.

    Returns:
        A json-able dict. `digest` (SHA-256, hex) covers `revision`, the two orders, `arch`, `triton`, `dtype` and the
        two dims, and under the interpreter `numpy`: equal digests and equal inputs give equal bits. `kernel_sources` is the
        digest of the source files; it is evidence and not part of `digest`, since an edit of a schedule changes files
        but no bits. Nothing names the machine: two machines of one kind give the same dict.

    Raises:
        ValueError: an argument that no call of the kernels can have, by name.
    """
    for name, value, kind in (("order", order, ReductionOrder), ("prefill_order", prefill_order, PrefillOrder)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} must be a {kind.__name__}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(map(str, DTYPES))}")
    check_dims(kv_lora_rank, qk_rope_head_dim)
    if arch is None:
        arch = own_arch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    elif not isinstance(arch, str) or not re.fullmatch(ARCH, arch):
        raise ValueError(f"arch={arch!r} must be a name such as sm_90, gfx942, interpreter or cpu, or None")
    numerics: dict[str, Any] = {
        "revision": NUMERICS_REVISION,
        "order": dataclasses.asdict(order),
        "prefill_order": dataclasses.asdict(prefill_order),
        "arch": arch,
        "triton": triton.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
    }
    if arch == "interpreter":
        import numpy

        numerics["numpy"] = numpy.__version__
    return {"digest": _digest(numerics), **numerics, "kernel_sources": source_digest()}
