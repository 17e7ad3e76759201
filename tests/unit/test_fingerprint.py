"""The fingerprint has what can change bits and nothing else."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from triton_mla import fingerprint
from triton_mla.fingerprint import MODEL, numerics_fingerprint, own_arch, source_digest, source_files
from triton_mla.tuning import DEFAULT_ORDER, DEFAULT_PREFILL_ORDER, PrefillOrder, ReductionOrder, arch_of


def digest(**options: Any) -> str:
    return numerics_fingerprint(**{"arch": "sm_90", **options})["digest"]


def other_values(order: ReductionOrder) -> dict[str, Any]:
    return {
        "block_n": 32,
        "kv_split": order.kv_split * 2,
        "reference_step": order.reference_step * 2,
        "input_precision": "tf32",
        "fp_fusion": not order.fp_fusion,
    }


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ReductionOrder)])
def test_every_field_of_the_reduction_order_changes_it(field: str) -> None:
    order = dataclasses.replace(DEFAULT_ORDER)
    object.__setattr__(order, field, other_values(order)[field])
    assert digest(order=order) != digest()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PrefillOrder)])
def test_every_field_of_the_prefill_order_changes_it(field: str) -> None:
    order = dataclasses.replace(DEFAULT_PREFILL_ORDER)
    object.__setattr__(order, field, "another value")
    assert digest(prefill_order=order) != digest()


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float16}, {"arch": "sm_100"}, {"kv_lora_rank": 256}, {"qk_rope_head_dim": 0}],
    ids=str,
)
def test_dtype_architecture_and_dims_change_it(options: dict[str, Any]) -> None:
    assert digest(**options) != digest()


@pytest.mark.skipif(torch.version.hip is not None, reason="a HIP build names GPUs in another way")
@pytest.mark.parametrize(("capability", "name", "schedules"), [((10, 3), "sm_103", "sm_100"), ((8, 7), "sm_87", "sm_86"), ((12, 1), "sm_121", "sm_120")])
def test_a_gpu_with_the_schedules_of_another_has_its_own(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, schedules: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    gpu = torch.device("cuda", 0)
    assert (own_arch(gpu), arch_of(gpu)) == (name, schedules)
    assert numerics_fingerprint()["arch"] == name
    assert numerics_fingerprint()["digest"] == digest(arch=name) != digest(arch=schedules)


def test_another_device_has_the_name_that_its_schedules_have() -> None:
    for device in (torch.device("cpu"), torch.device("meta")):
        assert own_arch(device) == arch_of(device)


@pytest.mark.parametrize(
    "options",
    [
        *({"arch": arch} for arch in (7, "", "sm_1", "sm_90a", "SM_90", "sm_100\n", "gfx", "hopper", torch.device("cpu"))),
        *({"dtype": dtype} for dtype in ("bf16", None, torch.float64, torch.int8)),
        *({"order": order} for order in (3, None, DEFAULT_PREFILL_ORDER)),
        *({"prefill_order": order} for order in (3, None, DEFAULT_ORDER)),
        *({"kv_lora_rank": rank} for rank in ("x", 0, 512.0, True, 500)),
        *({"qk_rope_head_dim": rope} for rope in ("x", -16, None, 7)),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, Any]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be ")):
        digest(**options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_121", "gfx942", "gfx90a", "interpreter", "cpu"])
def test_names_of_architectures(arch: str) -> None:
    assert numerics_fingerprint(arch=arch)["arch"] == arch


def test_triton_and_the_revision_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {digest()}
    monkeypatch.setattr(triton, "__version__", "99.0")
    digests.add(digest())
    monkeypatch.setattr(fingerprint, "NUMERICS_REVISION", 99)
    digests.add(digest())
    assert len(digests) == 3


def test_a_schedule_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_fingerprint(arch="sm_90")
    edited = {**source_files(), "tuning.py": "another table of schedules"}
    monkeypatch.setattr(fingerprint, "source_files", lambda _patterns: edited)
    after = numerics_fingerprint(arch="sm_90")
    assert after["digest"] == before["digest"]
    assert after["kernel_sources"] != before["kernel_sources"]


def test_it_is_readable_and_complete() -> None:
    data = numerics_fingerprint(arch="sm_90", dtype=torch.float16, kv_lora_rank=256, qk_rope_head_dim=32)
    assert json.loads(json.dumps(data)) == data
    assert data["order"] == dataclasses.asdict(DEFAULT_ORDER)
    assert (data["arch"], data["dtype"], data["triton"]) == ("sm_90", "float16", triton.__version__)
    assert (data["kv_lora_rank"], data["qk_rope_head_dim"]) == (256, 32)
    assert data["kernel_sources"] == source_digest()


def test_it_does_not_name_the_machine() -> None:
    text = json.dumps(numerics_fingerprint(arch="sm_90"))
    assert platform.node() not in text or not platform.node()
    assert str(Path(fingerprint.__file__).parent) not in text


def test_another_process_gives_the_same(tmp_path: Path) -> None:
    code = "from triton_mla import fingerprint; print(fingerprint.numerics_fingerprint(arch='sm_90')['digest'])"
    root = Path(fingerprint.__file__).parents[1]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == digest()


def test_the_interpreter_depends_on_numpy_too() -> None:
    assert "numpy" in numerics_fingerprint(arch="interpreter")
    assert "numpy" not in numerics_fingerprint(arch="sm_90")


def test_source_files_are_the_kernels_and_what_plans_them() -> None:
    files = source_files()
    assert {"plan.py", "tuning.py", "attention.py", "calls.py", "launch.py"} <= files.keys()
    assert {"prefill.py", "prefill_launch.py", "absorb.py", "paths.py", "step.py", "module.py"} <= files.keys()
    root = Path(fingerprint.__file__).parent
    kernels = {file.relative_to(root).as_posix() for file in (root / "kernels").rglob("*.py")}
    companion = {name for name in kernels if name.startswith("kernels/companion/")}
    assert kernels - companion <= files.keys() and companion & files.keys() == {"kernels/companion/matmul.py"}
    assert {"companion/products.py", "companion/multiply.py", "companion/tiles.py"} <= files.keys()
    assert kernels | {"companion/rows.py", "mode.py"} <= source_files(MODEL).keys() > files.keys()
    assert any(name.startswith("kernels/") for name in files)
    assert not any(name.startswith(("cli/", "verification/")) for name in files)
    assert all(len(value) == 64 for value in files.values())


def test_line_ends_do_not_matter_and_contents_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "fingerprint.py"))
    file = tmp_path / "plan.py"
    digests = []
    for text in (b"a = 1\nb = 2\n", b"a = 1\r\nb = 2\r\n", b"a = 1\nb = 3\n"):
        file.write_bytes(text)
        digests.append(source_digest())
    assert digests[0] == digests[1] != digests[2]
