"""The attention of one layer in vLLM: every row by this package's operations, in the form that its step's metadata gives it."""

from __future__ import annotations

from typing import Any

import torch

from triton_mla.absorb import absorb_query, project_values
from triton_mla.attention import mla_decode, mla_extend
from triton_mla.config import normalize_dtype
from triton_mla.errors import UnsupportedError
from triton_mla.paths import MHA
from triton_mla.prefill import mla_prefill_paged
from triton_mla.step import Rows
from triton_mla.tuning import DEFAULT_PREFILL_ORDER

from . import adapter
from .decision import Decision
from .metadata import StepMetadata

CHUNK_BYTES = 1 << 28
WARM_TOKENS = (16, 512)  # few and many rows take other kernels


def chunk_tokens(num_heads: int, head_columns: int, itemsize: int) -> int:
    """Tokens whose keys and values, ``head_columns`` a head, take 256 MiB: one chunk of a prefill.

    Each chunk is four launches, for which the host needs longer than the device does for few heads, and a prompt of several chunks is compiled
    for apart. With 16 heads of 128 + 128 columns it is 32,768 tokens, with 128 heads 4,096. No bit follows from it.
    """
    tile = DEFAULT_PREFILL_ORDER.block_n
    return max(1, CHUNK_BYTES // (num_heads * head_columns * itemsize * tile)) * tile


class Attention:
    """The implementation's part that is this package's; vLLM's `MLACommonImpl` is the other base of the class that it gets.

    The cache has been written before: by vLLM, which copies the latents into their slots.
    """

    can_return_lse_for_decode = True
    num_heads: int
    scale: float
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __init__(self, **arguments: Any) -> None:
        """`arguments`: as vLLM's layer gives them. Raises UnsupportedError for what the kernels have not."""
        against = [
            f"{name}={arguments.get(name)!r} is not supported"
            for name in ("alibi_slopes", "sliding_window", "logits_soft_cap", "indexer", "kv_sharing_target_layer_name")
            if arguments.get(name) is not None
        ]
        if arguments.get("attn_type", adapter.base().decoder) != adapter.base().decoder:
            against.append(f"attn_type={arguments['attn_type']!r} is not supported (allowed: {adapter.base().decoder})")
        if arguments["kv_cache_dtype"] != "auto" and normalize_dtype(arguments["kv_cache_dtype"], argument="kv_cache_dtype").startswith("fp8"):
            against.append(f"kv_cache_dtype={arguments['kv_cache_dtype']} is not supported yet")
        if against:
            raise UnsupportedError("the attention backend cannot serve this layer", {"triton_mla": against})
        super().__init__(**arguments)
        self.supports_quant_query_input = False
        self.layer: Any = None
        self.decision: Decision | None = None

    def bind(self, layer: Any, decision: Decision) -> None:
        """The layer, whose weights are read at each call: a reload may replace them."""
        self.layer, self.decision = layer, decision

    def pack(self, layer: Any) -> None:
        """Has W_UK_T and W_UV of a layer share the memory of `_w_kv_b`, which a layer whose weights were dequantised would make at each call.

        Not where they are parameters, as since 0.33: a reload copies into those where they lie, for the graphs that have read them there.
        """
        if isinstance(layer.W_UK_T, torch.nn.Parameter):
            return
        heads, nope, R = layer.W_UK_T.shape
        layer.W_UK_T, values = self._w_kv_b(layer).view(heads, -1, R).split([nope, layer.W_UV.shape[2]], dim=1)
        layer.W_UV = values.transpose(1, 2)

    def warm_up(self, *, mha: bool, page_size: int, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compiles what the first prompts and recomputed tokens would else wait for (7 s on an H200 for prompts of one chunk and of several)."""
        for tokens in WARM_TOKENS:
            q = torch.zeros(tokens, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim, dtype=dtype, device=device)
            cache = q.new_zeros(-(-tokens // page_size), page_size, self.kv_lora_rank + self.qk_rope_head_dim)
            table = torch.arange(len(cache), dtype=torch.int32, device=device).expand(1, -1)
            table = torch.nn.functional.pad(table, (0, max(0, -(-max_model_len // page_size) - len(cache))))
            starts, lens = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, tokens], [tokens]))
            out = q.new_empty(tokens, self.num_heads, self.v_head_dim)
            for longest in sorted({tokens, max(tokens, max_model_len)}) if mha else ():
                self._mha(q, cache, Rows(slice(0, tokens), table, starts, lens, False, longest), out)
            self._absorbed(q, cache, Rows(slice(0, tokens), table, starts, lens, False), out)
        self._absorbed(q[:1], cache, Rows(slice(0, 1), table, starts[:2], lens, True), out[:1])

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward_mha(
        self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: StepMetadata,
        k_scale: torch.Tensor, output: torch.Tensor, output_scale: torch.Tensor | None = None,
    ) -> None:
        """All rows of a step.

        q: [T, H, nope + P], rotated. kv_c_and_k_pe_cache: [num_blocks, block_size, R + P], any strides, the new tokens in it. output: [T, H * V].
        kv_c_normed, k_pe and k_scale are not read: what a row sees, it sees in the cache. output_scale is None, as
        `fused_output_quant_supported` says.
        """
        out = output.view(-1, self.num_heads, self.v_head_dim)
        if attn_metadata.covered < len(out):
            out.zero_()
        for form, rows in attn_metadata.parts:
            attend = self._mha if form == MHA else self._absorbed
            if isinstance(rows.tokens, slice):
                attend(q[rows.tokens], kv_c_and_k_pe_cache, rows, out[rows.tokens])
            else:
                part = out.new_empty((len(rows.tokens), *out.shape[1:]))
                attend(q.index_select(0, rows.tokens), kv_c_and_k_pe_cache, rows, part)
                out.index_copy_(0, rows.tokens, part)

    def forward_mqa(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: StepMetadata, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of a step, with queries [T, H, R + P], or a pair, that the caller has multiplied by W_UK: (out [T, H, R], lse [T, H] fp32).

        Raises ValueError where some rows are of the mha form: their result is in no latent space.
        """
        if any(form == MHA or not isinstance(rows.tokens, slice) for form, rows in attn_metadata.parts):
            raise ValueError("attn_metadata.parts must be slices of the absorbed form")
        pair = q if isinstance(q, tuple) else (q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :])
        out = torch.zeros_like(pair[0], memory_format=torch.contiguous_format)
        lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float32, device=out.device)
        for _, rows in attn_metadata.parts:
            here = rows.tokens
            self._latent((pair[0][here], pair[1][here]), kv_c_and_k_pe_cache, rows, out[here], lse[here])
        return out, lse

    def _absorbed(self, q: torch.Tensor, cache: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        nope = self.qk_nope_head_dim
        query = absorb_query(q[..., :nope], self.layer.W_UK_T)
        latent = torch.empty_like(query)
        self._latent((query, q[..., nope:]), cache, rows, latent, None)
        project_values(latent, self.layer.W_UV, out=out)

    def _latent(self, query: tuple[torch.Tensor, torch.Tensor], cache: torch.Tensor, rows: Rows, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        assert self.decision is not None
        options: dict[str, Any] = {
            "softmax_scale": self.scale, "kv_lora_rank": self.kv_lora_rank, "out": out, "order": self.decision.order,
            "return_lse": lse is not None, "lse": lse,
        }
        if rows.one_each:
            mla_decode(query, cache, rows.block_table, rows.seq_lens, **options)
        else:
            mla_extend(query, cache, rows.block_table, rows.cu_seqlens_q, rows.seq_lens, **options)

    def _mha(self, q: torch.Tensor, cache: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        mla_prefill_paged(
            q, cache, self._w_kv_b(self.layer), rows.block_table, rows.cu_seqlens_q, rows.seq_lens, softmax_scale=self.scale,
            qk_nope_head_dim=self.qk_nope_head_dim, v_head_dim=self.v_head_dim, kv_lora_rank=self.kv_lora_rank, out=out, max_seq_len=rows.max_seq_len,
            chunk_tokens=chunk_tokens(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, q.element_size()),
        )

    @staticmethod
    def _w_kv_b(layer: Any) -> torch.Tensor:
        """[H * (nope + V), R]: the weight that vLLM has cut into W_UK_T [H, nope, R] and W_UV [H, R, V], which are views of it unless it was
        dequantised into another layout, and not packed since."""
        uk, uv = layer.W_UK_T, layer.W_UV
        heads, nope, R = uk.shape
        rows = nope + uv.shape[2]
        if uk.stride() == (rows * R, R, 1) and uv.stride() == (rows * R, 1, R) and uv.data_ptr() == uk.data_ptr() + nope * R * uk.element_size():
            return uk.as_strided((heads * rows, R), (R, 1))
        return torch.cat((uk, uv.transpose(1, 2)), dim=1).flatten(0, 1)
