"""The ops have no gradients: they refuse what would lose one, and run where none is recorded."""

import pytest
import torch

from triton_mla import (
    absorb_query,
    merge_attn_states,
    mla_decode,
    mla_extend,
    mla_prefill,
    mla_prefill_paged,
    project_kv,
    project_values,
    write_kv_cache,
)
from triton_mla import companion as C
from triton_mla.mode import batch_invariant_mode
from triton_mla.testing import assert_bitwise_equal


def cases(device):
    """op, its tensors by name, and its other arguments."""
    def floats(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)

    starts, ids = torch.tensor([0, 2, 4], dtype=torch.int32, device=device), torch.tensor([[0, 1]] * 4, dtype=torch.int32, device=device)
    x = floats(4, 16)
    return {
        "matmul": (C.matmul, {"a": x, "b": floats(16, 16), "out": floats(4, 16)}, {}),
        "linear": (C.linear, {"x": x, "weight": floats(16, 16), "bias": floats(16)}, {}),
        "bmm": (C.bmm, {"a": floats(2, 4, 16), "b": floats(2, 16, 16)}, {}),
        "grouped_linear": (C.grouped_linear, {"x": x, "weight": floats(2, 16, 16)}, {"group_starts": starts}),
        "moe_experts": (C.moe_experts, {"x": x, "gate_up": floats(2, 32, 16), "down": floats(2, 16, 16), "topk_weights": floats(4, 2)}, {"topk_ids": ids}),
        "rms_norm": (C.rms_norm, {"x": x, "weight": floats(16), "residual": floats(4, 16)}, {}),
        "softmax": (C.softmax, {"x": x}, {}),
        "log_softmax": (C.log_softmax, {"x": x}, {}),
        "mean": (C.mean, {"x": x}, {}),
        "silu_and_mul": (C.silu_and_mul, {"x": x}, {}),
        "rotary_embedding": (C.rotary_embedding, {"x": floats(4, 2, 16), "cos": floats(4, 8), "sin": floats(4, 8)}, {"interleaved": True}),
        "route_tokens": (C.route_tokens, {"logits": x, "correction_bias": floats(16)}, {"top_k": 2}),
        "ordered_all_reduce": (C.ordered_all_reduce, {"x": x}, {}),
    }


def attention_cases(device):
    def floats(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)

    starts, lens, table = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2], [3], [[0]]))
    cache, slots = floats(1, 16, 48), torch.tensor([3, 4], device=device)
    scale = {"softmax_scale": 0.2}
    paged = {**scale, "block_table": table, "seq_lens": lens}
    latent = {"kv_lora_rank": 32}
    lse = floats(2, 1)
    return {
        "mla_decode": (mla_decode, {"q": floats(1, 2, 48), "kv_cache": cache}, {**paged, **latent}),
        "mla_extend": (mla_extend, {"q": floats(2, 2, 48), "kv_cache": cache}, {**paged, **latent, "cu_seqlens_q": starts}),
        "mla_prefill": (mla_prefill, {"q": floats(2, 2, 32), "k_nope": floats(2, 2, 16), "k_pe": floats(2, 16), "v": floats(2, 2, 16)},
                        {**scale, "cu_seqlens_q": starts, "cu_seqlens_k": starts}),
        "mla_prefill_paged": (mla_prefill_paged, {"q": floats(2, 2, 32), "kv_cache": cache, "w_kv_b": floats(64, 32)},
                              {**paged, **latent, "cu_seqlens_q": starts, "qk_nope_head_dim": 16, "v_head_dim": 16}),
        "merge_attn_states": (merge_attn_states, {"out_a": floats(2, 1, 16), "out_b": floats(2, 1, 16), "lse_a": lse, "lse_b": lse.clone()}, {}),
        "write_kv_cache": (write_kv_cache, {"kv_c": floats(2, 32), "k_pe": floats(2, 16), "kv_cache": cache}, {"slot_mapping": slots}),
        "project_kv": (project_kv, {"latent": floats(2, 32), "w_kv_b": floats(64, 32)}, {}),
        "absorb_query": (absorb_query, {"q_nope": floats(2, 2, 16), "w_uk": floats(2, 16, 32)}, {}),
        "project_values": (project_values, {"out_latent": floats(2, 2, 32), "w_uv": floats(2, 32, 16)}, {}),
    }


ALL = {**cases("cpu"), **attention_cases("cpu")}


@pytest.mark.parametrize("op", ALL)
def test_a_lost_gradient_is_refused(device, op):
    call, tensors, others = {**cases(device), **attention_cases(device)}[op]
    for name, value in tensors.items():
        value.requires_grad_()
        for _ in range(2):  # a product remembers the arguments that it has checked
            with pytest.raises(ValueError, match=f"^{name} requires grad"):
                call(**tensors, **others)
            if op != "ordered_all_reduce":  # of no process group
                with torch.no_grad():
                    call(**tensors, **others)
                call(**{key: tensor.detach() for key, tensor in tensors.items()}, **others)
        value.requires_grad_(False)


@pytest.mark.parametrize("op", ["mla_decode", "matmul"])
def test_a_call_below_autograd_does_not_stand_for_one_above(device, op):
    """Both remember the arguments that they have checked, and whether gradients were recorded is one of the facts."""
    call, tensors, others = {**cases(device), **attention_cases(device)}[op]
    tensors.pop("out", None)
    next(iter(tensors.values())).requires_grad_()
    for _ in range(2):
        with torch._C._AutoDispatchBelowAutograd():
            call(**tensors, **others)
        with pytest.raises(ValueError, match="requires grad"):
            call(**tensors, **others)


def test_every_op_is_here():
    assert set(cases("cpu")) == set(C.__all__)


def test_the_modes_gradients_and_an_op_in_it(device):
    """The mode calls the same ops below autograd, which has formulas of its own."""
    x, w = torch.randn(4, 16, device=device), torch.randn(8, 16, device=device, requires_grad=True)
    with batch_invariant_mode(strict=True):
        for _ in range(2):
            total = torch.nn.functional.linear(x, w)
            with pytest.raises(ValueError, match="weight requires grad"):
                C.linear(x, w)
            with pytest.raises(ValueError, match="b requires grad"):
                C.matmul(x, w.t())
        total.sum().backward()
    assert_bitwise_equal(total.detach(), C.linear(x, w.detach()))
    torch.testing.assert_close(w.grad, x.sum(0).expand(8, -1))


def test_operators_leave_it_to_autograd(device):
    """In compiled code the forward pass runs, and the gradient is an error."""
    x, w = torch.randn(4, 16, device=device), torch.randn(8, 16, device=device, requires_grad=True)
    out = torch.compile(C.linear, backend="eager")(x, w)
    assert_bitwise_equal(out.detach(), C.linear(x, w.detach()))
    with pytest.raises(RuntimeError, match="autograd"):
        out.sum().backward()


def test_rows_refuse_what_is_no_tile(device):
    x = torch.ones(2, 16, device=device)
    for op in (C.softmax, C.log_softmax, lambda x, tile: C.rms_norm(x, None, tile=tile), C.mean):
        with pytest.raises(ValueError, match="tile='wide' must be a RowTile, or None"):
            op(x, tile="wide")


def test_weights_of_experts_as_they_are_stored(device):
    call, tensors, others = cases(device)["moe_experts"]
    with pytest.raises(ValueError, match="topk_weights is a view of the negatives"):
        call(**{**tensors, "topk_weights": torch._neg_view(tensors["topk_weights"])}, **others)
