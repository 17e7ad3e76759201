"""Other implementations, loaded from a folder that holds their files or imported where they are installed; none is needed.

The folder (searched whole) may hold these files of a vLLM wheel: `_flashmla_C.abi3.so`, `_vllm_fa3_C.abi3.so` and
`triton_decode_attention.py`. They are loaded alone, without vLLM. SGLang and FlashInfer are imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import types
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

FLASHMLA = "_flashmla_C.abi3.so"
FA3 = "_vllm_fa3_C.abi3.so"
VLLM_TRITON = "triton_decode_attention.py"


class Unavailable(RuntimeError):
    """An implementation that cannot run here, or not this workload; the message is the reason."""


class Peers:
    """The implementations found under `folder` (None: none of the files) or installed, each loaded at its first use.

    Raises (from the properties):
        Unavailable: it is not there, or does not load here.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder

    def find(self, name: str) -> Path:
        """The file of that name; Unavailable where there is none."""
        if self.folder is None:
            raise Unavailable("no --peers folder")
        found = sorted(self.folder.rglob(name))
        if not found:
            raise Unavailable(f"no {name} under {self.folder.name}/")
        return found[0]

    def digests(self) -> dict[str, str]:
        """SHA-256 (first 16 hex digits) of each file that is there."""
        found = [
            path for name in (FLASHMLA, FA3, VLLM_TRITON) if self.folder for path in sorted(self.folder.rglob(name))[:1]
        ]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in found}

    def _extension(self, name: str) -> Any:
        path = self.find(name)
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise Unavailable(f"{name} does not load: {error}") from error
        return getattr(torch.ops, name.split(".")[0])

    @cached_property
    def flashmla(self) -> Any:
        """`torch.ops._flashmla_C`."""
        return self._extension(FLASHMLA)

    @cached_property
    def fa3(self) -> Any:
        """`torch.ops._vllm_fa3_C`."""
        return self._extension(FA3)

    @cached_property
    def vllm_triton(self) -> types.ModuleType:
        """The module of vLLM's Triton MLA decode kernels."""
        return _load_alone(self.find(VLLM_TRITON))

    @cached_property
    def sglang(self) -> Any:
        """`decode_attention_fwd` of SGLang's Triton kernels, under the name of recent or of older releases."""
        try:
            return _installed("sglang.kernels.ops.attention.decode_attention").decode_attention_fwd
        except Unavailable:
            return _installed("sglang.srt.layers.attention.triton_ops.decode_attention").decode_attention_fwd

    @cached_property
    def flashinfer(self) -> Any:
        """The package, its `mla` module imported."""
        _installed("flashinfer.mla")
        return sys.modules["flashinfer"]

    @cached_property
    def cuda(self) -> None:
        """Nothing but the device, for what torch itself brings."""
        if not torch.cuda.is_available():
            raise Unavailable("no CUDA device")


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package whose parts do not fit this machine may raise anything
        raise Unavailable(f"{name} does not import: {type(error).__name__}: {error}") from error


def _load_alone(path: Path) -> types.ModuleType:
    """Import the file with stand-ins for the two modules of vLLM it names, which are gone again afterwards."""
    import triton
    import triton.language as tl

    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_rocm=lambda: torch.version.hip is not None)  # type: ignore[attr-defined]
    triton_utils = types.ModuleType("vllm.triton_utils")
    triton_utils.tl, triton_utils.triton = tl, triton  # type: ignore[attr-defined]
    stand_ins = {"vllm": types.ModuleType("vllm"), "vllm.platforms": platforms, "vllm.triton_utils": triton_utils}
    before = {name: sys.modules.get(name) for name in stand_ins}
    spec = importlib.util.spec_from_file_location(f"benchmarks_peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, original in before.items():
            if original is None:
                del sys.modules[name]
            else:
                sys.modules[name] = original
    return module
