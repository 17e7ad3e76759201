"""The companion products, compiled for GPUs without one: they fit, hold no atomics, spill nothing, and use the matrix unit and TMA."""

from __future__ import annotations

import re
from typing import Any

import aot
import pytest
import torch
import triton
from test_aot import FEW_ARCHS, SMALLEST, check_fits
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_mla.companion.multiply import COMBINE_WIDTH
from triton_mla.companion.tiles import TILES, Tile, tiles_of
from triton_mla.kernels.companion.grouped import add_slots_kernel, grouped_kernel
from triton_mla.kernels.companion.matmul import add_splits_kernel, matmul_kernel, matmul_tma_kernel
from triton_mla.launch import INTERPRETED
from triton_mla.tuning import ARCHITECTURES

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(INTERPRETED, reason="under TRITON_INTERPRET=1 nothing can be compiled; run with TRITON_INTERPRET=0"),
]

SPLITS = 4
INTEGERS = {"ROWS": "*i32", "GROUP_STARTS": "*i32", "PLACES": "*i32", "IDS": "*i32", "WEIGHTS": "*fp32", "PARTIALS": "*fp32"}
LINEAR = ("stride_a_k", "stride_b_k")
ARCHS = [arch for arch in ARCHITECTURES if arch != "interpreter"]
# On sm_90 the tiles of whole K. The others share a table: all of it where there is the least shared memory, elsewhere the largest tile.
WHOLE = list(dict.fromkeys(tile for table in ("sm_90 whole", "sm_90 batch") for *_, options in TILES[table] for tile in options))
TABLES = {arch: WHOLE if arch == "sm_90" else tiles_of(arch)[0 if arch in SMALLEST else -1 :] for arch in ARCHS}
CASES = [pytest.param(arch, tile, id=f"{arch}-{tile.block_m}x{tile.block_n}x{tile.block_k}") for arch, tiles in TABLES.items() for tile in tiles]


