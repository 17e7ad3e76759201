"""transformers' DeepseekV3ForCausalLM over paged caches: the model's own log-probabilities, and each token's bits its own."""

import random

import pytest
import torch

from triton_mla import BatchLayout, MLADims
from triton_mla.integrations.transformers import load
from triton_mla.paths import ABSORBED, MHA, PathRule
from triton_mla.testing import assert_bitwise_equal, bitwise_equal
from triton_mla.tuning import PrefillOrder, ReductionOrder

transformers = pytest.importorskip("transformers", minversion="5.0")

PAGE, NUM_PAGES = 16, 12
LENGTH = 21
CUTS = ([LENGTH], [11, 8, 1, 1])
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
        "beta_fast": 32, "beta_slow": 1}
MODELS = {
    "low-rank query, yarn": {"q_lora_rank": 24, "rope_parameters": YARN},
    "full query, halves": {"q_lora_rank": None, "rope_interleave": False},
    "biases, no group": {"q_lora_rank": 24, "attention_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
}
ORDERS = {"order": ReductionOrder(block_n=16, kv_split=16), "prefill_order": PrefillOrder(block_n=16), "chunk_tokens": 32}


def random_model(device, **changes):
    """A dense layer and one of experts, with weights so large that nothing in it is without effect."""
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "n_shared_experts": 1, "n_routed_experts": 8, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "qk_nope_head_dim": 32, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "max_position_embeddings": 256,
        "num_mtp_layers": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**sizes, **changes}))
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data = 1 + 0.1 * noise if "norm" in name else noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1 * noise
    return model.eval().to(device)


@pytest.fixture(scope="module")
def model(device, interpreter):
    return random_model(device, **MODELS["low-rank query, yarn"])


