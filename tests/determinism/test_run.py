"""The command: sound models pass, broken ones and controls without effect fail it."""

import json
from dataclasses import replace

import pytest
import torch
from fake_model import FORMS, FakeModel
from lanes import ON_GPU

from determinism import scenarios
from determinism.controls import SPLIT_BY_ROWS
from determinism.models import MODELS, small
from determinism.rows import Plan, bench_of, run_row
from determinism.run import main, run

FORM_CONTROLS = ["generated tokens in the prefix cache of mha prompts", "recomputed tokens routed as prompt"]


@pytest.fixture(autouse=True)
def no_benches():
    """A process keeps models and references by the name of the model."""
    bench_of.cache_clear()
    yield
    bench_of.cache_clear()


@pytest.fixture
def fake(monkeypatch):
    """Puts a model without kernels in the small one's place."""

    def put(model=FakeModel):
        monkeypatch.setitem(MODELS, "small", lambda device, **options: model)

    return put


@pytest.fixture
def tiny(monkeypatch, device):
    """Two short requests, for models with kernels."""
    sizes = scenarios.SIZES[device.type, True]
    lengths = (3, sizes.page_size + 1)
    monkeypatch.setitem(scenarios.SIZES, (device.type, True), replace(sizes, lengths=lengths, new_tokens=2, needle=1, turns=(), batches=(2,), budgets=((9,),)))


def command(*names):
    return main(["--quick", "--device", "cpu", "--jobs", "1", "--scenarios", *names])


on_cpu = pytest.mark.skipif(ON_GPU, reason="the command starts a process of its own where the interpreter is off")


@on_cpu
def test_a_sound_model_passes_all_that_needs_no_kernel(fake, tmp_path, capsys):
    fake()
    names = [s.name for s in scenarios.SCENARIOS if s.name != "tp"]
    file = tmp_path / "evidence.json"
    assert main(["--quick", "--device", "cpu", "--jobs", "1", "--json", str(file), "--scenarios", *names, *FORM_CONTROLS]) == 0
    evidence = json.loads(file.read_text())
    assert evidence["passed"] and evidence["differing"] == 0 < evidence["compared"]
    assert {row["form"] for row in evidence["rows"]} == {"absorbed", "mha"}
    assert evidence["compared"] == sum(row["compared"] for row in evidence["rows"] if row["kind"] == "scenario" and row["name"] != "bs1")
    out = capsys.readouterr().out
    assert "no bit follows the batch here" in out and f"{evidence['compared']} rows of log-probabilities" in out


@on_cpu
def test_a_row_that_follows_the_batch_fails_the_command(fake, capsys):
    class Broken(FakeModel):
        def row(self, token, position, table, length, caches):
            return super().row(token, position, table, length, caches) + 1e-6 * (position == 4) * self.steps[-1]

    fake(Broken)
    assert command("bsN", *FORM_CONTROLS) == 1
    out = capsys.readouterr().out
    assert "bits differ" in out and "request 0, 4" in out and "INVARIANCE IS NOT PROVEN HERE" in out


@on_cpu
def test_a_control_without_effect_fails_the_command(fake, monkeypatch, capsys):
    fake()
    monkeypatch.setitem(FORMS, "mha", FORMS["absorbed"])
    assert command("bsN", *FORM_CONTROLS) == 1
    assert "no bit differs" in capsys.readouterr().out


def test_controls_are_part_of_every_proof():
    plan = Plan("small", torch.device("cpu"), True)
    everything = plan.items(None)
    named = {name for name, _ in everything if name not in {s.name for s in scenarios.SCENARIOS}}
    assert len(named) == 6
    assert {name for name, _ in plan.items(["bsN"])} == named | {"bsN"}
    assert {name for name, _ in plan.items(["bsN", *FORM_CONTROLS])} == {"bsN", *FORM_CONTROLS}


@on_cpu
def test_a_scenario_in_which_nothing_happened_fails(fake, monkeypatch, capsys):
    fake()
    sizes = scenarios.SIZES["cpu", True]
    monkeypatch.setitem(scenarios.SIZES, ("cpu", True), replace(sizes, budgets=((1000,),)))
    assert command("chunk budgets", *FORM_CONTROLS) == 1
    assert "it had no chunks" in capsys.readouterr().out


@on_cpu
def test_references_alone_prove_nothing(fake, capsys):
    fake()
    assert command("bs1", *FORM_CONTROLS) == 1
    assert "0 rows of log-probabilities compared" in capsys.readouterr().out


@on_cpu
def test_an_error_is_a_failed_row(fake, capsys):
    class Broken(FakeModel):
        def plan(self, layout):
            raise RuntimeError("no plan")

    fake(Broken)
    assert command("bsN", *FORM_CONTROLS) == 1
    assert "RuntimeError: no plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--model", "large"], "model='large' must be one of small, deepseek_v3"), (["--scenarios", "bs2"], "scenarios='bs2' must be one of: bs1"),
     (["--device", "cuda:999"], "device=cuda:999"), (["--json", "/nowhere/x.json"], "json=/nowhere/x.json: it must be a file in a folder that exists")],
)
def test_wrong_usage(arguments, message, capsys):
    assert main([*arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers 5"):
        MODELS["deepseek_v3"](torch.device("cpu"))


PRODUCTS = "products split by the number of rows"


def broken(monkeypatch):
    """Puts the small model with the products of its control in its own place."""
    monkeypatch.setitem(MODELS, "small", lambda device, **options: small(device, **{**options, "ops": SPLIT_BY_ROWS}))


def test_rows_of_the_small_model(tiny, device, monkeypatch):
    """One scenario and one control of the sound model, and the same scenario of the broken one."""
    plan = Plan("small", device, True)
    sound, control = (run_row(plan, name, "mha") for name in ("bsN", PRODUCTS))
    assert (sound.status, control.status) == ("passed", "passed") and sound.compared > 0 < control.differing, (sound, control)
    bench_of.cache_clear()
    broken(monkeypatch)
    caught = run_row(plan, "bsN", "mha")
    assert (caught.status, caught.detail) == ("failed", "bits differ"), caught


@pytest.mark.slow
def test_the_small_model(tiny, device):
    report = run(device, quick=True, names=["bsN", "padded replays", "chunk budgets", PRODUCTS])
    assert report.passed, report.render()


@pytest.mark.slow
def test_a_broken_small_model_is_caught(tiny, device, monkeypatch):
    broken(monkeypatch)
    report = run(device, quick=True, names=["bsN", PRODUCTS])
    assert not report.passed and report.differing > 0, report.render()
    assert [row.status for row in report.of("control")] == ["passed"]
