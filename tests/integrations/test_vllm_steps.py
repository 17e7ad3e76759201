"""A step's metadata and a layer's attention in an engine of one layer, on CPU tensors through the interpreter."""

from unittest.mock import DEFAULT, Mock

import pytest
import torch
from test_vllm_fakes import DTYPE, HEADS, NOPE, PAGE, RANK, ROPE, VALUE, VERSIONS, FakeEngine, Request, VllmConfig, backend_enum, install

from triton_mla.integrations.vllm import register
from triton_mla.integrations.vllm.impl import chunk_tokens
from triton_mla.reference import mla_absorbed, mla_unabsorbed
from triton_mla.testing import assert_bitwise_equal, assert_close, bitwise_equal

ATOL = 3e-3


@pytest.fixture(params=VERSIONS)
def start(request, monkeypatch):
    """start(keep=..., **options) -> an engine; batch-invariant, unless the mha form may not go on from cached tokens."""
    install(monkeypatch, request.param)

    def make(keep=False, speculative=None, chunked_prefix=True, **options):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(chunked_prefix)))
        monkeypatch.setenv("TRITON_MLA_CHUNKED_PREFIX", str(int(chunked_prefix)))
        monkeypatch.setenv("TRITON_MLA_PREFIX_CACHING", "keep" if keep else "auto")
        register()
        new = request.param == "0.33.0"
        return FakeEngine(request.param, VllmConfig(backend_enum().CUSTOM, v2=new, new=new, speculative_config=speculative), **options)

    return make


class Speculative:
    num_speculative_tokens = 2


def expected(engine, request, first, last):
    """[last - first, H * V] float64."""
    cache = request.latents[None, :last].double()
    uk, uv = engine.weight.view(HEADS, NOPE + VALUE, RANK).split([NOPE, VALUE], dim=1)
    q = request.queries[first:last]
    table = torch.zeros(1, 1, dtype=torch.int32)
    out = mla_unabsorbed(q[..., :NOPE], q[..., NOPE:], uk, uv.transpose(1, 2), cache, table, torch.tensor([0, last - first]), torch.tensor([last]),
                         softmax_scale=(NOPE + ROPE) ** -0.5, kv_lora_rank=RANK)
    return (out[0] if isinstance(out, tuple) else out).flatten(1)


@pytest.mark.parametrize("keep", [False, True], ids=["mha", "absorbed"])
@pytest.mark.parametrize("layout", ["view", "transposed"])
def test_prompts_and_decodes_match_the_definition(start, keep, layout):
    engine = start(keep=keep, strided=True, weight_layout=layout)
    assert (engine.layer.impl._w_kv_b(engine.layer).data_ptr() == engine.weight.data_ptr()) is (layout == "view")
    a, b = Request(1, 21, [3, 7, 9]), Request(2, 5, [1, 2, 4])
    rows = [engine.step((a, 21), (b, 5)), engine.step((a, 1), (b, 1))]
    for i, (request, prompt) in enumerate(((a, 21), (b, 5))):
        assert_close(rows[0][i], expected(engine, request, 0, prompt), ATOL, "prompt")
        assert_close(rows[1][i], expected(engine, request, prompt, prompt + 1), ATOL, "decode")


def test_chunks_of_a_prompt_where_the_mha_form_may_not_go_on_from_cached_tokens(start):
    """They take the absorbed form, behind decodes or alone, and some requests without a token between them."""
    engine = start(chunked_prefix=False)
    a, b, c = Request(1, 21, [3, 7, 9]), Request(2, 5, [1, 2, 4]), Request(3, 30, [10, 11])
    for batch in [((b, 5), (a, 10)), ((a, 11),), ((b, 1), (c, 12)), ((b, 1), (a, 1), (c, 9)), ((b, 1), (c, 10), (a, 0))]:
        begins = [request.computed for request, _ in batch]
        for (request, count), begin, rows in zip(batch, begins, engine.step(*batch), strict=True):
            if count:
                assert_close(rows, expected(engine, request, begin, begin + count), ATOL, f"{begin} + {count}")


