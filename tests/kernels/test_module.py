"""`MLAAttention`: right in both forms, each row as if its request were alone, and nothing waits for the device."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gpu import no_host_synchronisation
from memory import at_one_address

from triton_mla import BatchLayout, MLADims, Settings, resolve
from triton_mla.module import MLAAttention
from triton_mla.paths import ABSORBED, MHA, REFUSED, PathRule
from triton_mla.reference import absorb_q, apply_w_uv, gather_kv, mla_absorbed
from triton_mla.step import StepPlan
from triton_mla.testing import assert_bitwise_equal, assert_close, bitwise_equal
from triton_mla.tuning import PrefillOrder, ReductionOrder

ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RULES = [PathRule(ABSORBED), PathRule(MHA)]

# (query length, sequence length, prompt length): decode, a prompt, a later chunk, a recompute over the prompt's end, verification,
# padding, a request without work, a prompt's last token alone
REQUESTS = [(1, 40, 33), (21, 21, 30), (9, 35, 40), (28, 28, 19), (3, 50, 44), (1, 0, 0), (0, 17, 12), (1, 24, 24)]


class Layer:
    """One layer with its cache, in which every request of a batch finds its earlier tokens, and NaN lies everywhere else."""

    def __init__(self, mla, requests, paths, page_order=1):
        if mla.device.type == "cuda":
            self.dims, prefill = MLADims(16), PrefillOrder()
        else:
            self.dims, prefill = MLADims(2, mla.kv_lora_rank, mla.qk_rope_head_dim, 32, 48), PrefillOrder(block_n=16)
        dims, page = self.dims, mla.page_size
        w = self.random(dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank) * dims.kv_lora_rank**-0.5
        self.w = w.to(mla.device, mla.dtype)
        order = ReductionOrder(block_n=16, kv_split=64) if mla.device.type == "cpu" else mla.order
        self.module = MLAAttention(dims, self.w, paths=paths, order=order, prefill_order=prefill, chunk_tokens=32 if mla.device.type == "cpu" else 128)
        counts = [-(-n // page) for _, n, _ in requests]
        ids = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(page_order)).tolist()
        pages = [[ids.pop() for _ in range(count)] for count in counts]
        self.layout = BatchLayout([r[0] for r in requests], [r[1] for r in requests], pages, page, [r[2] for r in requests])
        self.cache = torch.full((sum(counts) + 2, page, dims.latent_dim), float("nan"), dtype=mla.dtype, device=mla.device)
        q, kv = [], []
        for query_len, seq_len, prompt_len in requests:
            # Named by the request, so that it brings the same wherever it stands in the batch.
            name = 10_000 * query_len + 100 * seq_len + prompt_len
            tokens = self.random(max(seq_len, query_len), dims.latent_dim, seed=name).to(mla.device, mla.dtype)
            start = max(seq_len - query_len, 0)
            kv.append(tokens[len(tokens) - query_len :])
            q.append(self.random(query_len, dims.num_heads, dims.qk_head_dim, seed=name + 1))
            for position in range(start):
                at = pages[len(q) - 1][position // page], position % page
                self.cache[at] = tokens[position]
        self.q = torch.cat(q).to(mla.device, mla.dtype)
        self.kv = torch.cat(kv)

    @staticmethod
    def random(*shape, seed=0):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def __call__(self, plan=None, **options):
        rank = self.dims.kv_lora_rank
        plan = self.module.plan(self.layout) if plan is None else plan
        return self.module(self.q, self.kv[:, :rank], self.kv[:, rank:], self.cache, plan, **options)

    def reference(self):
        """The float64 result from the cache as it is."""
        dims = self.dims
        w = self.w.double().view(dims.num_heads, -1, dims.kv_lora_rank)
        table, starts, lens = self.layout.tensors(self.w.device)
        nope = dims.qk_nope_head_dim
        q = torch.cat([absorb_q(self.q[..., :nope].double(), w[:, :nope]), self.q[..., nope:].double()], -1)
        latent, _ = mla_absorbed(q, self.cache, table, starts, lens, softmax_scale=dims.softmax_scale, kv_lora_rank=dims.kv_lora_rank)
        return apply_w_uv(latent, w[:, nope:].transpose(1, 2)).flatten(1)

    def rows(self, i):
        first = sum(self.layout.query_lens[:i])
        return slice(first, first + self.layout.query_lens[i])


@pytest.mark.parametrize("rule", RULES, ids=["absorbed", "mha"])
def test_against_the_reference(mla_each, rule):
    layer = Layer(mla_each, REQUESTS, rule)
    out = layer()
    assert out.shape == (len(layer.q), layer.dims.num_heads * layer.dims.v_head_dim) and out.dtype == mla_each.dtype
    assert_close(out, layer.reference(), ATOL[mla_each.dtype])
    assert bool((out[layer.rows(5)] == 0).all())


@pytest.mark.parametrize("rule", RULES, ids=["absorbed", "mha"])
def test_a_mixed_batch_is_its_requests_one_by_one(mla, rule):
    whole = Layer(mla, REQUESTS, rule)
    out = whole()
    for i, request in enumerate(REQUESTS):
        alone = Layer(mla, [request], rule, page_order=i)
        assert_bitwise_equal(alone(), out[whole.rows(i)], f"request {i}:")
    order = [3, 0, 7, 5, 2, 6, 4, 1]
    other = Layer(mla, [REQUESTS[i] for i in order], rule, page_order=9)
    got = other()
    for place, i in enumerate(order):
        assert_bitwise_equal(got[other.rows(place)], out[whole.rows(i)], f"request {i} at {place}:")


def test_the_forms_are_where_the_rule_says(mla):
    """Rows of prompts differ between the forms, others do not."""
    absorbed, mixed = Layer(mla, REQUESTS, RULES[0]), Layer(mla, REQUESTS, RULES[1])
    a, b = absorbed(), mixed()
    for i, (query_len, seq_len, prompt_len) in enumerate(REQUESTS):
        for row in range(*absorbed.rows(i).indices(len(a))):
            position = seq_len - query_len + row - absorbed.rows(i).start
            if position >= prompt_len or not seq_len:
                assert_bitwise_equal(a[row], b[row], f"request {i}, position {position}:")
        prompt = slice(absorbed.rows(i).start, absorbed.rows(i).start + max(min(prompt_len - seq_len + query_len, query_len), 0))
        if len(a[prompt]) and seq_len:
            assert not bitwise_equal(a[prompt], b[prompt])


def test_the_cache_is_written(mla):
    layer = Layer(mla, REQUESTS, RULES[0])
    layer()
    for i, (query_len, seq_len, _) in enumerate(REQUESTS):
        if seq_len:
            table = torch.tensor(layer.layout.page_ids[i])
            assert_bitwise_equal(gather_kv(layer.cache, table, seq_len)[seq_len - query_len :], layer.kv[layer.rows(i)])


def test_tokens_past_the_requests_are_padding(mla):
    layer = Layer(mla, REQUESTS[:4], RULES[1])
    expected = layer()
    plan = layer.module.plan(layer.layout)
    table, _, _ = layer.layout.tensors(mla.device)
    slots = torch.cat([plan.slot_mapping, torch.full((5,), -1, dtype=torch.int64, device=mla.device)])
    layout = layer.layout
    plan = StepPlan.from_lengths(layout.query_lens, layout.seq_lens, table, slots, page_size=mla.page_size, paths=RULES[1], prompt_lens=layout.prompt_lens)
    assert plan.padded
    layer.q = torch.cat([layer.q, layer.q[:5] * float("nan")])
    layer.kv = torch.cat([layer.kv, layer.kv[:5] * float("nan")])
    out = torch.full((len(layer.q), layer.dims.num_heads, layer.dims.v_head_dim), float("nan"), dtype=mla.dtype, device=mla.device)
    got = layer(plan, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert_bitwise_equal(got[:-5], expected)
    assert bool((got[-5:] == 0).all())


def test_an_empty_step(mla):
    layer = Layer(mla, REQUESTS[:1], RULES[1])
    layer.q, layer.kv = layer.q[:0], layer.kv[:0]
    assert layer(layer.module.plan(BatchLayout([], [], [], mla.page_size, []))).shape == (0, layer.dims.num_heads * layer.dims.v_head_dim)


def decode_layer(mla):
    return Layer(mla, [(1, 40, 33), (1, 17, 3), (1, 0, 0), (1, 50, 20)], RULES[1])


def test_a_plan_of_decode_rows_over_device_tensors(mla):
    layer = decode_layer(mla)
    expected = layer()
    table, _, lens = layer.layout.tensors(mla.device)
    plan = StepPlan.decode(table, lens, layer.module.plan(layer.layout).slot_mapping, page_size=mla.page_size)
    assert_bitwise_equal(layer(plan), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [REQUESTS, [(1, 40, 33), (1, 17, 3)]], ids=["mixed", "decode"])
def test_no_synchronisation(mla, requests):
    layer = Layer(mla, requests, RULES[1])
    expected = layer()
    with no_host_synchronisation():
        got = layer()
    assert_bitwise_equal(got, expected)


@pytest.mark.gpu
def test_a_captured_decode(mla):
    layer = decode_layer(mla)
    expected = layer()
    table, _, lens = layer.layout.tensors(mla.device)
    plan = StepPlan.decode(table, lens, layer.module.plan(layer.layout).slot_mapping, page_size=mla.page_size)
    layer(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(plan)
    out.fill_(float("nan"))
    graph.replay()
    assert_bitwise_equal(out, expected)


def test_a_parameter_is_shared_and_a_tensor_becomes_one(mla):
    layer = decode_layer(mla)
    parameter = torch.nn.Parameter(layer.w.clone())
    module = MLAAttention(layer.dims, parameter)
    assert module.w_kv_b is parameter and list(module.state_dict()) == ["w_kv_b"]
    assert not layer.module.w_kv_b.requires_grad
    layer.module = MLAAttention(layer.dims, parameter, order=layer.module.order)
    before = layer()
    assert not before.requires_grad
    with torch.no_grad():
        parameter.zero_()
    assert bool((layer() == 0).all()) and not bool((before == 0).all())


def cache_config():
    return SimpleNamespace(enable_prefix_caching=True, block_size=16)


def test_from_a_selection(mla):
    dims = MLADims(2, 64, 16, 32, 48)
    w = torch.zeros(160, 64)
    selection = resolve(cache_config(), dims=dims, settings=Settings(batch_invariant=True, kv_split=128), arch="sm_90", token_roles=True)
    module = MLAAttention.from_selection(dims, w, selection)
    assert module.paths == PathRule(MHA) and module.order.kv_split == 128
    assert "original prompt takes the mha form" in repr(module)
    kept = resolve(cache_config(), dims=dims, settings=Settings(batch_invariant=True, prefix_caching="keep"), arch="sm_90", token_roles=True)
    assert MLAAttention.from_selection(dims, w, kept).paths == PathRule(ABSORBED)
    full = MLADims(16)
    foreign = resolve(cache_config(), dims=full, settings=Settings(), arch="sm_90", decode_backend="flash_attn_mla")
    with pytest.raises(ValueError, match="selection.decode=flash_attn_mla must be triton_mla"):
        MLAAttention.from_selection(full, torch.zeros(16 * 256, 512), foreign)


def test_roles_are_needed_for_the_mha_form(mla):
    layer = decode_layer(mla)
    layout = BatchLayout(layer.layout.query_lens, layer.layout.seq_lens, layer.layout.page_ids, mla.page_size)
    with pytest.raises(ValueError, match="prompt_lens=None"):
        layer.module.plan(layout)


@pytest.mark.parametrize(
    ("dims", "shape", "paths", "word"),
    [
        (MLADims(2, 64, 16, 32, 48), (161, 64), None, "w_kv_b has shape"),
        (MLADims(2, 64, 16, 32, 48), None, None, "w_kv_b=None must be a torch.Tensor"),
        (MLADims(2, 60, 16, 32, 48), (160, 60), None, "kv_lora_rank=60"),
        (MLADims(2, 64, 16, 32, 40), (144, 64), PathRule(MHA), "v_head_dim=40"),
        (None, (160, 64), None, "dims=None"),
        (MLADims(2, 64, 16, 32, 48), (160, 64), "mha", "paths='mha'"),
    ],
)
def test_bad_modules(dims, shape, paths, word):
    with pytest.raises(ValueError, match=word):
        MLAAttention(dims, None if shape is None else torch.zeros(shape), paths=paths)


@pytest.mark.parametrize("rule", RULES, ids=["absorbed", "mha"])
@pytest.mark.parametrize(("option", "value"), [("order", None), ("prefill_order", ReductionOrder()), ("chunk_tokens", 100), ("chunk_tokens", "100")])
def test_bad_options(rule, option, value):
    with pytest.raises(ValueError, match="order=|chunk_tokens='?100"):
        MLAAttention(MLADims(2, 64, 16, 32, 48), torch.zeros(160, 64), paths=rule, **{option: value})


@pytest.mark.parametrize("weight", [torch.zeros(160, 128)[:, ::2], torch.zeros(64, 160).T], ids=["every other", "transposed"])
def test_bad_weight_strides(weight):
    with pytest.raises(ValueError, match="w_kv_b has strides"):
        MLAAttention(MLADims(2, 64, 16, 32, 48), weight)


@pytest.mark.parametrize(
    ("weight", "word"),
    [
        (torch.Tensor.to_sparse, "w_kv_b has layout torch.sparse_coo"),
        (torch.Tensor.to_sparse_csr, "w_kv_b has layout torch.sparse_csr"),
        (lambda w: torch.nested.nested_tensor([w]), "w_kv_b is nested"),
        (torch.Tensor.char, "w_kv_b has dtype torch.int8; it must be one of torch.float16"),
        (torch.Tensor.double, "w_kv_b has dtype torch.float64"),
    ],
    ids=["sparse", "csr", "nested", "integer", "double"],
)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta) (stage|state)")
def test_bad_weight_kinds(weight, word):
    with pytest.raises(ValueError, match=word):
        MLAAttention(MLADims(2, 64, 16, 32, 48), weight(torch.zeros(160, 64)))


def test_no_selection():
    with pytest.raises(ValueError, match="selection=None"):
        MLAAttention.from_selection(MLADims(2, 64, 16, 32, 48), torch.zeros(160, 64), None)


def test_bad_input_writes_nothing(mla):
    layer = decode_layer(mla)
    layout, rank = layer.layout, layer.dims.kv_lora_rank
    plan = layer.module.plan(layout)
    table, _, _ = layout.tensors(mla.device)
    slots = torch.cat([plan.slot_mapping, plan.slot_mapping.new_full((1,), -1)])
    plan = StepPlan.from_lengths(layout.query_lens, layout.seq_lens, table, slots, page_size=mla.page_size, paths=RULES[1], prompt_lens=layout.prompt_lens)
    layer.q, layer.kv = (torch.cat([value, value[:1]]) for value in (layer.q, layer.kv))
    out = torch.full((len(layer.q), layer.dims.num_heads, layer.dims.v_head_dim), 7.0, dtype=mla.dtype, device=mla.device)
    good = {"q": layer.q, "kv_c": layer.kv[:, :rank], "k_pe": layer.kv[:, rank:], "kv_cache": layer.cache, "plan": plan, "out": out}
    before, untouched = layer.cache.clone(), out.clone()
    prompt = StepPlan.from_layout(BatchLayout([5], [5], [[0]], mla.page_size, [5]), paths=RULES[1], device=mla.device)
    other_page = mla.page_size * 2
    pages = layer.cache.new_zeros(4, other_page, layer.dims.latent_dim)
    for changes, word in [
        ({"q": layer.q[:-1]}, "q has shape"),
        ({"q": layer.q.double()}, "q has dtype"),
        ({"kv_c": layer.kv[:, :-1][:, 1:]}, "kv_c has shape"),
        ({"k_pe": layer.kv[:-1, rank:]}, "k_pe has shape"),
        ({"kv_cache": layer.cache.double()}, "w_kv_b is"),
        ({"kv_cache": layer.cache[..., :-16].contiguous()}, "kv_cache has shape"),
        ({"out": layer.q[..., 1:]}, "out has shape"),
        ({"out": out[:1].expand_as(out)}, "out has strides|out.*overlap"),
        ({"plan": replace(plan, paths=PathRule(MHA, prefix=REFUSED))}, "plan.paths"),
        ({"plan": replace(plan, paths=RULES[0])}, "plan.paths"),
        ({"plan": None}, "plan=None"),
        ({"kv_c": layer.kv[:, :rank].double()}, "kv_c has dtype"),
        ({"kv_cache": pages}, f"kv_cache has pages of {other_page} tokens; they must have plan.page_size={mla.page_size}"),
    ]:
        with pytest.raises(ValueError, match=word):
            layer.module(**{**good, **changes})
        assert_bitwise_equal(layer.cache, before, allow_nan=True)
        assert_bitwise_equal(out, untouched)
        assert not bool(pages.any())
    layer.module.paths = RULES[0]
    with pytest.raises(ValueError, match="plan.paths is the rule"):
        layer.module(layer.q[:5], layer.kv[:5, :rank], layer.kv[:5, rank:], layer.cache, prompt)
    assert_bitwise_equal(layer.cache, before, allow_nan=True)


@pytest.mark.parametrize("rule", RULES, ids=["absorbed", "mha"])
def test_shared_memory_writes_nothing(mla, rule):
    layer = Layer(mla, REQUESTS, rule)
    rank = layer.dims.kv_lora_rank
    plan = layer.module.plan(layer.layout)
    out = layer.q.new_full((len(layer.q), layer.dims.num_heads, layer.dims.v_head_dim), 7.0)
    good = {"q": layer.q, "kv_c": layer.kv[:, :rank].contiguous(), "k_pe": layer.kv[:, rank:].contiguous(), "kv_cache": layer.cache, "plan": plan, "out": out}
    for name, other in [("out", "q"), ("out", "kv_c"), ("out", "k_pe"), ("out", "kv_cache"), ("kv_cache", "q"), ("kv_cache", "kv_c"), ("kv_cache", "k_pe")]:
        written, read = at_one_address(good[name], good[other])
        before = written.clone()
        with pytest.raises(ValueError, match=f"{name} has shape .* must not share memory with {other}, since"):
            layer.module(**{**good, name: written, other: read})
        assert_bitwise_equal(written, before, allow_nan=True)
    shared, slots = at_one_address(out, plan.slot_mapping)
    with pytest.raises(ValueError, match=r"out has shape .* must not share memory with plan\.slot_mapping"):
        layer.module(**{**good, "out": shared, "plan": replace(plan, slot_mapping=slots)})
    shared, lens = at_one_address(out, plan.absorbed.seq_lens)
    with pytest.raises(ValueError, match=r"out has shape .* must not share memory with plan\.absorbed\.seq_lens"):
        layer.module(**{**good, "out": shared, "plan": replace(plan, absorbed=replace(plan.absorbed, seq_lens=lens))})


@pytest.mark.parametrize("rule", RULES, ids=["absorbed", "mha"])
def test_a_page_id_past_the_cache_writes_nothing(mla, rule):
    """Only the host's tensors show it: a GPU's are never read back."""
    if mla.device.type != "cpu":
        pytest.skip("on the CPU only")
    layer = Layer(mla, [(2, 40, 40)], rule)
    before = layer.cache.clone()
    good = layer.layout.page_ids[0]
    layout = BatchLayout([2], [40], [[10**6, *good[1:]]], mla.page_size, [40])  # the new tokens' own page is a good one
    with pytest.raises(ValueError, match="block_table.0. has page ids"):
        layer(layer.module.plan(layout))
    assert_bitwise_equal(layer.cache, before, allow_nan=True)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping has shape"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int32)}, "block_table has shape"),
        ({"seq_lens": [9]}, "seq_lens has 1 requests"),
        ({"prompt_lens": [9, 9]}, "prompt_lens has 2 requests"),
        ({"page_size": 8}, "page_size=8"),
        ({"page_size": None}, "page_size=None"),
        ({"seq_lens": [5, 65, 7]}, r"seq_lens\[1\]=65 must be from 0 to 64"),
        ({"query_lens": [1, 7, 0]}, r"query_lens\[1\]=7"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int64)}, "block_table has dtype"),
        ({"block_table": torch.zeros(3, 8, dtype=torch.int32)[:, ::2]}, "block_table has strides"),
        ({"slot_mapping": [0, 1, 2]}, "slot_mapping="),
        ({"query_lens": ["1", 2, 0]}, "query_lens="),
        ({"query_lens": [1.0, 2, 0]}, "query_lens="),
        ({"query_lens": 3}, "query_lens=3"),
        ({"seq_lens": [5, None, 7]}, "seq_lens="),
        ({"paths": None}, "paths=None"),
        ({"paths": "mha"}, "paths='mha'"),
    ],
)
def test_bad_plans(changes, word):
    good = {"query_lens": [1, 2, 0], "seq_lens": [5, 6, 7], "block_table": torch.zeros(3, 4, dtype=torch.int32), "prompt_lens": [1, 1, 1], "page_size": 16}
    good["slot_mapping"] = torch.zeros(3, dtype=torch.int64)
    assert StepPlan.from_lengths(**good, paths=RULES[1]).num_tokens == 3
    with pytest.raises(ValueError, match=word):
        StepPlan.from_lengths(**{**good, "paths": RULES[1], **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"paths": None}, "paths=None"),
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"device": 3.5}, "device=3.5"),
        ({"device": "meta"}, "device=meta must be the cpu or one of torch's . cuda devices"),
        ({"device": "cuda:99"}, "device=cuda:99 must be the cpu or one of torch's . cuda devices"),
    ],
)
def test_bad_plans_of_layouts(changes, word):
    with pytest.raises(ValueError, match=word):
        StepPlan.from_layout(BatchLayout([2], [5], [[0]], 16, [5]), **{"paths": RULES[1], "device": "cpu", **changes})


@pytest.mark.parametrize(("lens", "word"), [(torch.ones(2, dtype=torch.int32), "seq_lens has shape"), (torch.ones(3, dtype=torch.int64), "seq_lens has dtype")])
def test_bad_plans_of_decode_rows(lens, word):
    with pytest.raises(ValueError, match=word):
        StepPlan.decode(torch.zeros(3, 4, dtype=torch.int32), lens, torch.zeros(3, dtype=torch.int64), page_size=16)


@pytest.mark.parametrize(
    ("slots", "word"),
    [
        (None, "slot_mapping=None must be a torch.Tensor"),
        ([0, 1, 2], "slot_mapping=.0, 1, 2. must be a torch.Tensor"),
        (torch.tensor(0), "slot_mapping has shape ..; it must have 1 dimensions"),
        (torch.zeros(2, dtype=torch.int64), "block_table has shape .3, 4.; it must have a row for each of the 2 requests"),
    ],
)
def test_bad_slots_of_decode_rows(slots, word):
    with pytest.raises(ValueError, match=word):
        StepPlan.decode(torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, dtype=torch.int32), slots, page_size=16)


def test_a_plan_for_cuda_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device=cuda must be the cpu or one of torch's 0 cuda devices"):
        StepPlan.from_layout(BatchLayout([2], [5], [[0]], 16, [5]), paths=RULES[1], device="cuda")