def build(arch: str, kernel: Any, constants: dict[str, Any], tile: Tile, dtype: torch.dtype, **types: str) -> str:
    """The assembly of a kernel whose integers and pointers are multiples of 16. ``types``: of arguments that are not pointers to ``dtype``."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        pointer = name.isupper() and name not in ("M", "N", "K")
        signature[name] = "constexpr" if name in constants else {**INTEGERS, **types}.get(name) or (aot.POINTERS[dtype] if pointer else "i32")
        if signature[name][0] in "*i" and name not in kernel.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    compiled = triton.compile(source, target=target, options={**options, "enable_fp_fusion": False})
    return check_fits(arch, aot.Launch(kernel, constants, options), compiled)


def blocks(tile: Tile) -> dict[str, Any]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}


def matmul(arch: str, tile: Tile, dtype: torch.dtype, *, split: bool = False, even: bool = True, unit: tuple[str, ...] = LINEAR) -> str:
    across = split and tile.across
    constants = {**blocks(tile), "GROUP_M": tile.group_m, "EVEN_K": even, "SWAP": tile.swap, "SPLIT_K": 1792 if split else 0, "SPLITS": SPLITS if split else 1,
                 "ACROSS": across, "HAS_BIAS": False, "PRECISION": "ieee", "EMULATE_BF16": False, **dict.fromkeys(unit, 1)}
    return build(arch, matmul_kernel, constants, tile, dtype, **({"OUT": "*fp32"} if across else {}))


def matmul_tma(tile: Tile, *, split: bool = False, by_rows: tuple[bool, bool] = (True, False)) -> str:
    across = split and tile.across
    shapes = {"A": (tile.block_m, tile.block_k), "B": (tile.block_k, tile.block_n), "OUT": (tile.block_m, tile.block_n // tile.subtiles)}
    for name, straight in zip(("A", "B"), by_rows, strict=True):
        shapes[name] = shapes[name] if straight else shapes[name][::-1]
    types = {name: f"tensordesc<{'fp32' if across and name == 'OUT' else 'bf16'}[1, {rows}, {cols}]>" for name, (rows, cols) in shapes.items()}
    constants = {**blocks(tile), "GROUP_M": tile.group_m, "A_BY_ROWS": by_rows[0], "B_BY_ROWS": by_rows[1], "SWAP": tile.swap, "SPLIT_K": 1792 if split else 0,
                 "SPLITS": SPLITS if split else 1, "ACROSS": across, "HAS_BIAS": not across, "SUBTILES": tile.subtiles}
    return build("sm_90", matmul_tma_kernel, constants, tile, torch.bfloat16, **types)


def check_products(arch: str, tile: Tile, text: str) -> None:
    wide = arch == "sm_90" and (tile.block_n if tile.swap else tile.block_m) >= 64
    if arch.startswith("gfx"):
        assert "v_mfma" in text
    else:
        assert "wgmma" in text if wide else "mma.sync" in text or "tcgen05" in text


@pytest.mark.parametrize(("arch", "tile"), CASES)
def test_matmul(arch: str, tile: Tile) -> None:
    text = matmul(arch, tile, torch.bfloat16)
    check_products(arch, tile, text)
    assert re.search(r"cp\.async\.cg\S* \[ %r\d+ \+ 0 \], \[ %rd\d+ \+ 0 \], 0x10", text) or not re.match("sm_[89]", arch), "16 bytes of weights at a time"


@pytest.mark.parametrize("tile", [tile for table in ("sm_90 split", "other") for *_, options in TILES[table] for tile in options], ids=str)
def test_split(tile: Tile) -> None:
    """By pointers, and by descriptors where the table has them."""
    check_products("sm_90", tile, matmul("sm_90", tile, torch.bfloat16, split=True))
    if tile.tma:
        text = matmul_tma(tile, split=True)
        assert "wgmma" in text and "cp.async.bulk.tensor" in text


@pytest.mark.parametrize("tile", [tile for tile in WHOLE if tile.tma], ids=str)
def test_tma(tile: Tile) -> None:
    """With weights that lie as a model has them, and for some tiles in the other ways."""
    ways = [(True, False)] + [(True, True), (False, False)] * (tile.block_m in (16, 128))
    for by_rows in ways:
        text = matmul_tma(tile, by_rows=by_rows)
        assert "wgmma" in text and "cp.async.bulk.tensor" in text


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_odd_sizes_and_other_strides(arch: str) -> None:
    for tile in (tiles_of(arch)[0], tiles_of(arch)[-1]):
        check_products(arch, tile, matmul(arch, tile, torch.bfloat16, even=False, unit=("stride_a_m", "stride_b_n")))


@pytest.mark.parametrize("arch", FEW_ARCHS)
def test_fp32_is_not_rounded_for_the_matrix_unit(arch: str) -> None:
    assert arch.startswith("gfx") or "mma" not in matmul(arch, tiles_of("fp32")[0], torch.float32)


@pytest.mark.parametrize(("arch", "tile"), CASES)
def test_grouped(arch: str, tile: Tile) -> None:
    constants = {**blocks(tile), "TOP_K": 8, "EVEN_K": True, "SWAP": tile.swap, "PRECISION": "ieee", "EMULATE_BF16": False, "stride_w_k": 1}
    check_products(arch, tile, build(arch, grouped_kernel, constants, tile, torch.bfloat16))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_sums(arch: str) -> None:
    tile = Tile(16, 16, 16, 2, 1)
    build(arch, add_splits_kernel, {"SPLITS": SPLITS, "WIDTH": COMBINE_WIDTH, "HAS_BIAS": True, "EMULATE_BF16": False}, tile, torch.bfloat16)
    text = build(arch, add_slots_kernel, {"TOP_K": 8, "WIDTH": COMBINE_WIDTH, "EMULATE_BF16": False}, tile, torch.bfloat16)
    assert "fma.rn" in text
