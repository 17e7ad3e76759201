"""The proof in vLLM, without it: comparison, verdicts, the processes' environment and the course of a run, with processes that only write files."""

import json
import sys
from multiprocessing import Pipe

import pytest

from determinism import vllm as proof
from determinism import vllm_throughput
from determinism.vllm_engine import CONTROL, ENGINES, OURS, Engine, compare
from determinism.vllm_throughput import prompts

ROW = {"pairs": 4, "mismatches": 0, "requests": 2, "requests_hit": 0, "max_difference": 0.0, "row": "a row", "needs": {}}


def test_compare_sees_one_bit_and_another_token():
    a = [[(1, -0.5), (2, -1.0)], [(3, -2.0), (4, -3.0)]]
    assert compare(a, a) == {"pairs": 4, "mismatches": 0, "requests": 2, "requests_hit": 0, "max_difference": 0.0}
    bit = [[(1, -0.5), (2, -1.0000000000000002)], a[1]]
    assert compare(a, bit)["mismatches"] == 1 and compare(a, bit)["requests_hit"] == 1 and 0 < compare(a, bit)["max_difference"] < 1e-15
    zero = compare([[(1, 0.0)]], [[(1, -0.0)]])
    assert zero["mismatches"] == 1
    token = compare(a, [a[0], [(9, -2.0), (4, -9.0)]])
    assert token["mismatches"] == 2 and token["max_difference"] == 0.0  # after another token the history is another
    with pytest.raises(ValueError):
        compare(a, a[:1])


def test_prompts_follow_their_seed():
    assert prompts(1, 3, 5, 9, 100) == prompts(1, 3, 5, 9, 100) != prompts(2, 3, 5, 9, 100)
    assert all(5 <= len(prompt) <= 9 and max(prompt) < 100 for prompt in prompts(1, 20, 5, 9, 100))


@pytest.mark.parametrize("kind, change, passed", [
    (OURS, {}, True), (OURS, {"mismatches": 1}, False), (OURS, {"pairs": 0}, False), (OURS, {"needs": {"cached": 0}}, False),
    (OURS, {"needs": {"cached": 7}}, True), (CONTROL, {}, False), (CONTROL, {"mismatches": 3}, True),
])
def test_verdicts(kind, change, passed):
    engine = Engine("one", "CUSTOM", (), kind=kind)
    rows = list(proof.rows_of([engine], {"one": {"state": "done", "rows": [{**ROW, "engine": "one", "kind": kind, **change}]}}))
    assert [row["passed"] for row in rows] == [passed]


def test_an_engine_that_did_not_finish_fails():
    for left in ({}, {"state": "partial", "rows": []}):
        (row,) = proof.rows_of([Engine("one", "CUSTOM", ())], {"one": left})
        assert not row["passed"]


@pytest.mark.parametrize("other, name", [("ours_no_graphs", "CUDA graphs on and off"), ("ours_drafts", "drafts on and off")])
def test_what_one_engine_has_and_another_has_not_is_compared_between_them(other, name):
    engines = [engine for engine in ENGINES if engine.name in ("ours", other)]
    left = {name: {"state": "done", "rows": [], "results": {"long": [[(1, value)]]}} for name, value in (("ours", -0.5), (other, -0.25))}
    (row,) = proof.rows_of(engines, left)
    assert row["row"] == name and row["mismatches"] == 1 and not row["passed"]


def test_aims_hold_only_what_was_measured():
    cell = {"tokens_per_second": 9000.0, "ms_per_step": 1.0, "prefill_seconds": 6.0, "run": "one", "windows_ms_per_step": [1.0]}
    assert proof.aims_of({}) == []
    left = {"ours": {"throughput": {"32768 x 32": cell}}, "flash_attn_mla": {"throughput": {"32768 x 32": {**cell, "prefill_seconds": 4.0}}}}
    aims = {aim["aim"]: aim["met"] for aim in proof.aims_of(left)}
    assert aims == {"32768 x 32: tokens/s at least 8200.0": True, "32768 x 32: seconds of prefill at most 1.2 times FLASH_ATTN_MLA's": False}


def test_an_engine_4_percent_behind_another_misses_its_aim():
    def cells(ms):
        return {"throughput": {"4096 x 1": {"run": "one", "windows_ms_per_step": [ms] * 9}}}

    for other, met in ((0.96, False), (0.98, True)):
        (aim,) = proof.aims_of({"ours": cells(1.0), "flash_attn_mla": cells(other)})
        assert aim["aim"] == "4096 x 1: at most 3 % behind flash_attn_mla" and aim["met"] is met
    assert proof.aims_of({"ours_keep": cells(1.0), "flash_attn_mla": cells(0.5)}) == []


