"""The record of GPU runs: accepted only when it passed and is of the present sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from determinism import record
from triton_mla import verification
from triton_mla.fingerprint import MODEL, VLLM, source_digest, source_files
from triton_mla.verification import golden
from triton_mla.verification.report import CheckResult, ControlResult, Report


def report(*, failed: bool = False, golden_digests: dict[str, Any] | None = None) -> Report:
    device = {"type": "cuda", "name": "NVIDIA Test GPU", "driver": "1"}
    versions = {name: "1" for name in ("python", "torch", "triton", "numpy")}
    check = CheckResult("size", "batch", "failed" if failed else "passed", 3, int(failed), 0.1)
    return Report(
        profile="gpu",
        environment={**versions, "device": device},
        sources=source_files(),
        fingerprint={"digest": "d" * 64, "arch": "sm_90", "kernel_sources": source_digest()},
        created="2030-01-02T03:04:05Z",
        checks=[check],
        controls=[ControlResult("splits", "passed", 2, 2, 0.1)],
        golden=golden_digests or {"p": {"outputs": {"decode": "x"}}},
    )


def store(folder: Path, name: str, **changes: Any) -> None:
    (folder / name).write_text(json.dumps({**report().to_json(), **changes}), encoding="utf-8")


@pytest.fixture
def with_model(tmp_path: Path) -> None:
    """The record of a model."""
    store(tmp_path, "model_gpu_2030-01-02.json", source_digest=source_digest(MODEL), sources=source_files(MODEL))


def test_no_record_is_loud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "*** NO GPU RECORD OF THE PRESENT SOURCES" in capsys.readouterr().out


def test_a_record_of_other_sources_names_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = {**source_files(), "plan.py": "0", "kernels/gone.py": "0"}
    store(tmp_path, "gpu_2030-01-02.json", source_digest="0", sources=sources)
    assert record.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "changed since: kernels/gone.py, plan.py" in capsys.readouterr().out


def test_a_failed_record_does_not_count(tmp_path: Path) -> None:
    store(tmp_path, "gpu_2030-01-02.json", passed=False)
    assert record.main(["--check", "--folder", str(tmp_path)]) == 1


def test_a_model_is_not_attention(tmp_path: Path, with_model: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["--check", "--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "of attention among 1" in out and "of model among" not in out
    store(tmp_path, "model_gpu_2030-01-02.json")  # of the digest of attention
    store(tmp_path, "gpu_2030-01-02.json")
    assert record.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "of model among 2" in capsys.readouterr().out


def test_a_split_model_is_not_the_whole_one(tmp_path: Path, with_model: None, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, "gpu_2030-01-02.json")
    store(tmp_path, "model_gpu_tp2_2030-01-02.json")  # of the digest of attention
    assert record.main(["--check", "--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "of split model among 3" in out and "--tensor-parallel 2" in out and "of model among" not in out


def test_the_record_of_vllm_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, "gpu_2030-01-02.json")
    (tmp_path / "vllm").mkdir()
    for digest, code in ((source_digest(VLLM), 0), (source_digest(), 1)):
        store(tmp_path, "vllm/gpu_2030-01-02.json", source_digest=digest, sources={**source_files(VLLM), "plan.py": "0"} if code else source_files(VLLM))
        assert record.main(["--check", "--folder", str(tmp_path)]) == code
        out = capsys.readouterr().out
        assert ("vllm/gpu_2030-01-02.json: OF OTHER SOURCES; changed since: plan.py" in out and "`python -m determinism.vllm`" in out) == bool(code)


def test_one_passing_record_of_these_sources_suffices(tmp_path: Path, with_model: None, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, "gpu_2030-01-02.json")
    store(tmp_path, "gpu_2029-01-02.json", source_digest="0")
    assert record.main(["--check", "--folder", str(tmp_path)]) == 0
    assert "***" not in capsys.readouterr().out


@pytest.fixture
def gpu_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the run on the GPU and the tests there give."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def arrange(run: Report, tests: dict[str, Any] | None = None) -> None:
        monkeypatch.setattr(verification, "run", lambda *args, **options: run)
        monkeypatch.setattr(record, "run_tests", lambda: tests)

    return arrange


def write(folder: Path, *options: str) -> int:
    """Writes a record, with golden digests in a folder of their own."""
    return record.main(["--write", *options, "--folder", str(folder), "--golden", str(digests_of(folder))])


def digests_of(folder: Path) -> Path:
    return folder / "digests"


def test_write_and_check(tmp_path: Path, gpu_run: Any) -> None:
    gpu_run(report(), {"passed": 40, "failed": 0, "skipped": 1})
    assert write(tmp_path, "--tests") == 0
    assert [file.name for file in tmp_path.glob("*.json")] == ["nvidia_test_gpu_2030-01-02.json"]
    data = json.loads((tmp_path / "nvidia_test_gpu_2030-01-02.json").read_text(encoding="utf-8"))
    assert data["passed"] and data["tests"]["passed"] == 40 and data["checks"][0]["comparisons"] == 3
    assert golden.load("sm_90", digests_of(tmp_path)) == {"p": {"outputs": {"decode": "x"}}}
    assert record.main(["--check", "--folder", str(tmp_path)]) == 0


def test_writing_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        write(tmp_path)
    assert "--write needs a CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_counts_of_a_run_before(tmp_path: Path, gpu_run: Any) -> None:
    gpu_run(report())
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuite><testcase classname="a" name="b" time="0.5"/></testsuite>', encoding="utf-8")
    assert write(tmp_path, "--junit", str(junit)) == 0
    assert write(tmp_path, "--junit", str(tmp_path / "missing")) == 1


@pytest.mark.parametrize("tests", [{"passed": 40, "failed": 1}, {"passed": 0, "failed": 0}], ids=["failed", "none ran"])
def test_failed_tests_fail_the_record(tmp_path: Path, gpu_run: Any, tests: dict[str, Any]) -> None:
    gpu_run(report(), tests)
    assert write(tmp_path, "--tests") == 1
    assert record.main(["--check", "--folder", str(tmp_path)]) == 1
    assert golden.load("sm_90", digests_of(tmp_path)) == {}


def test_a_failed_run_is_written_and_does_not_set_golden_digests(tmp_path: Path, gpu_run: Any) -> None:
    gpu_run(report(failed=True))
    assert write(tmp_path) == 1
    assert golden.load("sm_90", digests_of(tmp_path)) == {}


def test_golden_digests_are_added_and_never_replaced(tmp_path: Path, gpu_run: Any) -> None:
    for name, value in (("p", "x"), ("p", "y"), ("q", "z")):
        gpu_run(report(golden_digests={name: {"outputs": {"decode": value}}}))
        write(tmp_path)
    assert golden.load("sm_90", digests_of(tmp_path)) == {"p": {"outputs": {"decode": "x"}}, "q": {"outputs": {"decode": "z"}}}


def test_counts_of_a_junit_report(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="0.5"/>'
        '<testcase classname="a" name="c" time="1"><failure/></testcase>'
        '<testcase classname="a" name="d" time="0"><skipped/></testcase>'
        '<testcase classname="a" name="e" time="0"><error/></testcase></testsuite></testsuites>',
        encoding="utf-8",
    )
    counts = record.count_tests(file)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1, "seconds": 1.5, "failures": ["a::c", "a::e"]}
    assert record.count_tests(tmp_path / "missing.xml")["failed"] == 1


def test_tests_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    test = tmp_path / "test_two.py"
    test.write_text("def test_good(): pass\ndef test_bad(): assert False\n", encoding="utf-8")
    counts = record.run_tests([str(test)])
    assert (counts["passed"], counts["failed"]) == (1, 1)


def test_usage() -> None:
    for argv in ([], ["--check", "--write"]):
        with pytest.raises(SystemExit) as stopped:
            record.main(argv)
        assert stopped.value.code == 2


def test_golden_digests_are_written_where_verify_looks(tmp_path: Path, gpu_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, Path]] = []
    monkeypatch.setattr(record, "write", lambda folder, digests, tests: written.append((folder, digests)) or 0)
    assert record.main(["--write"]) == 0
    assert written == [(record.RECORDS, golden.FOLDER)]
    assert record.RECORDS.is_dir() and not list(record.RECORDS.glob("golden_*"))
