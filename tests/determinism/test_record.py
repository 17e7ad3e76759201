"""Records of GPU runs against the present sources: which of them count, and what is said of those that do not."""

import json

import pytest

from determinism import record
from triton_mla.fingerprint import ATTENTION, MODEL, VLLM, source_digest, source_files

KINDS = {"nvidia_1.json": ATTENTION, "model_nvidia_1.json": MODEL, "model_nvidia_tp2_1.json": MODEL, "vllm/nvidia_1.json": VLLM}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vllm").mkdir()
    for name, patterns in KINDS.items():
        put(tmp_path / name, patterns)
    return tmp_path


def put(path, patterns, **changes):
    path.write_text(json.dumps({"source_digest": source_digest(patterns), "sources": source_files(patterns), "passed": True, **changes}))


def test_records_of_the_present_sources(folder, capsys):
    assert record.check(folder) == 0
    assert capsys.readouterr().out.count("of these sources, passed") == len(KINDS)


@pytest.mark.parametrize("name, command", [
    ("nvidia_1.json", "determinism.record --write --tests"), ("model_nvidia_1.json", "determinism.run --json"),
    ("model_nvidia_tp2_1.json", "--tensor-parallel 2"), ("vllm/nvidia_1.json", "determinism.vllm"),
])
def test_a_record_that_does_not_count(folder, capsys, name, command):
    sources = {**source_files(KINDS[name]), "plan.py": "0"}
    put(folder / name, KINDS[name], source_digest="0", sources=sources)
    assert record.check(folder) == 1
    out = capsys.readouterr().out
    assert f"{name}: OF OTHER SOURCES; changed since: plan.py" in out and "*** NO GPU RECORD" in out and command in out
    put(folder / name, KINDS[name], passed=False)
    assert record.check(folder) == 1
    assert f"{name}: of these sources, and it FAILED" in capsys.readouterr().out


def test_without_any_record_attention_is_missed(tmp_path, capsys):
    assert record.check(tmp_path) == 1
    assert capsys.readouterr().out.count("*** NO GPU RECORD") == 1


def test_writing_needs_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        record.main(["--write", "--folder", str(tmp_path)])
    assert "--write needs a CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())
