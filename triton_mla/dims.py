"""Dimensions of an MLA layer, those that the kernels serve, and the softmax scale that follows from them (never from the latent width)."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_NUM_HEADS = 128
MAX_KV_LORA_RANK = 512
MAX_QK_ROPE_HEAD_DIM = 64
# Widest head of a prefill, for nope, rope and value columns alike.
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class MLADims:
    """One MLA layer, in the names of the DeepSeek configs (arXiv:2405.04434, arXiv:2412.19437).

    Attributes:
        num_heads: query heads on this rank.
        softmax_scale: given, or None: (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * mscale ** 2.
        rope_factor, mscale_all_dim: YaRN (arXiv:2309.00071): mscale = 0.1 * mscale_all_dim * ln(rope_factor) + 1 for a factor above 1, else 1.
    """

    num_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    softmax_scale: float | None = None
    rope_factor: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("num_heads", 1), ("kv_lora_rank", 1), ("qk_rope_head_dim", 0), ("qk_nope_head_dim", 1), ("v_head_dim", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an int >= {least}")
        if self.num_heads > MAX_NUM_HEADS:
            raise ValueError(f"num_heads={self.num_heads!r} must be at most {MAX_NUM_HEADS}")
        for name, low in (("rope_factor", 1.0), ("mscale_all_dim", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= 1e30:
                raise ValueError(f"{name}={value!r} must be a number from {low} to 1e30")
        if self.softmax_scale is None:
            mscale = 0.1 * self.mscale_all_dim * math.log(self.rope_factor) + 1.0
            object.__setattr__(self, "softmax_scale", self.qk_head_dim**-0.5 * mscale**2)
        elif isinstance(self.softmax_scale, bool) or not isinstance(self.softmax_scale, (int, float)) or not (
            1e-30 <= self.softmax_scale <= 1e30
        ):
            raise ValueError(f"softmax_scale={self.softmax_scale!r} must be a number from 1e-30 to 1e30, or None to derive it from the head dims")

    @property
    def qk_head_dim(self) -> int:
        """nope + rope: the width of an unabsorbed query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """R + P: the width of a cached token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


DEEPSEEK_V3 = MLADims(num_heads=128, rope_factor=40.0, mscale_all_dim=1.0)
DEEPSEEK_V2_LITE = MLADims(num_heads=16, rope_factor=40.0, mscale_all_dim=0.707)
KIMI_K2 = MLADims(num_heads=64, rope_factor=32.0, mscale_all_dim=1.0)


def check_num_heads(num_heads: int) -> None:
    """Raise ValueError unless the kernels serve so many heads."""
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or not 1 <= num_heads <= MAX_NUM_HEADS:
        raise ValueError(f"num_heads={num_heads!r} must be an int from 1 to {MAX_NUM_HEADS}")


def check_head_dims(qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int) -> None:
    """Raise ValueError unless the prefill kernels serve these heads."""
    dims = (("qk_nope_head_dim", qk_nope_head_dim, 16), ("qk_rope_head_dim", qk_rope_head_dim, 0), ("v_head_dim", v_head_dim, 16))
    for name, value, least in dims:
        if not _is_multiple(value, least, MAX_HEAD_DIM):
            raise ValueError(f"{name}={value!r} must be a multiple of 16 from {least} to {MAX_HEAD_DIM}")


def check_dims(kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """Raise ValueError unless the kernels serve these latent dims."""
    if not _is_multiple(kv_lora_rank, 16, MAX_KV_LORA_RANK):
        raise ValueError(f"kv_lora_rank={kv_lora_rank!r} must be a multiple of 16 from 16 to {MAX_KV_LORA_RANK}")
    if not _is_multiple(qk_rope_head_dim, 0, MAX_QK_ROPE_HEAD_DIM):
        raise ValueError(f"qk_rope_head_dim={qk_rope_head_dim!r} must be 0 or a multiple of 16 up to {MAX_QK_ROPE_HEAD_DIM}")


def _is_multiple(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0 and least <= value <= most


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless the kernels serve this page size."""
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1 or (page_size != 1 and page_size % 16):
        raise ValueError(f"page_size={page_size!r} must be 1 or a multiple of 16")
