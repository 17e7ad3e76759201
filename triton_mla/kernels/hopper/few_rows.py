"""Which query rows a tile of the kernel for few work items has, and where the state of a split goes: the arithmetic and the memory of
`_common.locate_rows` and `partials.store_state`, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .decode_rows import LATENT, LN2
from .registers import across

NOTHING = gl.constexpr(-0x40000000)  # position from which no token is seen


@gluon.jit
def locate_tile(batch, ROWS: gl.constexpr, DECODE: gl.constexpr, WARPS: gl.constexpr):
    """Scalars of a row tile: (request, whether it is too long, its first query token, how many it has, position of the first, first row)."""
    row_tile, CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, num_heads, max_seq_len = batch
    if DECODE:
        tiles = (num_heads + ROWS - 1) // ROWS
        request = row_tile // tiles
        start = request
        count = 1
        q_len = 1
        first_row = row_tile % tiles * ROWS
        kv_len = gl.load(SEQ_LENS + request)
        real = True
    else:
        LANES: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])  # 256 integers, all of them in every warp
        before = 0
        for chunk in range(0, batch_size + 1, 256):
            i = chunk + gl.arange(0, 256, LANES)
            first_tile = gl.load(CU_SEQLENS_Q + i, mask=i <= batch_size, other=0).to(gl.int64) * num_heads // ROWS + i
            before += gl.sum(((i <= batch_size) & (first_tile <= row_tile)).to(gl.int32), 0)
        request = gl.maximum(before - 1, 0)
        real = request < batch_size
        start = gl.load(CU_SEQLENS_Q + request)
        q_len = gl.load(CU_SEQLENS_Q + request + 1, mask=real, other=num_tokens) - start
        count = gl.minimum(q_len, num_tokens - start)
        first_row = (row_tile - (start.to(gl.int64) * num_heads // ROWS + request)).to(gl.int32) * ROWS
        kv_len = gl.load(SEQ_LENS + request, mask=real, other=0)
    too_long = kv_len > max_seq_len
    position = gl.where(real & (kv_len <= max_seq_len), kv_len - q_len, NOTHING)
    return request, too_long, start, count, position, first_row


@gluon.jit
def visible_tokens(tile, num_heads, ROWS: gl.constexpr):
    """Tokens that the last row of a tile sees; 0 of a tile without rows."""
    request, too_long, start, count, position, first_row = tile
    last = gl.minimum((first_row + ROWS - 1) // num_heads, count - 1)
    return gl.where(last >= first_row // num_heads, gl.maximum(position + last + 1, 0), 0)


@gluon.jit
def tile_rows(tile, num_heads, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """(token, head, tokens seen, whether it is a row), each [ROWS]. Starts outside the tokens must not lead out of the tensors."""
    request, too_long, start, count, position, first_row = tile
    row = first_row + gl.arange(0, ROWS, LAYOUT)
    token = row // num_heads
    return start + token, row % num_heads, position + token + 1, (row >= 0) & (token >= -start) & (token < count)


@gluon.jit
def load_q(Q, stride_token, stride_head, tile, num_heads, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Queries [ROWS, COLUMNS] of a tile, zeros where it has no row."""
    token, head, seen, valid = tile_rows(tile, num_heads, ROWS, gl.SliceLayout(1, LAYOUT))
    rows = Q + token.to(gl.int64)[:, None] * stride_token + head.to(gl.int64)[:, None] * stride_head
    return gl.load(rows + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :], mask=valid[:, None], other=0.0)


@gluon.jit
def store_split(ref, total, rest, acc, tile, split, row_tile, column, rows, num_heads, ROWS: gl.constexpr, WITH_LSE: gl.constexpr):
    """ref, total, rest [ROWS], mass = total + rest; acc: some times [ROWS, 64], from value column ``column`` on. ``row_tile``: of the wave.

    Rows that see one split are finished, others leave a partial. With column 0 goes what a row has once.
    """
    OUT, LSE, PARTIALS, stride_out_token, stride_out_head, kv_split, num_splits, num_rows = rows
    ACC: gl.constexpr = acc[0].type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    too_long = tile[1]
    token, head, seen, valid = tile_rows(tile, num_heads, ROWS, ROW)
    cols = column + gl.arange(0, 64, gl.SliceLayout(0, ACC))[None, :]
    row = token.to(gl.int64) * num_heads + head
    row_splits = (gl.maximum(seen, 0) + kv_split - 1) // kv_split
    if split == 0:
        finished = valid & (row_splits <= 1)
        empty = total == 0.0
        inverse = gl.div_rn(gl.full([ROWS], 1.0, gl.float32, ROW), gl.where(empty, 1.0, total))
        out = OUT + token.to(gl.int64)[:, None] * stride_out_token + head.to(gl.int64)[:, None] * stride_out_head + cols
        for j in gl.static_range(len(acc)):
            y = gl.where(too_long, float("nan"), acc[j] * across(inverse, acc[j]))
            gl.store(out + j * 64, y.to(OUT.dtype.element_ty), mask=finished[:, None])
        if WITH_LSE and column == 0:
            lse = gl.where(empty, float("-inf"), (ref + gl.log2(gl.where(empty, 1.0, total + rest))) * LN2)
            gl.store(LSE + row, gl.where(too_long, float("nan"), lse), mask=finished)
    if num_splits > 1:
        kept = valid & (row_splits > 1) & (split < row_splits)
        slot = row_tile * ROWS + gl.arange(0, ROWS, ROW)
        at = num_rows.to(gl.int64) * split + slot
        partial = PARTIALS + at[:, None] * LATENT + cols
        for j in gl.static_range(len(acc)):
            gl.store(partial + j * 64, acc[j], mask=kept[:, None], eviction_policy="evict_last")
        if column == 0:
            state = PARTIALS + num_rows.to(gl.int64) * num_splits * LATENT
            states = state + num_rows.to(gl.int64) * 3 * split + slot
            gl.store(states, ref, mask=kept)
            gl.store(states + num_rows, total, mask=kept)
            if WITH_LSE:
                gl.store(states + 2 * num_rows, total + rest, mask=kept)
            if split == 0:
                ints = (state + num_rows.to(gl.int64) * num_splits * 3).to(gl.pointer_type(gl.int32)) + slot
                gl.store(ints, gl.where(valid & (row_splits > 1), row_splits, 0))
                gl.store(ints + num_rows, row.to(gl.int32))
