"""The heads of a layer on 1, 2, 4 and 8 ranks: each rank has the bits of its heads in the call with all of them."""

from dataclasses import replace

import pytest
import torch
from lanes import ON_GPU

from triton_mla import BatchLayout, MLADims
from triton_mla.module import MLAAttention
from triton_mla.paths import ABSORBED, MHA, PathRule
from triton_mla.testing import Request, assert_bitwise_equal, bitwise_equal
from triton_mla.tuning import PrefillOrder, ReductionOrder

DEGREES = (1, 2, 4, 8)
HEADS = pytest.mark.parametrize("heads", [8, pytest.param(16, marks=pytest.mark.gpu), pytest.param(128, marks=pytest.mark.gpu)])


def shares(heads):
    """(which rank of how many, its heads): all ranks on a GPU, under the interpreter the last one of more than two."""
    for ranks in DEGREES:
        count = heads // ranks
        for rank in range(ranks) if ON_GPU or ranks <= 2 else (ranks - 1,):
            yield f"rank {rank} of {ranks}:", slice(rank * count, (rank + 1) * count)


def batch_of(mla, op, heads):
    return mla.batch([Request(2 * mla.order.kv_split + 6, 1 if op == "decode" else 3, key=1), Request(20, key=2)], num_heads=heads)


@HEADS
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_absorbed(mla, op, heads):
    batch = batch_of(mla, op, heads)
    whole = getattr(mla, op)(batch)
    mla.check(whole, batch)
    for name, part in shares(heads):
        getattr(mla, op)(batch, q=batch.q[:, part]).assert_same(whole[:, part], name)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_control_splits_by_the_heads_of_a_rank_differ(mla, op):
    """Longer splits where a rank has fewer heads."""
    mla = mla.with_dtype(torch.float32)
    batch = batch_of(mla, op, 8)
    whole = getattr(mla, op)(batch)
    for rank in range(2):
        part = slice(4 * rank, 4 * rank + 4)
        getattr(mla.recut(), op)(batch, q=batch.q[:, part]).assert_differs(whole[:, part])


def prompts_of(mha):
    return mha.make([(mha.tile + 3, mha.tile + 3), (5, mha.tile + 9)])


def own(batch, part):
    return replace(batch, q=batch.q[:, part], k_nope=batch.k_nope[:, part], v=batch.v[:, part])


@HEADS
def test_mha(mha, heads):
    mha = mha.with_(num_heads=heads)
    batch = prompts_of(mha)
    whole = mha.prefill(batch)
    whole.assert_close(mha.reference(batch), 4e-2 if mha.dtype == torch.bfloat16 else 2e-5)
    for name, part in shares(heads):
        mha.with_(num_heads=part.stop - part.start).prefill(own(batch, part)).assert_same(whole[:, part], name)


def test_control_tiles_by_the_heads_of_a_rank_differ(mha):
    mha = mha.with_(num_heads=8, dtype=torch.float32)
    batch = prompts_of(mha)
    whole = mha.prefill(batch)
    narrow = mha.with_(num_heads=4, order=replace(mha.order, block_n=mha.tile // 2))
    for rank in range(2):
        part = slice(4 * rank, 4 * rank + 4)
        narrow.prefill(own(batch, part)).assert_differs(whole[:, part])


class Layer:
    """`MLAAttention` with all heads or some: a decode token, a later chunk, a prompt, and one that is computed again over its end."""

    def __init__(self, mla, heads, form):
        on_gpu, page, self.form = mla.device.type == "cuda", mla.page_size, form
        self.dims = MLADims(heads) if on_gpu else MLADims(heads, mla.kv_lora_rank, mla.qk_rope_head_dim, 32, 48)
        self.order = ReductionOrder(kv_split=128) if on_gpu else ReductionOrder(block_n=16, kv_split=32)
        self.prefill_order = PrefillOrder() if on_gpu else PrefillOrder(block_n=16)
        seq_lens, prompts = [2 * page + 9, page + 6, 9, page + 2], [page, page + 6, 9, page - 1]
        self.layout = BatchLayout([1, 4, 9, 6], seq_lens, [[4, 0, 6], [2, 5], [3], [7, 1]], page, prompts)
        chance = torch.Generator().manual_seed(heads)

        def values(*shape):
            return (0.5 * torch.randn(*shape, generator=chance)).to(mla.device, mla.dtype)

        dims, tokens = self.dims, self.layout.num_tokens
        self.q, self.kv_c, self.k_pe = values(tokens, heads, dims.qk_head_dim), values(tokens, dims.kv_lora_rank), values(tokens, dims.qk_rope_head_dim)
        self.weight, self.cache = values(heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank), values(8, page, dims.latent_dim)

    def __call__(self, part):
        """[T, heads of the part, V]."""
        dims = replace(self.dims, num_heads=part.stop - part.start)
        module = MLAAttention(dims, self.weight[part].flatten(0, 1), paths=PathRule(self.form), order=self.order,
                              prefill_order=self.prefill_order)
        return module(self.q[:, part], self.kv_c, self.k_pe, self.cache.clone(), module.plan(self.layout)).unflatten(1, (dims.num_heads, -1))


@HEADS
@pytest.mark.parametrize("form", [ABSORBED, MHA])
def test_layer(mla, heads, form):
    layer = Layer(mla, heads, form)
    whole = layer(slice(0, heads))
    for name, part in shares(heads):
        assert_bitwise_equal(layer(part), whole[:, part].contiguous(), name)


@pytest.mark.parametrize("form", [ABSORBED, MHA])
def test_control_a_layer_of_another_order_differs(mla, form):
    layer, part = Layer(mla.with_dtype(torch.float32), 8, form), slice(4, 8)
    whole = layer(slice(0, 8))[:, part].contiguous()
    layer.order = replace(layer.order, kv_split=layer.order.kv_split // 2)
    layer.prefill_order = PrefillOrder(block_n=64 if ON_GPU else 32)
    assert not bitwise_equal(layer(part), whole)
