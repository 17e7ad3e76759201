"""How matrix products are spread over a machine: nothing here can change a bit."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch


@dataclass(frozen=True)
class Tile:
    """How a product is spread over the machine. No field can change a bit.

    Attributes:
        swap: the accumulator is held transposed, so that few rows are the narrow operand of the matrix unit.
        across: where K is split, each split is a program's own; else each program takes them one after the other.
        tma: operands come by descriptors where their strides allow it, on sm_90.
        per_sm: with ``tma``, programs that stay on a multiprocessor and take tile after tile; 0: each program takes one.
        subtiles: with ``tma``, the runs of columns, 1 or 2, in which a tile is stored.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    swap: bool = False
    across: bool = False
    tma: bool = False
    per_sm: int = 0
    subtiles: int = 1


# Rows of (most M, most N, tile); the first that holds is taken. fp32 products are unrolled multiplications, which want small tiles.
TILES = {
    "sm_90": (
        (16, 4096, Tile(16, 16, 256, 4, 4, across=True)),
        (16, inf, Tile(16, 32, 256, 4, 4, across=True)),
        (32, 4096, Tile(32, 32, 128, 4, 5, across=True)),
        (32, inf, Tile(32, 64, 128, 4, 4, across=True)),
        (64, 4096, Tile(64, 32, 128, 4, 5, across=True)),
        (64, inf, Tile(64, 64, 128, 4, 4, across=True)),
        (128, inf, Tile(128, 64, 128, 4, 3, across=True)),
        (512, 8192, Tile(128, 128, 64, 8, 4, tma=True, per_sm=1)),
        (inf, 2560, Tile(128, 128, 64, 8, 4, tma=True, per_sm=1)),
        (inf, inf, Tile(128, 256, 64, 8, 4, tma=True, per_sm=1, subtiles=2)),
    ),
    "other": (
        (16, inf, Tile(16, 64, 128, 4, 3, across=True)),
        (64, inf, Tile(64, 64, 64, 4, 3, across=True)),
        (inf, inf, Tile(128, 128, 64, 8, 3)),
    ),
    "fp32": ((inf, inf, Tile(16, 64, 32, 4, 2, across=True)),),
    "interpreter": ((inf, inf, Tile(64, 64, 128, 4, 1)),),
}


def tile_for(M: int, N: int, dtype: torch.dtype, arch: str) -> Tile:
    """The tile of a product; one for all under the interpreter, whose products follow the shape of the tile."""
    table = "fp32" if dtype == torch.float32 and arch != "interpreter" else arch
    return next(tile for most_m, most_n, tile in TILES.get(table, TILES["other"]) if most_m >= M and most_n >= N)
