"""The command line: exit codes, JSON, help with examples, and guarded probes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from triton_mla import __version__, cli, verification
from triton_mla.cli import doctor, verify
from triton_mla.cli.text import ProgressLine, columns
from triton_mla.config import VARIABLES
from triton_mla.verification.report import CheckResult, ControlResult, Report

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def json_of(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["doctor", "explain", "verify"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert f"triton-mla {command}" in text and "examples:" in text and "--json" in text


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["guess"],
        ["verify", "--device", "tpu"],
        ["verify", "--device", "cuda:-1"],
        ["verify", "--device", "cuda:x"],
        ["verify", "--jobs", "0"],
        ["verify", "--golden", "/no/such/folder"],
        ["verify", "--golden", __file__],
        ["explain", "--model", "llama"],
        ["explain", "--page-size", "0"],
        ["explain", "--page-size", "-16"],
        ["doctor", "--guess"],
    ],
    ids=str,
)
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


WRONG_VALUES = [
    (["explain", "--heads", "0"], "--heads: num_heads=0"),
    (["explain", "--heads", "129"], "--heads: num_heads=129 must be at most 128"),
    (["explain", "--rank", "0"], "--rank: kv_lora_rank=0"),
    (["explain", "--rope", "-16"], "--rope: qk_rope_head_dim=-16"),
    (["explain", "--arch", ""], "arch=''"),
    (["explain", "--kv-split", "100"], "kv_split=100"),
    (["explain", "--batch-invariant", "maybe"], "batch_invariant=maybe"),
    (["explain", "--dtype", "int4"], "dtype=int4"),
    (["explain", "--decode-backend", "guess"], "decode_backend=guess"),
    (["verify", "--device", "cuda:99999"], "device=cuda:99999"),
    (["verify", "--device", "cuda:65536"], "device=cuda:65536"),
    (["verify", "--record", "/no/such/folder/file.json"], "record=/no/such/folder/file.json"),
]


@pytest.mark.parametrize(("argv", "word"), WRONG_VALUES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_value_is_2_and_named(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    told = capsys.readouterr()
    assert word in told.err and not told.out
    assert cli.main([*argv, "--json"]) == 2
    told = capsys.readouterr()
    assert word in json.loads(told.out)["error"] and not told.err


def test_wrong_usage_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", "--json", "--jobs", "0"])
    assert stopped.value.code == 2
    assert "--jobs" in json_of(capsys)["error"]
    with pytest.raises(SystemExit):
        cli.main(["explain", "--json", "--page-size", "0"])
    assert "--page-size: '0': allowed are positive integers" in json_of(capsys)["error"]


def test_a_reader_that_stops_is_no_error() -> None:
    command = [sys.executable, "-m", "triton_mla", "explain", "--arch", "sm_90"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"triton_mla {__version__}\n"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "triton_mla", "explain", "--arch", "sm_90", "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["selection"]["decode"]["backend"] == "triton_mla"


class TestExplain:
    def test_settings_have_an_origin(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert cli.main(["explain", "--arch", "sm_90", "--kv-split", "1024", "--json"]) == 0
        data = json_of(capsys)
        assert data["settings"]["batch_invariant"] == {"value": True, "origin": "VLLM_BATCH_INVARIANT"}
        assert data["settings"]["kv_split"] == {"value": 1024, "origin": "argument"}
        assert data["settings"]["prefill_path"]["origin"] == "default"
        assert "turned off" in data["prefix_caching"]

    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["explain", "--arch", "sm_90", "--batch-invariant", "1", "--prefix-caching", "keep"]) == 0
        text = capsys.readouterr().out
        assert "batch_invariant = True  (argument)" in text and "prefix caching: left as it is" in text

    def test_model_sizes(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["explain", "--arch", "sm_90", "--model", "kimi-k2", "--rank", "256", "--page-size", "32", "--json"]
        assert cli.main(argv) == 0
        request = json_of(capsys)["request"]
        sizes = [request[name] for name in ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size")]
        assert sizes == [64, 256, 64, 32]

    def test_the_form_of_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["explain", "--arch", "sm_90", "--batch-invariant", "1", "--token-roles"]
        assert cli.main(argv) == 0
        assert "a token before the end of its request's original prompt takes the mha form" in capsys.readouterr().out
        assert cli.main([*argv, "--chunked-prefix", "0", "--json"]) == 0
        forms = json_of(capsys)["forms"]
        assert forms["prompt"] == "absorbed" and "chunked_prefix=0" in forms["reason"] and forms["batch_invariant"]
        assert cli.main([*argv, "--chunked-prefix", "0", "--whole-prompts", "--json"]) == 0
        assert json_of(capsys)["forms"]["prompt"] == "mha"
        assert cli.main([*argv, "--prefix-caching", "keep", "--prefill-path", "mha"]) == 1
        assert "prefix_caching=keep (argument): only the absorbed form reproduces generated tokens" in capsys.readouterr().out

    @pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
    def test_unsupported_is_1_with_reasons(self, form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["explain", "--arch", "sm_90", "--batch-invariant", "1", "--decode-backend", "flashmla", *form]
        assert cli.main(argv) == 1
        text = capsys.readouterr().out
        assert "flashmla" in text and "not batch-invariant" in text
        if form:
            assert "flashmla" in json.loads(text)["reasons"]

    def test_a_bad_variable_is_2_and_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes!")
        assert cli.main(["explain", "--arch", "sm_90"]) == 2
        assert "VLLM_BATCH_INVARIANT=yes!" in capsys.readouterr().err

    def test_variables(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["explain", "--variables", "--json"]) == 0
        assert [row["name"] for row in json_of(capsys)] == [variable.name for variable in VARIABLES]
        assert cli.main(["explain", "--variables"]) == 0
        assert VARIABLES[0].meaning in capsys.readouterr().out


class TestDoctor:
    def test_rows(self, capsys: pytest.CaptureFixture[str]) -> None:
        code = cli.main(["doctor", "--json"])
        data = json_of(capsys)
        values = {(row["section"], row["name"]): row["value"] for row in data["rows"]}
        assert code == 0 and data["ok"], data
        assert values["versions", "torch"] == torch.__version__
        assert values["selection", "decode selected"].startswith("triton_mla (automatic)")
        assert "launch" in {section for section, _ in values}

    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor"]) == 0
        text = capsys.readouterr().out
        assert text.count("versions") == 1 and "decode selected" in text

    def test_a_probe_that_raises_is_a_row(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken() -> doctor.Findings:
            yield "first", "fine"
            raise OSError("no such driver")

        monkeypatch.setattr(doctor, "PROBES", (broken, doctor.versions))
        assert cli.main(["doctor", "--json"]) == 1
        data = json_of(capsys)
        assert not data["ok"]
        assert [row["value"] for row in data["rows"]][:2] == ["fine", "OSError: no such driver"]
        assert data["rows"][1]["failed"] and not data["rows"][2]["failed"]

    def test_without_gpu_and_interpreter_nothing_crashes(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(knobs.runtime, "interpret", False)
        cli.main(["doctor"])
        text = capsys.readouterr().out
        assert "TRITON_INTERPRET=1 before triton is imported; `triton-mla verify` sets it by itself" in text
        assert "no kernel runs without the interpreter" in text and "none that torch can use" in text


class TestVerify:
    @pytest.fixture
    def result(self, monkeypatch: pytest.MonkeyPatch) -> Report:
        report = Report(
            profile="interpreter",
            environment={**dict.fromkeys(("python", "torch", "triton", "numpy"), "1"), "device": {"name": "test"}},
            sources={"plan.py": "0"},
            fingerprint={"digest": "d" * 64, "kernel_sources": "s" * 64},
            created="2030-01-02T03:04:05Z",
            checks=[CheckResult("size", "batch", "passed", 1234, 0, 0.1)],
            controls=[ControlResult("splits", "passed", 2, 2, 0.1)],
        )
        monkeypatch.setattr(verification, "run", lambda *args, **options: report)
        monkeypatch.setattr(knobs.runtime, "interpret", True)
        return report

    def test_passed_is_0(self, result: Report, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["verify", "--device", "cpu"]) == 0
        text = capsys.readouterr().out
        assert "1234" in text and "the contract holds here as far as the interpreter can show" in text

    def test_a_failed_check_is_1_and_named(self, result: Report, capsys: pytest.CaptureFixture[str]) -> None:
        result.checks.append(CheckResult("order", "batch", "failed", 9, 2, 0.1, "reversed; rotated"))
        assert cli.main(["verify", "--device", "cpu"]) == 1
        text = capsys.readouterr().out
        assert "reversed; rotated" in text and "THE CONTRACT IS NOT PROVEN HERE" in text

    def test_a_failed_control_is_1(self, result: Report, capsys: pytest.CaptureFixture[str]) -> None:
        result.controls.append(ControlResult("leak", "failed", 2, 0, 0.1, "equal: both"))
        assert cli.main(["verify", "--device", "cpu"]) == 1
        assert "equal: both" in capsys.readouterr().out

    def test_json_and_record(self, result: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "evidence.json"
        assert cli.main(["verify", "--device", "cpu", "--json", "--record", str(file)]) == 0
        data = json_of(capsys)
        assert json.loads(file.read_text(encoding="utf-8")) == data
        assert data["passed"] and data["source_digest"] == "s" * 64
        assert {"environment", "fingerprint", "checks", "controls", "golden", "sources"} <= data.keys()

    def test_a_record_that_cannot_be_written_is_refused_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(verification, "run", lambda *args, **options: pytest.fail("the run has begun"))
        for file in (tmp_path, tmp_path / "none" / "file.json", Path("/proc/version")):
            assert cli.main(["verify", "--device", "cpu", "--record", str(file)]) == 2
            assert f"record={file}: it cannot be written" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_an_earlier_record_is_kept_until_the_run_is_over(self, result: Report, tmp_path: Path) -> None:
        file = tmp_path / "evidence.json"
        file.write_text("earlier", encoding="utf-8")
        verify._check_writable(file)
        assert file.read_text(encoding="utf-8") == "earlier"
        verify._check_writable(tmp_path / "new.json")
        assert list(tmp_path.iterdir()) == [file]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
    def test_the_interpreter_is_turned_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With one check and one control of the suite; no kernel could run without."""
        few = "from triton_mla.verification import suite\nsuite.CHECKS[1:], suite.CONTROLS[1:] = [], []\n"
        monkeypatch.setattr(verify, "_WITH_INTERPRETER", verify._WITH_INTERPRETER.replace("sys.exit", few + "sys.exit"))
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # to be there again: the knob writes the variable, and is put back before it
        monkeypatch.setattr(knobs.runtime, "interpret", False)
        file = tmp_path / "evidence.json"
        assert cli.main(["verify", "--quick", "--jobs", "1", "--record", str(file)]) == 0
        data = json.loads(file.read_text(encoding="utf-8"))
        assert data["fingerprint"]["arch"] == "interpreter" and data["passed"]
        assert [row["status"] for row in data["checks"] + data["controls"]] == ["passed", "skipped", "passed"]

    @pytest.mark.slow
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
    def test_the_whole_command(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        file = tmp_path / "evidence.json"
        command = [sys.executable, "-m", "triton_mla", "verify", "--quick", "--record", str(file)]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        data = json.loads(file.read_text(encoding="utf-8"))
        assert data["fingerprint"]["arch"] == "interpreter" and data["passed"]
        assert sum(row["comparisons"] for row in data["checks"]) > 60
        assert not answer.stderr  # no progress where there is no terminal, and no warnings


def test_columns_line_up() -> None:
    assert columns([("a", "1", "x"), ("bb", "22", "")], right=(1,)) == "a    1  x\nbb  22"
    assert columns([]) == ""


def test_progress_is_shown_on_terminals_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        line = ProgressLine(stream)
        line(1, 4, "page size")
        line.clear()
    assert "1/4 page size" in terminal.getvalue() and terminal.getvalue().endswith("\x1b[K")
    assert file.getvalue() == ""
