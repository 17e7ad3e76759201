"""The name of a device's architecture, and what happens on one without schedules."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from triton_mla import checks, cli, merge_attn_states, mla_decode, mla_extend, policy, write_kv_cache
from triton_mla.checks import runnable
from triton_mla.cli import doctor
from triton_mla.config import Settings
from triton_mla.dims import MLADims
from triton_mla.errors import UnsupportedError
from triton_mla.plan import plan_attention
from triton_mla.tuning import ARCHITECTURES, arch_of

GPU = torch.device("cuda", 0)
needs_cuda_build = pytest.mark.skipif(torch.version.hip is not None, reason="a HIP build names GPUs in another way")


@pytest.fixture
def old_gpu(monkeypatch):
    """A GPU of compute capability 7.5, for whatever asks torch."""

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    checks._arch.cache_clear()
    yield
    checks._arch.cache_clear()


@needs_cuda_build
@pytest.mark.parametrize(
    "capability, name",
    [((9, 0), "sm_90"), ((8, 7), "sm_86"), ((10, 3), "sm_100"), ((12, 1), "sm_120"), ((7, 5), "sm_75")],
)
def test_name_of_a_gpu(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert arch_of(GPU) == name


@pytest.mark.parametrize("on, name", [(True, "interpreter"), (False, "cpu")])
def test_name_of_a_cpu(monkeypatch, on, name):
    monkeypatch.setattr(knobs.runtime, "interpret", on)
    assert arch_of(torch.device("cpu")) == name


def test_name_of_another_device():
    assert arch_of(torch.device("meta")) == "meta"


@pytest.mark.parametrize("arch", ["sm_75", "cpu", "meta"])
def test_a_plan_for_it_is_refused(arch):
    assert arch not in ARCHITECTURES
    with pytest.raises(ValueError, match=f"arch='{arch}' must be one of .*sm_90"):
        plan_attention(num_tokens=1, batch_size=1, num_heads=1, max_seq_len=1, arch=arch)


@needs_cuda_build
def test_operations_refuse_it(old_gpu, monkeypatch):
    """On tensors that are nowhere, so that a launch would fail in another way."""
    monkeypatch.setattr(checks, "_has_memory", lambda value: True)

    def empty(*shape, dtype=torch.float16):
        return torch.empty(shape, dtype=dtype, device=GPU)

    with FakeTensorMode():
        cache, q, latent, rope = empty(2, 16, 80), empty(2, 1, 80), empty(2, 64), empty(2, 16)
        table, lens, starts = (empty(*shape, dtype=torch.int32) for shape in ((2, 1), (2,), (3,)))
        out, lse, slots = empty(2, 1, 64), empty(2, 1, dtype=torch.float32), empty(2, dtype=torch.int64)
        options = {"softmax_scale": 0.1, "kv_lora_rank": 64}
        calls = {
            "kv_cache": [
                lambda: mla_decode(q, cache, table, lens, **options),
                lambda: mla_extend(q, cache, table, starts, lens, **options),
                lambda: write_kv_cache(latent, rope, cache, slots),
            ],
            "out_a": [lambda: merge_attn_states(out, lse, out, lse)],
        }
        for name, some in calls.items():
            for call in some:
                with pytest.raises(ValueError, match=f"{name} is on cuda:0, a GPU of sm_75; kernels have schedules for .*sm_90"):
                    call()
    with pytest.raises(ValueError, match="device=cuda:0, a GPU of sm_75"):
        runnable(GPU)


@needs_cuda_build
@pytest.mark.parametrize("invariant", [True, False])
def test_a_selection_says_why(old_gpu, invariant):
    with pytest.raises(UnsupportedError) as caught:
        policy.resolve(None, dims=MLADims(16), settings=Settings(batch_invariant=invariant), device=GPU)
    assert "architecture sm_75 is not supported (allowed: sm_80" in caught.value.reasons["triton_mla"][0]


@pytest.fixture
def machine(old_gpu, monkeypatch):
    """One with that GPU and no other."""
    from triton_mla.verification import environment

    about = {"name": "old", "memory": 1 << 30, "driver": "1", "cuda": "13"}
    monkeypatch.setattr(environment, "describe_device", lambda device: about)
    for name, value in {"is_available": True, "device_count": 1, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@needs_cuda_build
def test_the_doctor_says_why(machine):
    rows = {(row.section, row.name): row for row in doctor.examine()}
    assert "sm_75" in rows["devices", "cuda:0"].value
    assert rows["architecture", "this device"].value == "sm_75: no tables for it, so no kernel runs"
    assert rows["launch", "decode"].value == "not tried: no kernel runs on sm_75"
    assert "architecture sm_75 is not supported" in rows["selection", "triton_mla"].value
    assert rows["selection", "error"].value == "ValueError: no backend can serve decode on sm_75"
    assert [place for place, row in rows.items() if row.failed] == [("selection", "error")]


@needs_cuda_build
def test_explain_says_why(machine, capsys):
    assert cli.main(["explain", "--batch-invariant", "1", "--json"]) == 1
    assert "architecture sm_75 is not supported" in json.loads(capsys.readouterr().out)["reasons"]["triton_mla"][0]


@needs_cuda_build
def test_verify_refuses_it(machine, capsys):
    assert cli.main(["verify"]) == 1
    assert "device=cuda:0, a GPU of sm_75" in capsys.readouterr().err
