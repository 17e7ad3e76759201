"""Tensors whose values are not what lies at their addresses: no companion operation takes them for others."""

import pytest
import torch

from triton_mla import absorb_query
from triton_mla.companion import (
    bmm,
    grouped_linear,
    linear,
    log_softmax,
    matmul,
    mean,
    moe_experts,
    rms_norm,
    rotary_embedding,
    route_tokens,
    silu_and_mul,
    softmax,
)

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore:.*(prototype|beta) (stage|state)")]
LAYOUTS = {
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.flatten(1).to_sparse_csr(),
}
# A call with one tensor [4, 4] or [4, 4, 4] of ones; the name of the argument in whose place it is, and its dimensions.
CALLS = {
    "matmul a": (lambda t, x: matmul(t, x[0]), "a", 2),
    "matmul b": (lambda t, x: matmul(x[0], t), "b", 2),
    "matmul out": (lambda t, x: matmul(x[0], x[0], out=t), "out", 2),
    "linear": (lambda t, x: linear(x[0], t), "weight", 2),
    "bmm": (lambda t, x: bmm(x, t), "b", 3),
    "grouped_linear": (lambda t, x: grouped_linear(x[0], t, torch.zeros(5, dtype=torch.int32, device=x.device)), "weight", 3),
    "moe_experts": (lambda t, x: moe_experts(t, x, x[..., :2], x[0].int(), x[0]), "x", 2),
    "absorb_query q_nope": (lambda t, x: absorb_query(t, x), "q_nope", 3),
    "absorb_query w_uk": (lambda t, x: absorb_query(x, t), "w_uk", 3),
    "absorb_query out": (lambda t, x: absorb_query(x, x, out=t), "out", 3),
    "rms_norm": (lambda t, x: rms_norm(t, None), "x", 2),
    "rms_norm residual": (lambda t, x: rms_norm(x[0], None, residual=t), "residual", 2),
    "softmax": (lambda t, x: softmax(t), "x", 2),
    "log_softmax": (lambda t, x: log_softmax(t), "x", 2),
    "mean": (lambda t, x: mean(t), "x", 2),
    "silu_and_mul": (lambda t, x: silu_and_mul(t), "x", 2),
    "rotary_embedding": (lambda t, x: rotary_embedding(t, x[0, :, :2], x[0, :, :2], interleaved=True), "x", 3),
    "route_tokens": (lambda t, x: route_tokens(t, top_k=1), "logits", 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
def test_other_layouts_are_refused(device, call, layout):
    run, name, dims = CALLS[call]
    x = torch.ones(4, 4, 4, device=device)
    with pytest.raises(ValueError, match=f"^{name} .*dense, strided tensor"):
        run(LAYOUTS[layout](x if dims == 3 else x[0]), x)


@pytest.mark.parametrize("call", CALLS)
def test_negatives_of_what_is_stored_are_refused(device, call):
    """As the imaginary part of a conjugate is, at first and after a call with a tensor that looks the same."""
    run, name, dims = CALLS[call]
    x = torch.ones(4, 4, 4, device=device)
    negatives = torch.complex(x, x).conj().imag if dims == 3 else torch.complex(x, x)[0].conj().imag
    assert negatives.is_neg()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name} is a view of the negatives"):
            run(torch._neg_view(x if dims == 3 else x[0]), x)
        run(x.clone() if dims == 3 else x[0].clone(), x)


def test_operators_resolve_negatives(device):
    x = torch.arange(16.0, device=device).view(4, 4)
    assert torch.equal(torch.ops.triton_mla.silu_and_mul(torch._neg_view(x)), silu_and_mul(-x))