def test_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_MLA_PREFILL_PATH", "absorbed")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    monkeypatch.setattr(proof, "entry_points", lambda group: ())  # as in a checkout that is not installed
    by_name = {engine.name: proof.environment(engine, tmp_path) for engine in ENGINES}
    assert by_name["ours"]["VLLM_BATCH_INVARIANT"] == "1" and by_name["triton_mla_flag_off"]["VLLM_BATCH_INVARIANT"] == "0"
    assert by_name["ours_keep"]["TRITON_MLA_PREFIX_CACHING"] == "keep"
    assert not any("TRITON_MLA_PREFILL_PATH" in env for env in by_name.values()), "a proof is of the defaults"
    assert {env["VLLM_HOST_IP"] for env in by_name.values()} == {"10.0.0.1"}
    assert by_name["ours_no_graphs"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    (points,) = tmp_path.glob("site/*/entry_points.txt")
    assert "triton_mla.integrations.vllm:register" in points.read_text()


STAND_IN = """
import json, pathlib, sys
from multiprocessing.connection import Connection
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
row = {"engine": name, "kind": sys.argv[3], "row": "a row", "pairs": 2, "mismatches": int(sys.argv[3] != "ours"), "requests": 1, "requests_hit": 0,
       "max_difference": 0.0, "needs": {}}
if sys.argv[4]:
    channel = Connection(int(sys.argv[4]))
    channel.send("ready")
    while (command := channel.recv()) is not None:
        channel.send({"begin": 0.5, "window": 0.064 if name == "ours" else 0.128, "end": None}[command[0]])
data = {"state": "done", "rows": [row], "results": {}, "info": {"gpu": "NVIDIA H200"}}
(folder / f"{name}.json").write_text(json.dumps(data))
"""


def test_a_run(tmp_path, monkeypatch, capsys):
    def start(engine, folder, args):
        ours, theirs = Pipe() if engine.throughput else (None, None)
        handle = [theirs.fileno()] if theirs else []
        command = [sys.executable, "-c", STAND_IN, engine.name, str(folder), engine.kind, *(map(str, handle) if handle else [""])]
        process = proof.Process(proof.subprocess.Popen(command, pass_fds=handle), ours)
        if theirs:
            theirs.close()
        return process

    monkeypatch.setattr(proof, "_start", start)
    monkeypatch.setattr(vllm_throughput, "CELLS", {(4096, 1): 2})
    monkeypatch.setattr(proof, "needs", lambda: "")
    monkeypatch.setattr(proof, "make_model", lambda folder, v3_shape: folder.mkdir())
    arguments = ["--engines", "ours,triton_mla,ours_v3_shape", "--folder", str(tmp_path / "work"), "--out", str(tmp_path / "records"), "--limit", "60"]
    assert proof.main(arguments) == 0
    out = capsys.readouterr().out
    assert "| ours | a row | 0 of 2 |" in out and "differs, as it must" in out and "| triton_mla | 4096 x 1 | 250.0 | 4.0, 4.0 to 4.0 |" in out
    assert "| ours | triton_mla | 4096 x 1 | 2.000, 2.000 to 2.000 | 4 |" in out
    (record,) = (tmp_path / "records").glob("nvidia_h200_*.json")
    data = json.loads(record.read_text())
    assert data["passed"] and len(data["rows"]) == 3 and data["sources"] and data["source_digest"]
    assert set(data["engines"]) == {"ours", "triton_mla", "ours_v3_shape"} and data["speeds"][0]["median"] == 2
    assert data["aims"] == [{"aim": "4096 x 1: at most 3 % behind triton_mla", "measured": 2.0, "bound": 0.97, "met": True}]
    assert proof.main(["--engines", "ours_small_cache", *arguments[2:]]) == 0  # another part of the same day's record
    data = json.loads(record.read_text())
    assert len(data["rows"]) == 4 and data["engines"]["ours"]["throughput"] and "ours_small_cache" in data["engines"]
    assert proof.main([*arguments, "--no-compare"]) == 0
    assert [row["engine"] for row in json.loads(record.read_text())["rows"]].count("ours_v3_shape") == 1


def test_a_record_keeps_what_a_run_did_not_do(tmp_path):
    """Another part of the day's run leaves rows of other engines, and those between two engines, which it did not make."""
    def row(engine, name, mismatches=0):
        return {**ROW, "engine": engine, "row": name, "mismatches": mismatches, "passed": not mismatches}

    between = proof.BETWEEN["ours_no_graphs"]
    first = [row("ours", "alone"), row("ours_no_graphs", "long"), row("ours_no_graphs", between)]
    proof._merged(tmp_path, first, {}, {"ours", "ours_no_graphs"})
    again = proof._merged(tmp_path, [row("ours_no_graphs", "long", 1)], {}, {"ours_no_graphs"})
    assert [(r["engine"], r["row"], r["passed"]) for r in again["rows"]] == [
        ("ours", "alone", True), ("ours_no_graphs", between, True), ("ours_no_graphs", "long", False)]
    assert [r["row"] for r in proof._merged(tmp_path, first[1:], {}, {"ours_no_graphs"})["rows"]] == ["alone", "long", between]


def test_what_it_needs_is_told_before_anything_is_written(tmp_path, monkeypatch, capsys):
    for installed, said in ((None, "engines of vLLM, which is not installed here"), (object(), "needs a CUDA device")):
        monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name, installed=installed: installed)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(SystemExit):
            proof.main(["--folder", str(tmp_path / "work"), "--out", str(tmp_path / "records")])
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_engine_is_refused(capsys):
    with pytest.raises(SystemExit):
        proof.main(["--engines", "ours,theirs"])
    assert "theirs" in capsys.readouterr().err