def alone(start, key, prompt, total, **options):
    """Every row of a request: its prompt in one step, then one by one."""
    engine, request = start(**options), Request(key, prompt, [5, 6, 8])
    rows = engine.step((request, prompt))
    while request.computed < total:
        rows += engine.step((request, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("keep", [False, True], ids=["mha", "absorbed"])
def test_no_schedule_changes_a_bit(start, keep):
    prompt, total = 19, 24
    wanted = alone(start, 1, prompt, total, keep=keep)
    engine = start(keep=keep)
    request, neighbour = Request(1, prompt, [2, 10, 1]), Request(2, 9, [4, 11, 3])
    rows = []
    for steps in ((7, 9), (11, 1), (1, 1), (1, 1)):  # chunks of the prompt beside a prompt and a decode; its last token alone beside a decode
        rows.append(engine.step((neighbour, steps[1]), (request, steps[0]))[1])
    rows.append(engine.step((request, 1))[0])  # another decode, alone
    assert_bitwise_equal(torch.cat(rows), wanted[: request.computed])
    # preempted: recomputed over other pages, the border between prompt and generated tokens inside a chunk, beside others
    request.computed, request.pages = 0, [12, 13, 14]
    again = [engine.step((neighbour, 1), (request, 10))[1], engine.step((request, 11), (neighbour, 1))[0]]
    while request.computed < total:
        again += engine.step((request, 1))
    assert_bitwise_equal(torch.cat(again), wanted)


def test_the_last_token_of_a_prompt_keeps_its_form(start):
    """Control: the same token as a generated one has other bits, so that the test above would see the mistake."""
    as_prompt, as_generated = alone(start, 1, 19, 19), alone(start, 1, 18, 19)
    assert_bitwise_equal(as_prompt[:18], as_generated[:18])
    assert not bitwise_equal(as_prompt[18:], as_generated[18:])


def test_rows_that_verify_drafts_have_the_bits_of_decodes(start):
    wanted = alone(start, 1, 10, 16)
    engine = start(speculative=Speculative())
    request, neighbour = Request(1, 10, [2, 10, 1]), Request(2, 12, [4, 11, 3])
    rows = [engine.step((request, 10), (neighbour, 5))[0], engine.step((request, 3), (neighbour, 7))[0], engine.step((request, 3), (neighbour, 3))[0]]
    assert_bitwise_equal(torch.cat(rows), wanted)


def test_a_step_of_decodes_makes_no_tensor_of_its_own(start):
    for options in ({}, {"keep": True}):
        engine = start(**options)
        batch = [(Request(1, 4, [1]), 1), (Request(2, 3, [2]), 1)]
        for request, _ in batch:
            request.computed = 6
        common = engine.common(batch)
        for metadata in (engine.builder.build(0, common), engine.builder.build_for_cudagraph_capture(common), engine.builder.build_for_drafting(common, 0)):
            (form, rows), = metadata.parts
            assert form == "absorbed" and rows.one_each and metadata.covered == 2
            for mine, theirs in ((rows.seq_lens, common.seq_lens), (rows.block_table, common.block_table_tensor), (rows.cu_seqlens_q, common.query_start_loc)):
                assert mine.data_ptr() == theirs.data_ptr()


def test_a_padded_graph_gives_rows_of_padding_zeros(start):
    engine = start()
    request = Request(1, 4, [1])
    engine.step((request, 4))
    request.computed = 4
    common = engine.common([(request, 1), (request, 1)])
    common.seq_lens[1] = 0
    metadata = engine.builder.build_for_cudagraph_capture(common)
    output = torch.full((2, HEADS * VALUE), torch.nan, dtype=DTYPE)
    engine.cache[1, 4] = request.latents[4]
    engine.layer.impl.forward_mha(request.queries[4:5].repeat(2, 1, 1), None, None, engine.cache, metadata, None, output=output)
    assert_close(output[:1], expected(engine, request, 4, 5), ATOL, "decode")
    assert not output[1].any()


def test_a_captured_step_has_decodes_only(start):
    engine = start()
    with pytest.raises(ValueError, match="max_query_len=2"):
        engine.builder.build_for_cudagraph_capture(engine.common([(Request(1, 4, [1]), 2)]))


def test_lengths_of_generated_rows_are_the_devices(start):
    """With drafts verified asynchronously, the host knows an upper bound only."""
    engine = start(speculative=Speculative())
    verified, chunk = Request(1, 4, [1, 5]), Request(2, 20, [2, 6])
    verified.computed = 7
    common = engine.common([(chunk, 8), (verified, 3)], slack=0)  # the prompt first: the decode is no leading row
    common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound + torch.tensor([0, 2], dtype=torch.int32)
    parts = dict(engine.builder.build(0, common).parts)
    assert parts["absorbed"].seq_lens.tolist() == [10] and parts["mha"].seq_lens.tolist() == [8]
    assert parts["absorbed"].tokens == slice(8, 11) and parts["mha"].tokens == slice(0, 8)


def test_roles_are_not_guessed(start):
    engine = start()
    common = engine.common([(Request(1, 4, [1]), 2)])
    common.seq_lens_cpu_upper_bound = None
    with pytest.raises(RuntimeError, match="seq_lens_cpu_upper_bound"):
        engine.builder.build(0, common)


def test_queries_multiplied_by_the_caller(start):
    engine = start(keep=True)
    request = Request(1, 4, [1, 2])
    engine.step((request, 20))
    request.computed = 18
    metadata = engine.builder.build(0, engine.common([(request, 2)]))
    q = (0.5 * torch.randn(2, HEADS, RANK + ROPE)).to(DTYPE)
    out, lse = engine.layer.impl.forward_mqa((q[..., :RANK], q[..., RANK:]), engine.cache, metadata, engine.layer)
    reference = mla_absorbed(q, engine.cache, torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0, 2]), torch.tensor([20]),
                             softmax_scale=(NOPE + ROPE) ** -0.5, kv_lora_rank=RANK)
    assert lse.dtype == torch.float32 and engine.cache.shape[1] == PAGE
    assert_close(out, reference[0], ATOL, "out")
    assert_close(lse, reference[1], 1e-3, "lse")
    joined, _ = engine.layer.impl.forward_mqa(q, engine.cache, metadata, engine.layer)
    assert_bitwise_equal(joined, out)


