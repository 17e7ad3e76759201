"""The work of a Hopper decode or extend, made on the device: who computes which splits of which row tile, and the rows that see no token.

A row tile is 64 / HEADS query tokens of a request and a block of up to 64 heads. Its splits are either one item, folded by the program that
makes them, or an item each, merged from partials by the combine kernel. The bits are the same. A fold needs no memory traffic but spreads a
request over no more than one program (a program for each value slice), so it is for requests no longer than 9/8 of the tokens that a program
has on average, which each slice has again. Of longer ones there are fewer than 8/9 as many row tiles, times slices, as programs: so many have
room for partials, or as many as twice `plan.MAX_WORKSPACE_BYTES` holds where requests may be longer than 140,000 tokens. The rest is folded.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

ITEM = tl.constexpr(8)


@triton.jit
def requests(request, CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, max_seq_len, TOKENS: tl.constexpr, DECODE: tl.constexpr):
    """Of requests [N] up to batch_size, the padding after the last: (first query token, query tokens, kv length or 0 where no row sees a
    token or it is too long, position of the first query token, token tiles)."""
    real = request < batch_size
    length = tl.load(SEQ_LENS + request, mask=real, other=0)
    if DECODE:
        start = request
        q_len = real.to(tl.int32)
        position = length - 1
    else:
        # starts outside the tokens, which only the device sees, must not lead out of the tensors
        end = tl.load(CU_SEQLENS_Q + request + 1, mask=real, other=num_tokens)
        start = tl.load(CU_SEQLENS_Q + request, mask=request <= batch_size, other=num_tokens)
        start = tl.minimum(tl.maximum(start, 0), num_tokens)
        position = length - (end - start)
        q_len = tl.maximum(tl.minimum(end, num_tokens) - start, 0)
    seen = (length > 0) & (length <= max_seq_len) & (position + q_len > 0)
    return start, q_len, tl.where(seen, length, 0), position, (q_len + TOKENS - 1) // TOKENS


@triton.jit
def pick(vector, where):
    """The one element of an int vector where ``where`` holds."""
    return tl.sum(tl.where(where, vector, 0), 0)


@triton.jit(
    do_not_specialize=["num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "num_splits", "slot_tiles", "programs", "slices", "room", "work_at"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "SEQ_LENS", "LSE"],
)
def hopper_decode_work_kernel(
    CU_SEQLENS_Q, SEQ_LENS, OUT, LSE, PARTIALS, stride_out_token, stride_out_head, num_tokens, batch_size, num_heads, max_seq_len, kv_split, num_splits,
    slot_tiles, programs, slices, room, work_at,
    HEADS: tl.constexpr, BATCH: tl.constexpr, DECODE: tl.constexpr, WITH_LSE: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (any), BATCH > batch_size. At 64 * work_at of PARTIALS, int32: a head [8], which is the number of items and 0, where programs count
    the units (decode.py) that they have taken besides the first one each; and the items [room, 8]: first token, end, tokens that the tile's
    first query token sees, that token, block of heads + 256 * query tokens, request, partial of the first row or -1.

    Items come by falling length, so that who is done early takes small ones. The blocks of heads of a split lie side by
    side, so that its latent rows come from memory once (128 requests of 8192 tokens and 128 heads: 647 against 568 us, H200).
    """
    if PDL:
        gdc_launch_dependents()
    TOKENS: tl.constexpr = 64 // HEADS
    WORK = (PARTIALS + work_at.to(tl.int64) * 64).to(tl.pointer_type(tl.int32))
    INTS = (PARTIALS + (slot_tiles * 64).to(tl.int64) * (num_splits * 515)).to(tl.pointer_type(tl.int32))  # of the partials
    blocks = tl.cdiv(num_heads, 64)
    v = tl.arange(0, BATCH)
    starts, q_lens, lengths, positions, tiles = requests(v, CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, max_seq_len, TOKENS, DECODE)
    row_tiles = tiles * blocks
    seeing = tl.where(lengths > 0, row_tiles, 0)
    load = tl.sum(seeing.to(tl.float32) * lengths.to(tl.float32), 0) * slices / programs
    long = (lengths > kv_split) & (lengths.to(tl.float32) * 8.0 > load * 9.0)
    slots = tl.cumsum(tl.where(long, row_tiles, 0), 0)
    spread = long & (slots <= slot_tiles)
    full = tl.where(spread, (lengths - 1) // kv_split, 0)  # whole splits before the last one
    rest = tl.where(spread, lengths - full * kv_split, lengths)  # the only item of a folded tile, the last one of another
    full_items = seeing * full
    all_full = tl.sum(full_items, 0)
    before = tl.cumsum(row_tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(WORK, tl.minimum(tl.sum(seeing, 0) + all_full, room))
        tl.store(WORK + 1, 0)
    field = tl.arange(0, ITEM)
    r = tl.arange(0, 64)
    for i in range(tl.program_id(0), tl.sum(row_tiles, 0), tl.num_programs(0)):
        request = tl.sum((before <= i).to(tl.int32), 0)
        me = v == request
        start, q_len, length, position, tiles_here = requests(request, CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, max_seq_len, TOKENS, DECODE)
        at = i - pick(before - row_tiles, me)
        tile = at // blocks
        block = at % blocks
        q_token = start + tile * TOKENS
        tokens = tl.minimum(q_len - tile * TOKENS, TOKENS)
        token = q_token + r // HEADS
        head = block * 64 + r % HEADS
        inside = (r // HEADS < tokens) & (head < num_heads)
        if length > 0:
            seen = position + tile * TOKENS + 1
            visible = tl.maximum(seen + tokens - 1, 0)
            last = pick(rest, me)
            rank = tl.sum(tl.where((rest > last) | ((rest == last) & (v < request)), seeing, 0), 0) + (tiles_here - 1 - tile) * blocks + block
            rank += tl.where(kv_split >= last, all_full, 0)
            full_rank = tl.sum(tl.where(rest > kv_split, seeing, 0), 0) + tl.sum(tl.where(v < request, full_items, 0), 0)
            splits = pick(full, me) + 1
            slot = pick(slots - row_tiles, me) + at
            spread_here = pick(spread.to(tl.int32), me) != 0
            item = tl.where(field == 2, seen, tl.where(field == 3, q_token, tl.where(field == 4, block + 256 * tokens, request)))
            for split in range(splits):
                first = tl.minimum(split * kv_split, visible)
                end = tl.minimum(first + kv_split, visible) if spread_here else visible
                place = tl.where(split == splits - 1, rank, full_rank + (tile * (splits - 1) + split) * blocks + block)
                partial = tl.where(spread_here, (split * slot_tiles + slot) * 64, -1)
                row = tl.where(field == 0, first, tl.where(field == 1, end, tl.where(field == 6, partial, item)))
                tl.store(WORK + (1 + place) * ITEM + field, row, mask=place < room)
            if spread_here:
                partials = tl.maximum(tl.cdiv(seen + r // HEADS, kv_split), 1)
                tl.store(INTS + slot * 64 + r, tl.where(inside, partials, 0))
                tl.store(INTS + (slot_tiles + slot) * 64 + r, token * num_heads + head)
        else:
            too_long = tl.load(SEQ_LENS + request, mask=request < batch_size, other=0) > max_seq_len
            empty = tl.where(too_long, float("nan"), 0.0)
            ROWS: tl.constexpr = 8
            for row in range(0, tokens * HEADS, ROWS):
                r8 = row + tl.arange(0, ROWS)
                head8 = block * 64 + r8 % HEADS
                out = OUT + (q_token + r8 // HEADS).to(tl.int64) * stride_out_token + head8.to(tl.int64) * stride_out_head
                values = (tl.zeros([ROWS, 512], tl.float32) + empty).to(OUT.dtype.element_ty)
                tl.store(out[:, None] + tl.arange(0, 512)[None, :], values, mask=(head8 < num_heads)[:, None])
            if WITH_LSE:
                lse = tl.where(too_long, float("nan"), -float("inf")) + tl.zeros([64], tl.float32)
                tl.store(LSE + token.to(tl.int64) * num_heads + head, lse, mask=inside)
    for slot in range(tl.sum(tl.where(spread, row_tiles, 0), 0) + tl.program_id(0), slot_tiles, tl.num_programs(0)):
        tl.store(INTS + slot * 64 + r, tl.zeros([64], tl.int32))