def prompt(length, seed=0):
    return torch.randint(96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Requests:
    """Sequences of a paged model whose caches hold NaN where nothing was written; `run` computes some next tokens of each, together."""

    def __init__(self, paged, prompts, seed=0):
        self.paged, self.prompts, self.done = paged, prompts, [0] * len(prompts)
        self.caches = [cache.fill_(float("nan")) for cache in paged.new_caches(NUM_PAGES, PAGE)]
        ids = list(range(NUM_PAGES))
        random.Random(seed).shuffle(ids)
        self.pages = [[ids.pop() for _ in range(-(-len(tokens) // PAGE))] for tokens in prompts]
        self.rows = [[] for _ in prompts]

    def run(self, *counts, prompt_lens=None):
        starts, self.done = self.done, [start + count for start, count in zip(self.done, counts, strict=True)]
        spans = [range(*span) for span in zip(starts, self.done, strict=True)]
        layout = BatchLayout(counts, self.done, self.pages, PAGE, prompt_lens or [len(tokens) for tokens in self.prompts])
        tokens = [tokens[i] for tokens, span in zip(self.prompts, spans, strict=True) for i in span]
        tokens, positions, rows = (
            torch.tensor(ids, device=self.paged.device) for ids in (tokens, [i for span in spans for i in span], list(range(len(tokens))))
        )
        out = self.paged(tokens, positions, self.paged.plan(layout), self.caches, rows)
        assert out.dtype == torch.float32 and out.shape == (len(tokens), self.paged.vocab_size)
        for kept, part in zip(self.rows, out.split(counts), strict=True):
            kept.append(part)
        return self

    def logprobs(self, request=0):
        """[tokens so far, vocab]"""
        return torch.cat(self.rows[request])


def alone(paged, tokens, cuts=(), seed=0):
    requests = Requests(paged, [tokens], seed)
    for count in cuts or [len(tokens)]:
        requests.run(count)
    return requests.logprobs()


@pytest.mark.parametrize("name, form", [*zip(MODELS, (ABSORBED, MHA, ABSORBED), strict=True), (next(iter(MODELS)), MHA)])
def test_agrees_with_the_model_itself(name, form, device, interpreter):
    model = random_model(device, **MODELS[name])
    tokens = prompt(LENGTH)
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device=device)).logits[0]
    expected = torch.log_softmax(logits, -1)
    assert expected.std() > 0.5, "so flat that errors would not show"
    paged = load(model, paths=PathRule(form), **ORDERS)
    for cuts in CUTS:
        torch.testing.assert_close(alone(paged, tokens, cuts), expected, rtol=0, atol=2e-4)
    with torch.no_grad():
        again = model(torch.tensor([tokens], device=device)).logits[0]
    assert_bitwise_equal(again, logits, "the model's own logits afterwards")


def test_a_prompt_and_its_generated_tokens_take_their_forms(model):
    tokens = prompt(LENGTH)
    expected = alone(load(model, **ORDERS), tokens)
    requests = Requests(load(model, paths=PathRule(MHA), **ORDERS), [tokens])
    for count in (8, 7, 1, 5):
        requests.run(count, prompt_lens=[13])
    torch.testing.assert_close(requests.logprobs(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("form", [ABSORBED, MHA])
def test_neighbours_pages_and_cuts_change_no_bit(model, form):
    paged = load(model, paths=PathRule(form), **ORDERS)
    needle = prompt(LENGTH)
    expected = alone(paged, needle)
    others = [prompt(n, seed=n) for n in (3, 33, 10)]
    batch = Requests(paged, [*others[:2], needle, others[2]], seed=1)
    for counts in ((3, 17, 5, 0), (0, 1, 6, 10), (0, 15, 10, 0)):
        batch.run(*counts)
    assert_bitwise_equal(batch.logprobs(2), expected, "in a batch, cut in three")
    assert_bitwise_equal(alone(paged, needle, CUTS[1], seed=2), expected, "its last tokens one by one")


def test_bf16(device, interpreter):
    """As near to the fp32 model of the same weights as bf16 allows, and as invariant."""
    model = random_model(device, **MODELS["low-rank query, yarn"]).to(torch.bfloat16)
    tokens = prompt(LENGTH)
    paged = load(model, **ORDERS)
    whole = alone(paged, tokens)
    assert_bitwise_equal(alone(paged, tokens, CUTS[1]), whole)
    with torch.no_grad():
        logits = model.float()(torch.tensor([tokens], device=device)).logits[0]
    error = (whole - torch.log_softmax(logits, -1)).abs().mean()
    assert error < 0.03, error


def test_padding_changes_no_bit(model, device):
    """Decode over a fixed number of rows, as a captured graph replays it."""
    from triton_mla import StepPlan

    paged = load(model, **ORDERS)
    needle = prompt(18)
    expected = alone(paged, needle)[-1:]
    requests = Requests(paged, [needle]).run(17)
    table = torch.zeros(4, 2, dtype=torch.int32, device=device)
    table[0] = torch.tensor(requests.pages[0])
    lengths = torch.tensor([18, 0, 0, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([requests.pages[0][1] * PAGE + 1, -1, -1, -1], device=device)
    plan = StepPlan.decode(table, lengths, slots, page_size=PAGE)
    tokens, positions = (torch.tensor([first, 0, 0, 0], device=device) for first in (needle[17], 17))
    assert_bitwise_equal(paged(tokens, positions, plan, requests.caches, torch.tensor([0], device=device)), expected)


def test_control_without_the_invariant_mode_bits_follow_the_cuts(model):
    paged = load(model, invariant=False, **ORDERS)
    needle = prompt(LENGTH)
    whole, single = alone(paged, needle), alone(paged, needle, CUTS[1])
    torch.testing.assert_close(whole, single, rtol=0, atol=2e-4)
    assert not bitwise_equal(whole, single), "no bit differs"


@pytest.mark.parametrize("name, dims", [
    ("low-rank query, yarn", MLADims(2, 32, 16, 32, 16, rope_factor=8.0, mscale_all_dim=1.0)),
    ("full query, halves", MLADims(2, 32, 16, 32, 16)),
])
def test_softmax_scale_is_that_of_the_model(name, dims):
    paged = load(random_model("cpu", **MODELS[name]), **ORDERS)
    assert paged.dims.softmax_scale == pytest.approx(dims.softmax_scale, rel=1e-15)


def test_what_an_engine_reads(model):
    paged = load(model, **ORDERS)
    assert (paged.vocab_size, paged.num_layers, paged.dtype, paged.device.type) == (96, 2, torch.float32, model.device.type)
    assert [tuple(cache.shape) for cache in paged.new_caches(5, 32)] == [(5, 32, 48)] * 2
    assert paged.attention[0].w_kv_b is model.model.layers[0].self_attn.kv_b_proj.weight


class TestRefused:
    def test_another_model(self):
        with pytest.raises(ValueError, match="model=Linear must be transformers' DeepseekV3ForCausalLM"):
            load(torch.nn.Linear(2, 2))

    def test_frequencies_that_follow_the_batch(self):
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        with pytest.raises(ValueError, match="rope_type 'dynamic'"):
            load(random_model("cpu", q_lora_rank=None, rope_parameters=rope))

    def test_another_activation(self):
        with pytest.raises(ValueError, match="hidden_act 'gelu'"):
            load(random_model("cpu", q_lora_rank=None, hidden_act="gelu"))

    def test_dims_that_no_kernel_serves(self):
        with pytest.raises(ValueError, match="kv_lora_rank=24"):
            load(random_model("cpu", q_lora_rank=None, kv_lora_rank=24))

    def test_tokens_that_are_not_those_of_the_plan(self, model):
        paged = load(model, **ORDERS)
        plan, caches = paged.plan(BatchLayout([2], [2], [[0]], PAGE, [2])), paged.new_caches(1, PAGE)
        two, three = (torch.zeros(n, dtype=torch.int64, device=model.device) for n in (2, 3))
        with pytest.raises(ValueError, match=r"tokens is torch.int64 \[3\] .* it must be torch.int64 \[2\]"):
            paged(three, two, plan, caches, two)
        with pytest.raises(ValueError, match=r"positions is torch.int32 \[2\]"):
            paged(two, two.int(), plan, caches, two)
        with pytest.raises(ValueError, match="caches has 1 tensors"):
            paged(two, two, plan, caches[:1], two)