def test_forms_that_have_no_latent_result_are_refused(start):
    engine = start()
    metadata = engine.builder.build(0, engine.common([(Request(1, 4, [1]), 4)]))
    with pytest.raises(ValueError, match="absorbed form"):
        engine.layer.impl.forward_mqa(torch.zeros(4, HEADS, RANK + ROPE, dtype=DTYPE), engine.cache, metadata, engine.layer)


def test_a_builder_without_a_decision_is_refused(start):
    engine = start()
    engine.worker_config.additional_config.clear()
    with pytest.raises(RuntimeError, match="no decision"):
        type(engine.builder)(engine.builder.kv_cache_spec, ["layer"], engine.worker_config, torch.device("cpu"))


@pytest.mark.parametrize(("heads", "columns", "itemsize", "tokens"), [(16, 256, 2, 32768), (128, 256, 2, 4096), (128, 512, 4, 1024), (1, 32, 2, 1 << 22)])
def test_a_chunk_takes_as_much_memory_whatever_the_heads(heads, columns, itemsize, tokens):
    assert chunk_tokens(heads, columns, itemsize) == tokens


def test_prompts_are_compiled_for_before_the_first_one(start, monkeypatch):
    """By the arguments that a step gives, for one chunk and for the longest prompt, and nowhere but on a GPU."""
    from triton_mla.integrations.vllm import impl

    kinds, absorbed = [], []
    monkeypatch.setattr(impl, "WARM_TOKENS", (16,))

    def noted(q, cache, weight, table, starts, lens, **options):
        kinds.append((q.shape[1:], cache.shape[1:], weight.shape, table.dtype, options.keys(), q.dtype))
        longest.append((options["max_seq_len"], table.shape[1] * PAGE))
        return prefill(q, cache, weight, table, starts, lens, **options)

    prefill, longest = impl.mla_prefill_paged, []
    monkeypatch.setattr(impl, "mla_prefill_paged", noted)
    for name in ("mla_decode", "mla_extend"):
        monkeypatch.setattr(impl, name, Mock(wraps=getattr(impl, name), side_effect=lambda *_, name=name, **__: (absorbed.append(name), DEFAULT)[1]))
    engine = start()
    assert not kinds
    engine.step((Request(1, 21, [3, 7]), 21))
    longest.clear()
    arguments = {"page_size": PAGE, "max_model_len": 3 * PAGE + 1, "dtype": DTYPE, "device": torch.device("cpu")}
    engine.layer.impl.warm_up(mha=True, **arguments)
    assert longest == [(16, 4 * PAGE), (3 * PAGE + 1, 4 * PAGE)]
    assert len(kinds) == 3 and kinds[0] == kinds[1] == kinds[2]
    assert absorbed == ["mla_extend", "mla_decode"]
    engine.layer.impl.warm_up(mha=False, **arguments)
    assert len(longest) == 2 and absorbed == ["mla_extend", "mla_decode"] * 2
