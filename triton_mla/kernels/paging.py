"""Where a token's latent row lies in the paged cache, and how a tile of them is loaded."""

import triton
import triton.language as tl


@triton.jit
def split_pages(BLOCK_TABLE, request, stride_table, first_tile, end, page_size, BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr):
    """Page ids of the tiles of a split, one vector in registers: no block-table load then stands between a tile and its address.

    For pages that hold whole tiles only.
    """
    start = (first_tile + tl.arange(0, SPLIT_TILES)) * BLOCK_N
    return tl.load(BLOCK_TABLE + request.to(tl.int64) * stride_table + start // page_size, mask=start < end, other=0)


@triton.jit
def row_pointers(KV, BLOCK_TABLE, pages, request, tile, first_tile, end, stride_table, stride_page, stride_slot, page_size,
                 BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr, WHOLE_TILES: tl.constexpr):
    """Pointers [BLOCK_N] to the latent rows of a tile, and which of them are real. A token keeps its column in the tile."""
    pos = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    owned = pos < end
    if WHOLE_TILES:
        # an element of the register vector: a scalar load in the loop would take one of the pipeline's buffers
        page = tl.sum(tl.where(tl.arange(0, SPLIT_TILES) == tile - first_tile, pages, 0), 0).to(tl.int64)
    else:
        page = tl.load(BLOCK_TABLE + request.to(tl.int64) * stride_table + pos // page_size, mask=owned, other=0).to(tl.int64)
    return KV + page * stride_page + (pos % page_size) * stride_slot, pos, owned
