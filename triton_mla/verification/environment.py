"""Versions and device of a run. Nothing here names the machine itself."""

from __future__ import annotations

import importlib
import platform
import subprocess
from typing import Any

import torch


def version_of(package: str) -> str:
    """Version of an importable package, or why it cannot be imported."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        return f"cannot be imported: {error}"
    return str(getattr(module, "__version__", "unknown"))


def driver_version() -> str:
    """Version of the NVIDIA driver; for other devices that of the HIP runtime, else ""."""
    if torch.version.hip:
        return f"hip {torch.version.hip}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.split("\n")[0].strip()


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name, capability, memory (bytes) and driver of a device; for a CPU the kind of processor."""
    if device.type == "cpu":
        return {"type": "cpu", "name": platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": driver_version(),
        "cuda": torch.version.cuda or "",
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Versions of Python and the packages that matter, and the device."""
    versions = {name: version_of(name) for name in ("triton_mla", "torch", "triton", "numpy")}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **versions,
        "device": describe_device(device),
    }
