"""transformers' ``DeepseekV3ForCausalLM`` over paged latent caches, every token's log-probabilities with bits of its own.

The model's own modules compute everything but attention, rotation, routing and experts. `batch_invariant_mode` gives their products and
means rows that are independent of each other; what else they do is element by element. Routing and experts are replaced because ties of
``topk`` are broken by no rule, and because ``index_add_`` rounds a token's sum to the model's dtype after each expert.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_mla.batch import BatchLayout
from triton_mla.companion.products import moe_experts
from triton_mla.companion.rotary import rotary_embedding
from triton_mla.companion.routing import route_tokens
from triton_mla.dims import MLADims
from triton_mla.mode import batch_invariant_mode
from triton_mla.module import MLAAttention
from triton_mla.paths import PathRule
from triton_mla.plan import DEFAULT_CHUNK_TOKENS
from triton_mla.step import StepPlan
from triton_mla.tuning import DEFAULT_ORDER, DEFAULT_PREFILL_ORDER, PrefillOrder, ReductionOrder

ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""Those whose frequencies do not follow the longest position of a batch, as those of "dynamic" and "longrope" do."""


class PagedModel:
    """A loaded model: one call is one step of an engine. Inference only; the weights are shared with the model, not copied.

    Each call enters `batch_invariant_mode`, which takes some milliseconds of the host's time where the mode is not on yet: an engine enables it
    for its process once, by `enable_batch_invariant_mode`.

    Attributes:
        vocab_size, num_layers: of the model. dtype, device: of its weights, and of the caches.
        dims: `MLADims` of its layers, the softmax scale as the model computes it (with YaRN, if it has that).
        attention: a module for each layer, with the layer's own kv_b weight.
        invariant: as given to `load`.
    """

    def __init__(self, model: Any, attention: list[MLAAttention], invariant: bool) -> None:
        """Of `load`."""
        self.model = model
        self.attention = attention
        self.invariant = invariant
        self.vocab_size: int = model.config.vocab_size
        self.num_layers = len(attention)
        self.dims = attention[0].dims
        self.dtype, self.device = attention[0].w_kv_b.dtype, attention[0].w_kv_b.device

    def new_caches(self, num_pages: int, page_size: int) -> list[torch.Tensor]:
        """A cache [num_pages, page_size, R + P] for each layer, its contents not set."""
        shape = (num_pages, page_size, self.dims.latent_dim)
        return [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in self.attention]

    def plan(self, layout: BatchLayout) -> StepPlan:
        """The plan of a step, for all layers."""
        return self.attention[0].plan(layout)

    @torch.no_grad()
    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: StepPlan, caches: list[torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """One step: the tokens' latents go into the caches, and the wanted rows come out.

        Args:
            tokens, positions: [T] int64 on the model's device, T of the plan, padding included: ids, and places in their requests.
            plan: of `plan`, or of `StepPlan.decode`. caches: of `new_caches`, written in place.
            rows: [n] int64, which of the T tokens want log-probabilities.

        Returns:
            [n, vocab_size] fp32 natural logarithms; row i are those of the token behind ``tokens[rows[i]]``.

        Raises:
            ValueError: an argument is wrong.
        """
        self._check(tokens, positions, plan, caches)
        base = self.model.model
        with batch_invariant_mode(self.invariant):
            x = base.embed_tokens(tokens)
            cos, sin = (angle[0, :, : self.dims.qk_rope_head_dim // 2] for angle in base.rotary_emb(x.new_empty(0, dtype=torch.float32), positions[None]))
            for layer, attention, cache in zip(base.layers, self.attention, caches, strict=False):
                x = x + self._attend(layer.self_attn, attention, layer.input_layernorm(x), cos, sin, cache, plan)
                x = x + self._feed_forward(layer.mlp, layer.post_attention_layernorm(x))
            return torch.log_softmax(self.model.lm_head(base.norm(x[rows])).float(), -1)

    def _check(self, tokens: torch.Tensor, positions: torch.Tensor, plan: StepPlan, caches: list[torch.Tensor]) -> None:
        for name, value in (("tokens", tokens), ("positions", positions)):
            if value.shape != (plan.num_tokens,) or value.dtype != torch.int64 or value.device != self.device:
                raise ValueError(f"{name} is {value.dtype} {list(value.shape)} on {value.device}; "
                                 f"it must be torch.int64 [{plan.num_tokens}] on {self.device}: one for each of the plan's tokens")
        if len(caches) != self.num_layers:
            raise ValueError(f"caches has {len(caches)} tensors; it must have one for each of the {self.num_layers} layers")

    def _attend(
        self, weights: Any, attention: MLAAttention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        dims, interleaved = self.dims, bool(self.model.config.rope_interleave)
        query = weights.q_proj(x) if weights.q_lora_rank is None else weights.q_b_proj(weights.q_a_layernorm(weights.q_a_proj(x)))
        q_nope, q_pe = query.unflatten(1, (dims.num_heads, -1)).split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], -1)
        kv_c, k_pe = weights.kv_a_proj_with_mqa(x).split([dims.kv_lora_rank, dims.qk_rope_head_dim], -1)
        q = torch.cat((q_nope, rotary_embedding(q_pe, cos, sin, interleaved=interleaved)), -1)
        k_pe = rotary_embedding(k_pe[:, None], cos, sin, interleaved=interleaved)[:, 0]
        return weights.o_proj(attention(q, weights.kv_a_layernorm(kv_c), k_pe, cache, plan))

    def _feed_forward(self, mlp: Any, x: torch.Tensor) -> torch.Tensor:
        if not (self.invariant and hasattr(mlp, "experts")):
            return mlp(x)
        config, gate, experts = self.model.config, mlp.gate, mlp.experts
        weights, ids = route_tokens(
            torch.nn.functional.linear(x.float(), gate.weight.float()), top_k=config.num_experts_per_tok, num_groups=config.n_group,
            top_groups=config.topk_group, correction_bias=gate.e_score_correction_bias, normalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )
        return moe_experts(x, experts.gate_up_proj, experts.down_proj, ids, weights) + mlp.shared_experts(x)


def load(
    model: Any, *, paths: PathRule | None = None, order: ReductionOrder = DEFAULT_ORDER, prefill_order: PrefillOrder = DEFAULT_PREFILL_ORDER,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS, invariant: bool = True,
) -> PagedModel:
    """A ``DeepseekV3ForCausalLM`` of transformers 5 as an engine calls it, step by step over paged caches.

    Args:
        model: on one device, in one of fp16, bf16 and fp32. It is not changed, and still works by itself.
        paths, order, prefill_order, chunk_tokens: as `MLAAttention` takes them.
        invariant: False leaves everything but attention to torch and the model's own modules, where a token's bits follow the batch. It is
            there to show the difference.

    Raises:
        ValueError: it is another model, or one that has no invariant form here.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "deepseek_v3" or not hasattr(model, "lm_head"):
        raise ValueError(f"model={type(model).__name__} must be transformers' DeepseekV3ForCausalLM")
    rope_type, hidden_act = model.model.rotary_emb.rope_type, config.hidden_act
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"model has the rope_type {rope_type!r}; it must be one of {', '.join(ROPE_TYPES)}, whose frequencies no batch changes")
    if hidden_act != "silu":
        raise ValueError(f"model has the hidden_act {hidden_act!r}; it must be 'silu', the only one that the experts here have")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ValueError(f"model lies on {', '.join(sorted(map(str, devices)))}; it must be on one device")
    attention = []
    for layer in model.model.layers[: config.num_hidden_layers]:
        if hasattr(layer.mlp, "experts") and not hasattr(layer.mlp.experts, "gate_up_proj"):
            raise ValueError(f"model has experts of {type(layer.mlp.experts).__name__}; they must have the stacked gate_up_proj of transformers 5")
        weights = layer.self_attn
        dims = MLADims(config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim,
                       softmax_scale=weights.scaling)
        attention.append(MLAAttention(dims, weights.kv_b_proj.weight, paths=paths, order=order, prefill_order=prefill_order, chunk_tokens=chunk_tokens))
    return PagedModel(model, attention, invariant)
