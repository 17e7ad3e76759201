"""The products around the absorbed form, compiled for every GPU without one: they fit, hold no atomics, and use the matrix unit."""

from __future__ import annotations

import aot
import pytest
import torch
from test_aot import check_fits

from triton_mla.absorb import FP32_TILE, TILES, Tile
from triton_mla.kernels.absorb import head_matmul_kernel
from triton_mla.launch import INTERPRETED
from triton_mla.tuning import ARCHITECTURES

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing can be compiled; run with TRITON_INTERPRET=0"),
]

ARCHS = [arch for arch in ARCHITECTURES if arch != "interpreter"]
# (K, N, the stride of the weights that is 1) of W_UK and W_UV of DeepSeek-V3
PRODUCTS = {"w_uk": (128, 512, "stride_w_n"), "w_uv": (512, 128, "stride_w_k")}


def compiled(arch: str, tile: Tile, product: str, dtype: torch.dtype) -> str:
    K, N, unit = PRODUCTS[product]
    constants = {"K": K, "N": N, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "PRECISION": "ieee", "EMULATE_BF16": False, unit: 1}
    launch = aot.Launch(head_matmul_kernel, constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages})
    return check_fits(arch, launch, launch.compile(arch, dtype))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("rows", TILES)
@pytest.mark.parametrize("arch", ARCHS)
def test_bf16(arch: str, rows: int, product: str) -> None:
    text = compiled(arch, TILES[rows], product, torch.bfloat16)
    if arch.startswith("gfx"):
        assert "v_mfma" in text
    else:
        assert "wgmma" in text if arch == "sm_90" and rows >= 64 else "mma.sync" in text or "tcgen05" in text


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_fp32_is_not_rounded_for_the_matrix_unit(arch: str, product: str) -> None:
    text = compiled(arch, FP32_TILE, product, torch.float32)
    assert arch.startswith("gfx") or "mma" not in text
