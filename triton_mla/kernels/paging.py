"""Where a token's latent row lies in the paged cache."""

import triton
import triton.language as tl


@triton.jit
def tile_pages(BLOCK_TABLE, request, stride_table, first_tile, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr):
    """Page ids [SPLIT_TILES] of a split's tiles, held in registers, where a page holds whole tiles.

    No block-table load then stands between a tile and its address; as a load in the loop it would take one of the pipeline's buffers.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        start = (first_tile + tl.arange(0, SPLIT_TILES)) * BLOCK_N
        return tl.load(BLOCK_TABLE + request.to(tl.int64) * stride_table + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        return first_tile


@triton.jit
def row_offsets(pages, BLOCK_TABLE, request, stride_table, stride_page, stride_slot, tile, first_tile, end, PAGE_SIZE: tl.constexpr,
                BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr):
    """(element offset of each token's row, its position, whether it is real), each [BLOCK_N]. A token keeps its column in the tile."""
    pos = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    owned = pos < end
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.sum(tl.where(tl.arange(0, SPLIT_TILES) == tile - first_tile, pages, 0), 0)
        slot = tile * BLOCK_N % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        page = tl.load(BLOCK_TABLE + request.to(tl.int64) * stride_table + pos // PAGE_SIZE, mask=owned, other=0)
        slot = pos % PAGE_SIZE
    return page.to(tl.int64) * stride_page + slot * stride_slot, pos, owned
