"""Golden digests: fixed inputs stay fixed, and another digest under the same fingerprint fails the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_mla
from triton_mla.verification import golden, profiles
from triton_mla.verification.trial import NotHereError, Rows

CPU = torch.device("cpu")


def entry(decode: str) -> dict[str, Any]:
    return {"fingerprint": {"dtype": "bfloat16"}, "outputs": {"decode": decode, "extend": "e"}}


def test_fixed_values_are_fixed() -> None:
    values = golden.fixed_values(4, 5, dtype=torch.float32, device=CPU, key=3)
    assert [int(v * 128) for v in values.flatten()[:8]] == [-22, 15, -30, 12, -84, 5, 45, 58]
    assert not torch.equal(values, golden.fixed_values(4, 5, dtype=torch.float32, device=CPU, key=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fixed_values_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    exact = golden.fixed_values(50, 60, dtype=torch.float64, device=CPU)
    assert torch.equal(golden.fixed_values(50, 60, dtype=dtype, device=CPU).double(), exact)
    assert abs(float(exact.mean())) < 0.05 and 0.5 < float(exact.std()) < 0.65
    assert float(exact.min()) >= -1 and float(exact.max()) < 1


def test_a_digest_sees_one_bit() -> None:
    out, lse = torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3)
    changed = out.clone()
    changed[1, 2, 3] = -0.0
    assert golden.digest(Rows(out, lse)) != golden.digest(Rows(changed, lse))
    assert golden.digest(Rows(out, lse)) == golden.digest(Rows(out.clone(), lse.clone()))


def test_comparison_with_stored_digests() -> None:
    measured = {"print": entry("d")}
    assert list(golden.compare(measured, {"print": entry("d")})) == [
        ("bfloat16 decode", True),
        ("bfloat16 extend", True),
    ]
    assert list(golden.compare(measured, {"print": entry("x")}))[0] == ("bfloat16 decode", False)
    with pytest.raises(NotHereError, match="no stored digests"):
        list(golden.compare(measured, {"another print": entry("d")}))


def test_a_missing_file_holds_nothing(tmp_path: Path) -> None:
    assert golden.load("sm_90", tmp_path) == {}
    golden.path_of("sm_90", tmp_path).write_text(json.dumps({"print": entry("d")}), encoding="utf-8")
    assert golden.load("sm_90", tmp_path) == {"print": entry("d")}


def test_stored_digests_are_well_formed() -> None:
    files = list(golden.FOLDER.glob("*.json"))
    assert files
    for file in files:
        for key, stored in json.loads(file.read_text(encoding="utf-8")).items():
            assert stored["fingerprint"]["digest"] == key
            assert file.name == f"golden_{stored['fingerprint']['arch']}.json"
            assert all(len(value) == 64 for value in stored["outputs"].values())


def test_stored_digests_are_installed_with_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    package = Path(triton_mla.__file__).parent
    project = tomllib.loads((package.parent / "pyproject.toml").read_text(encoding="utf-8"))
    installed = {file for pattern in project["tool"]["setuptools"]["package-data"]["triton_mla"] for file in package.glob(pattern)}
    assert set(golden.FOLDER.iterdir()) <= installed


@pytest.mark.skipif(torch.version.hip is not None, reason="a HIP build names GPUs in another way")
def test_digests_are_of_the_gpus_own_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 3))
    monkeypatch.setattr(golden, "outputs", lambda *args: {})
    measured = golden.measure(profiles.GPU, torch.device("cuda", 0))
    assert {stored["fingerprint"]["arch"] for stored in measured.values()} == {"sm_103"}
