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


Options = dict[Tile, float]
"""Tiles, and how long a multiprocessor takes for one, in units of the row of the table: that of the shortest sum of waves is taken."""

_LOW: Options = {
    Tile(64, 32, 128, 4, 6, tma=True): 1,
    Tile(64, 64, 128, 4, 6, tma=True, per_sm=1): 1.05,
    Tile(64, 128, 128, 4, 4, tma=True, per_sm=1): 1.76,
}
_SQUARE = Tile(128, 128, 128, 8, 3, tma=True, per_sm=1)
_HIGH: Options = {
    **_LOW,
    _SQUARE: 2.2,
    Tile(128, 256, 64, 8, 4, tma=True, per_sm=1, subtiles=2): 3.9,
    Tile(256, 128, 64, 8, 4, tma=True, per_sm=1, subtiles=2): 3.9,
}
# Rows of (most M, most columns of all matrices of a batch, options); the first that holds is taken. A GPU of its own has a table each for products
# of one matrix with whole K, of one with K split, and of a batch of them. fp32 products are unrolled multiplications, which want small tiles.
TILES: dict[str, tuple[tuple[float, float, Options], ...]] = {
    "sm_90 whole": (
        (16, inf, {Tile(16, 64, 256, 4, 5, swap=True, tma=True, per_sm=1): 1}),
        (32, inf, {Tile(32, 64, 256, 4, 4, swap=True, tma=True, per_sm=1): 1}),
        (128, inf, _LOW),
        (inf, inf, _HIGH),
    ),
    "sm_90 split": (
        (16, inf, {Tile(16, 64, 128, 4, 5, swap=True, across=True): 1}),
        (32, inf, {Tile(32, 64, 128, 4, 4, swap=True, across=True): 1}),
        (64, inf, {Tile(64, 64, 128, 4, 4, across=True): 1}),
        (128, inf, {Tile(128, 64, 128, 4, 4, across=True, tma=True): 1}),
        (inf, inf, {
            Tile(128, 64, 128, 4, 4, swap=True, tma=True): 1.5,
            Tile(128, 128, 64, 8, 4, tma=True, per_sm=1): 2.2,
            Tile(256, 64, 64, 8, 4, swap=True, tma=True, per_sm=1): 2.4,
        }),
    ),
    "sm_90 batch": (
        (16, inf, {Tile(16, 64, 128, 4, 4): 1}),
        (64, 2048, {Tile(64, 32, 128, 4, 5): 1}),
        (64, 16384, {Tile(64, 64, 64, 4, 4): 1}),
        (64, inf, {Tile(64, 128, 64, 4, 3): 1}),
        (inf, inf, {**_HIGH, _SQUARE: 1.96}),  # few blocks of K: the end of a tile weighs more
    ),
    "other": (
        (16, inf, {Tile(16, 64, 128, 4, 3, across=True): 1}),
        (64, inf, {Tile(64, 64, 64, 4, 3, across=True): 1}),
        (inf, inf, {Tile(128, 128, 64, 8, 3): 1}),
    ),
    "fp32": ((inf, inf, {Tile(16, 64, 32, 4, 2, across=True): 1}),),
    "interpreter": ((inf, inf, {Tile(64, 64, 128, 4, 1): 1}),),
}


def tiles_of(arch: str) -> list[Tile]:
    """All tiles of the tables of an architecture, each once."""
    tables = [table for name, table in TILES.items() if name.split()[0] == arch] or [TILES["other"]]
    return list(dict.fromkeys(tile for table in tables for _, _, options in table for tile in options))


def tile_for(M: int, N: int, dtype: torch.dtype, arch: str, *, batch: int = 1, split: bool = False, num_sms: int = 132) -> Tile:
    """The tile of a product of ``batch`` matrices; one for all under the interpreter, whose products follow the shape of the tile.

    Options are weighed by the waves of tiles that ``num_sms`` multiprocessors need for all of the result.
    """
    table = TILES.get(arch) or TILES.get(f"{arch} {'split' if split else 'batch' if batch > 1 else 'whole'}") or TILES["other"]
    if dtype == torch.float32 and arch != "interpreter":
        table = TILES["fp32"]
    options = next(options for most_m, most_columns, options in table if most_m >= M and most_columns >= batch * N)

    def cost(tile: Tile) -> float:
        tiles = batch * -(-M // tile.block_m) * -(-N // tile.block_n)
        return options[tile] * -(-tiles // num_sms)

    return min(options, key=cost)
