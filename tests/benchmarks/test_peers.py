"""Other implementations: what is missing is told, and what is there gets the arguments it expects."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_fakes import measure

from benchmarks import absorbed_peers
from benchmarks.implementation import Implementation
from benchmarks.peers import Peers, Unavailable
from benchmarks.registry import REGISTRY
from benchmarks.workloads import RANK, SOFTMAX_SCALE, Workload

SMALL = Workload("decode", 16, (70, 3, 600), dtype="float32")


def test_what_is_not_here_has_a_reason():
    absent = {name: i.available(Peers(None)) for name, i in REGISTRY["decode"].items()}
    assert absent["flashmla"] == absent["fa3_mla_auto"] == absent["vllm_triton_1"] == "no --peers folder"
    for name in ("sglang", "flashinfer"):
        if not torch.cuda.is_available():
            assert f"{name}" in absent["sglang_det" if name == "sglang" else name]
    assert absent["triton_mla"] is absent["torch"] is absent["triton_mla_adaptive"] is None


def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Heads [H, 576] over tokens [n, 576]: [H, 512]."""
    return ((q @ kv.T) * SOFTMAX_SCALE).softmax(-1) @ kv[:, :RANK]


def sglang_like(q, k, v, out, starts, slots, partials, lse, own_splits, splits, scale, *, k_scale, v_scale):
    """SGLang's arguments, and torch."""
    assert partials.shape == (len(q), q.shape[1], splits, RANK) and splits == int(own_splits.max()) and scale == SOFTMAX_SCALE
    for r in range(len(q)):
        out[r] = attend(q[r], k[slots[starts[r] : starts[r + 1]], 0])


class FlashInferLike:
    """FlashInfer's wrapper, and torch."""

    def __init__(self, workspace: torch.Tensor): ...

    def plan(self, q_starts, page_starts, pages, lens, heads, rank, rope, page_size, causal, scale, q_dtype, kv_dtype):
        self.arguments = (page_starts, pages, lens)

    def run(self, q_latent, q_rope, latent, k_rope):
        starts, pages, lens = self.arguments
        q, kv = torch.cat([q_latent, q_rope], -1), torch.cat([latent, k_rope], -1)
        return torch.stack([attend(q[r], kv[pages[starts[r] : starts[r + 1]].long()].flatten(0, 1)[: lens[r]]) for r in range(len(q))])


@pytest.mark.parametrize("prepare", [absorbed_peers.sglang_det, absorbed_peers.flashinfer], ids=["sglang", "flashinfer"])
def test_peers_get_the_tokens_of_each_request(prepare):
    peers = SimpleNamespace(sglang=sglang_like, flashinfer=SimpleNamespace(mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInferLike)))
    m = measure(SMALL, Implementation("peer", lambda inputs, _: prepare(inputs, peers)))
    assert not m.failed and m.errors["peer"] < 1e-5


def test_missing_peer_files(tmp_path: Path):
    peers = Peers(tmp_path)
    with pytest.raises(Unavailable, match="no _flashmla_C.abi3.so under"):
        peers.flashmla  # noqa: B018
    assert peers.digests() == {}


def test_a_peer_file_loads_without_its_package(tmp_path: Path):
    (tmp_path / "triton_decode_attention.py").write_text(
        "from vllm.platforms import current_platform\nfrom vllm.triton_utils import tl, triton\n"
        "is_hip = current_platform.is_rocm()\n"
    )
    before = sys.modules.get("vllm")
    module = Peers(tmp_path).vllm_triton
    assert module.is_hip is False and module.triton.__name__ == "triton"
    assert sys.modules.get("vllm") is before
