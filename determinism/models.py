"""What the engine asks of a model; a small one in the style of DeepSeek on the public operations; and how models are made by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from triton_mla import companion
from triton_mla.batch import BatchLayout
from triton_mla.dims import MLADims
from triton_mla.module import MLAAttention
from triton_mla.paths import PathRule
from triton_mla.step import StepPlan
from triton_mla.tuning import PrefillOrder, ReductionOrder


class Model(Protocol):
    """A language model over paged latent caches, stepped by an engine.

    `attention` has one module for each layer; every call goes through this list, so that a control may replace its entries.
    """

    vocab_size: int
    num_layers: int
    dims: MLADims
    dtype: torch.dtype
    device: torch.device
    attention: list[MLAAttention]

    def new_caches(self, num_pages: int, page_size: int) -> list[torch.Tensor]:
        """A cache for each layer, [num_pages, page_size, R + P] of any contents."""
        ...

    def plan(self, layout: BatchLayout) -> StepPlan:
        """The plan of a step, for all layers."""
        ...

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: StepPlan, caches: list[torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """[n, vocab_size] fp32 log-probabilities of the tokens behind the n of T tokens that rows (int64) lists.

        tokens, positions: [T] int64, of the plan's tokens. The step's tokens are written to the caches.
        """
        ...


Build = Callable[[PathRule], Model]
"""Makes a model with a rule for the forms of its tokens; equal weights each time."""


@dataclass(frozen=True)
class SmallConfig:
    """Sizes of a `SmallModel`: the first layer has an MLP, the others have experts, and one that is shared by all tokens.

    intermediate: columns of the first layer's MLP; moe_intermediate: of an expert.
    """

    dims: MLADims
    hidden: int
    layers: int
    intermediate: int
    moe_intermediate: int
    experts: int
    top_k: int
    vocab_size: int
    positions: int
    dtype: torch.dtype
    order: ReductionOrder
    prefill_order: PrefillOrder
    groups: int = 2
    eps: float = 1e-6


TINY = SmallConfig(
    MLADims(2, 32, 16, 16, 16), hidden=32, layers=2, intermediate=32, moe_intermediate=32, experts=4, top_k=2, vocab_size=64, positions=256,
    dtype=torch.float32, order=ReductionOrder(block_n=16, kv_split=16), prefill_order=PrefillOrder(block_n=16),
)
# cuBLAS cuts K of a product like the MLP's second, 8192 to 1024, by the number of rows: the control without invariance needs one.
SMALL = SmallConfig(
    MLADims(16), hidden=1024, layers=3, intermediate=8192, moe_intermediate=768, experts=8, top_k=2, vocab_size=4096, positions=8192, dtype=torch.bfloat16,
    order=ReductionOrder(), prefill_order=PrefillOrder(),
)
COMPANION = SimpleNamespace(**{
    name: getattr(companion, name)
    for name in ("linear", "rms_norm", "silu_and_mul", "rotary_embedding", "route_tokens", "moe_experts", "log_softmax")
})
"""The operations of a `SmallModel`; controls replace some."""


class SmallModel:
    """DeepSeek's layers with random weights: RMS norms, latent attention with rotated parts, an MLP or routed experts."""

    def __init__(self, config: SmallConfig, paths: PathRule, device: torch.device, *, ops: Any = COMPANION) -> None:
        """ops: has the operations that `COMPANION` lists."""
        self.config, self.device, self.ops = config, device, ops
        self.vocab_size, self.num_layers, self.dims, self.dtype = config.vocab_size, config.layers, config.dims, config.dtype
        chance = torch.Generator().manual_seed(0)
        dims, hidden = config.dims, config.hidden

        def weight(*shape: int, gain: float = 1.0) -> torch.Tensor:
            return (gain * shape[-1] ** -0.5 * torch.randn(*shape, generator=chance)).to(device, config.dtype)

        def norm(width: int) -> torch.Tensor:
            return (1 + 0.1 * torch.randn(width, generator=chance)).to(device, config.dtype)

        def layer(index: int) -> SimpleNamespace:
            width = config.moe_intermediate if index else config.intermediate
            parts = SimpleNamespace(
                before=norm(hidden), after=norm(hidden), latent=norm(dims.kv_lora_rank), query=weight(dims.num_heads * dims.qk_head_dim, hidden, gain=2),
                kv=weight(dims.latent_dim, hidden), out=weight(hidden, dims.num_heads * dims.v_head_dim),
                gate_up=weight(2 * width, hidden), down=weight(hidden, width), router=None,
            )
            if index:
                parts.router, parts.bias = weight(config.experts, hidden), 0.1 * torch.randn(config.experts, generator=chance).to(device)
                parts.experts_gate_up = weight(config.experts, 2 * config.moe_intermediate, hidden)
                parts.experts_down = weight(config.experts, hidden, config.moe_intermediate)
            return parts

        self.layers = [layer(index) for index in range(config.layers)]
        heads = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
        self.attention = [
            MLAAttention(dims, weight(heads, dims.kv_lora_rank), paths=paths, order=config.order, prefill_order=config.prefill_order)
            for _ in self.layers
        ]
        self.embedding, self.head, self.norm = weight(config.vocab_size, hidden, gain=hidden**0.5), weight(config.vocab_size, hidden, gain=2), norm(hidden)
        half = dims.qk_rope_head_dim // 2
        angles = torch.arange(config.positions)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def new_caches(self, num_pages: int, page_size: int) -> list[torch.Tensor]:
        """As in `Model`."""
        return [torch.empty(num_pages, page_size, self.dims.latent_dim, dtype=self.dtype, device=self.device) for _ in self.layers]

    def plan(self, layout: BatchLayout) -> StepPlan:
        """As in `Model`."""
        return self.attention[0].plan(layout)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: StepPlan, caches: list[torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """As in `Model`."""
        ops, eps = self.ops, self.config.eps
        residual = self.embedding.index_select(0, tokens)
        x = torch.zeros_like(residual)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        for layer, attention, cache in zip(self.layers, self.attention, caches, strict=True):
            x, residual = ops.rms_norm(x, layer.before, eps, residual=residual)
            x = self._attend(layer, attention, x, cos, sin, cache, plan)
            x, residual = ops.rms_norm(x, layer.after, eps, residual=residual)
            x = self._feed_forward(layer, x)
        x, _ = ops.rms_norm(x, self.norm, eps, residual=residual)
        return ops.log_softmax(ops.linear(x.index_select(0, rows), self.head).float())

    def _attend(
        self, layer: SimpleNamespace, attention: MLAAttention, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        ops, dims = self.ops, self.dims
        q_nope, q_pe = ops.linear(x, layer.query).unflatten(1, (dims.num_heads, -1)).split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], -1)
        kv_c, k_pe = ops.linear(x, layer.kv).split([dims.kv_lora_rank, dims.qk_rope_head_dim], -1)
        q = torch.cat((q_nope, ops.rotary_embedding(q_pe, cos, sin, interleaved=True)), -1)
        k_pe = ops.rotary_embedding(k_pe[:, None], cos, sin, interleaved=True)[:, 0]
        kv_c = ops.rms_norm(kv_c, layer.latent, self.config.eps)
        return ops.linear(attention(q, kv_c, k_pe, cache, plan), layer.out)

    def _feed_forward(self, layer: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        return self._mlp(layer, x) if layer.router is None else self._mlp(layer, x) + self._experts(layer, x)

    def _mlp(self, layer: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(self.ops.silu_and_mul(self.ops.linear(x, layer.gate_up)), layer.down)

    def _experts(self, layer: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        ops, config = self.ops, self.config
        weights, ids = ops.route_tokens(
            ops.linear(x, layer.router), top_k=config.top_k, num_groups=config.groups, top_groups=1, correction_bias=layer.bias,
        )
        return ops.moe_experts(x, layer.experts_gate_up, layer.experts_down, ids, weights)


def with_attention(model: Model, kind: type[MLAAttention]) -> Model:
    """The model with attention modules of another class."""
    model.attention[:] = [
        kind(a.dims, a.w_kv_b, paths=a.paths, order=a.order, prefill_order=a.prefill_order, chunk_tokens=a.chunk_tokens) for a in model.attention
    ]
    return model


def config_for(device: torch.device) -> SmallConfig:
    """Real dims in bf16 on a GPU, tiny ones in fp32 under the interpreter."""
    return TINY if device.type == "cpu" else SMALL


def small(device: torch.device, *, config: SmallConfig | None = None, ops: Any = COMPANION) -> Build:
    """Makes `SmallModel`s, by default of the device's sizes."""
    return lambda paths: SmallModel(config or config_for(device), paths, device, ops=ops)


def replaced(**operations: Any) -> SimpleNamespace:
    """`COMPANION` with other operations in some places."""
    return SimpleNamespace(**{**vars(COMPANION), **operations})


def deepseek_v3(device: torch.device, *, config: SmallConfig | None = None, invariant: bool = True) -> Build:
    """Makes transformers' ``DeepseekV3ForCausalLM`` with random weights and the sizes of a small model.

    Raises ValueError: transformers is not installed.
    """
    try:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    except ImportError as error:
        raise ValueError(f"model=deepseek_v3 needs transformers 5 (pip install 'triton_mla[transformers]'): {error}") from None
    from triton_mla.integrations.transformers import load

    config = config or config_for(device)
    dims = config.dims
    torch.manual_seed(0)
    weights = DeepseekV3ForCausalLM(DeepseekV3Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden, intermediate_size=config.intermediate, moe_intermediate_size=config.moe_intermediate,
        num_hidden_layers=config.layers, num_attention_heads=dims.num_heads, num_key_value_heads=dims.num_heads, n_shared_experts=1,
        n_routed_experts=config.experts, num_experts_per_tok=config.top_k, n_group=config.groups, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=dims.kv_lora_rank, q_lora_rank=config.hidden // 2, qk_rope_head_dim=dims.qk_rope_head_dim, v_head_dim=dims.v_head_dim,
        qk_nope_head_dim=dims.qk_nope_head_dim, max_position_embeddings=config.positions, initializer_range=config.hidden**-0.5,
    )).to(device, config.dtype).eval()
    return lambda paths: load(weights, paths=paths, order=config.order, prefill_order=config.prefill_order, invariant=invariant)


MODELS: dict[str, Callable[..., Build]] = {"small": small, "deepseek_v3": deepseek_v3}
