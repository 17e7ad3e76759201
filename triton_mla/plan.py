"""Batch facts become grids here, and nowhere else. Pure functions of data: no tensor, no device, no kernel.

The split table of a request is a function of its length and the `ReductionOrder` alone. The schedule may look at the batch; it decides
who computes a split, never where it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .dims import check_dims, check_head_dims, check_num_heads, check_page_size
from .tuning import ARCHITECTURES, DEFAULT_ORDER, DEFAULT_PREFILL_ORDER, ROW_SUMS, PrefillOrder, ReductionOrder, Schedule, rows_of_values, scores_size

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Programs of the scores kernel beyond which they walk several tiles each: most of a grid made for the longest possible context is empty.
MAX_PROGRAMS_PER_SM = 16
FEW_PROGRAMS_PER_SM = 8  # the same of the form for few items, whose empty programs keep a multiprocessor each for 0.6 us (H200)
# Scratch memory of a call beyond which its row tiles are done in waves, one after another. The Hopper form has no waves and folds what finds no
# room in twice as much: with the limit itself one of 64 requests of 131072 tokens was folded, and the others waited for it (5.1 ms, H200).
MAX_WORKSPACE_BYTES = 1 << 30
# What the Hopper form is written for: latent and rope columns, rows of a tile, and from how many heads on its tiles can be full.
HOPPER_DIMS = (512, 64)
HOPPER_ROWS = 64
HOPPER_LEAST_HEADS = 8
HOPPER_ITEM_INTS = 8
PREFILL_TILE = 128
# Tokens of a request that a paged prefill up-projects at a time: a quarter of a GB of keys and values for 128 heads of DeepSeek-V3.
DEFAULT_CHUNK_TOKENS = 4096


def split_table(seq_len: int, order: ReductionOrder = DEFAULT_ORDER) -> tuple[tuple[int, int], ...]:
    """(start, end) token ranges of the splits of a row that sees ``seq_len`` tokens: cut at absolute multiples of ``kv_split``.

    Raises ValueError: ``seq_len`` is not an int >= 0.
    """
    return _ranges(seq_len, order.kv_split)


def tile_table(seq_len: int, order: ReductionOrder = DEFAULT_ORDER) -> tuple[tuple[int, int], ...]:
    """(start, end) token ranges of the KV tiles of that row, ascending; a tile never crosses a split.

    Raises ValueError: ``seq_len`` is not an int >= 0.
    """
    return _ranges(seq_len, order.block_n)


def _ranges(seq_len: int, width: int) -> tuple[tuple[int, int], ...]:
    _check_int("seq_len", seq_len, 0)
    return tuple((start, min(start + width, seq_len)) for start in range(0, seq_len, width))


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an int >= {least}")


@dataclass(frozen=True)
class AttentionPlan:
    """How one call is spread over the machine. Valid for every call of the same shapes whose lengths are at most ``max_seq_len``.

    Attributes:
        num_splits: splits of the longest possible row; with one, every row is finished by its own program and no combine runs.
        num_row_tiles: row tiles of the call (in an extend an upper bound: the host does not know the query lengths).
        wave_row_tiles: row tiles that are done together, so that the scratch memory stays bounded.
        num_score_programs: programs that share the KV tiles of a row tile (two phases; in the Hopper form's for the weights).
        num_programs: programs of the Hopper form, which has no waves: ``wave_row_tiles`` have room for partials there, further ones are folded.
            In the form for few items: programs that share a row tile's splits; in two phases on Hopper: its KV tiles, for the scores.
        value_rows: rows of a program of the second phase on Hopper, a row tile or a part of one.
        workspace_bytes: scratch memory of a call, in bytes. Its contents need no initialisation.
    """

    num_tokens: int
    batch_size: int
    num_heads: int
    max_seq_len: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    page_size: int
    decode: bool
    arch: str
    order: ReductionOrder
    schedule: Schedule
    num_splits: int
    num_row_tiles: int
    wave_row_tiles: int
    num_score_programs: int
    num_programs: int = 0
    value_rows: int = 0

    @property
    def wave_rows(self) -> int:
        """Rows of a wave, those included that tiles have in excess."""
        return self.wave_row_tiles * self.schedule.block_rows

    @property
    def num_tiles(self) -> int:
        """KV tiles of the longest possible row, in whole splits."""
        return self.num_splits * (self.order.kv_split // self.order.block_n)

    @property
    def partials_size(self) -> int:
        """fp32 elements of the partial states (kernels/partials.py)."""
        return self.wave_rows * _partials_per_row(self.num_splits, self.kv_lora_rank)

    @property
    def num_items(self) -> int:
        """Work items of the Hopper form, at most."""
        return self.num_row_tiles + (self.wave_row_tiles * self.num_splits if self.num_splits > 1 else 0)

    @property
    def work_size(self) -> int:
        """32-bit elements of the Hopper form's list of work, behind the partials."""
        return -(-(1 + self.num_items) * HOPPER_ITEM_INTS // HOPPER_ROWS) * HOPPER_ROWS

    @property
    def scores_size(self) -> int:
        """fp32 elements behind the partials: the scores of the two-phase forms, the list of work and the folds of the Hopper form."""
        if self.schedule.form == "hopper":
            return self.work_size + self.num_programs * HOPPER_ROWS * (self.kv_lora_rank + 2 * 3)
        return self.wave_row_tiles * scores_size(self.schedule, self.num_tiles, self.order.block_n)

    @property
    def workspace_bytes(self) -> int:
        own = 4 * (self.partials_size + self.scores_size)
        return max(own, self.portable().workspace_bytes) if self.schedule.form.startswith("hopper") else own

    def portable(self) -> AttentionPlan:
        """The plan without a Hopper form: for calls that it does not serve. No bit changes."""
        if not self.schedule.form.startswith("hopper"):
            return self
        schedule = replace(self.schedule, form="one_pass", value_slices=1)
        row_tiles = _row_tiles(self.num_tokens, self.batch_size, self.num_heads, schedule.block_rows, self.decode)
        wave = _wave(row_tiles, 4 * _partials_per_row(self.num_splits, self.kv_lora_rank) * schedule.block_rows, MAX_WORKSPACE_BYTES)
        return replace(self, schedule=schedule, num_row_tiles=row_tiles, wave_row_tiles=wave, num_programs=0, value_rows=0)


def _partials_per_row(num_splits: int, kv_lora_rank: int) -> int:
    return num_splits * (kv_lora_rank + 3) + 2 if num_splits > 1 else 0


def _row_tiles(num_tokens: int, batch_size: int, num_heads: int, block_rows: int, decode: bool) -> int:
    if decode:
        return batch_size * -(-num_heads // block_rows)
    return num_tokens * num_heads // block_rows + batch_size + 1


def _wave(row_tiles: int, tile_bytes: int, limit: int) -> int:
    return max(1, min(row_tiles, limit // tile_bytes) if tile_bytes else row_tiles)


def hopper_tile(num_heads: int) -> tuple[int, int, int]:
    """(heads, query tokens, blocks of heads) of the row tiles of the Hopper form: a tile is 64 rows of one block."""
    heads = min(HOPPER_ROWS, max(HOPPER_LEAST_HEADS, 1 << (num_heads - 1).bit_length()))
    return heads, HOPPER_ROWS // heads, -(-num_heads // HOPPER_ROWS)


def _hopper_row_tiles(num_tokens: int, batch_size: int, num_heads: int, decode: bool) -> int:
    _, tokens, blocks = hopper_tile(num_heads)
    return (batch_size if decode else num_tokens // tokens + batch_size + 1) * blocks


def hopper_refusal(*, num_heads: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype, page_size: int, order: ReductionOrder) -> str | None:
    """Why the Hopper form does not serve a call of these sizes, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it is for 16-bit caches, not {dtype}"
    if (kv_lora_rank, qk_rope_head_dim) != HOPPER_DIMS:
        return f"it is for {HOPPER_DIMS[0]} latent and {HOPPER_DIMS[1]} rope columns, not {kv_lora_rank} and {qk_rope_head_dim}"
    if num_heads < HOPPER_LEAST_HEADS:
        return f"it is for {HOPPER_LEAST_HEADS} heads and more, not {num_heads}"
    if page_size % 16:
        return f"TMA reads pages of multiples of 16 tokens, not of {page_size}"
    if (order.block_n, order.reference_step) != (64, 8):
        return f"its tiles are 64 tokens and its reference moves by 8, not {order.block_n} and {order.reference_step}"
    return None


def choose_schedule(
    *, num_tokens: int, batch_size: int, num_heads: int, num_splits: int, dtype: torch.dtype, decode: bool, arch: str, num_sms: int, hopper: bool = False
) -> Schedule:
    """The schedule for what the host knows of a batch. Free to look at all of it, since no schedule changes a bit.

    ``hopper``: whether the Hopper form may be chosen.
    """
    table = ARCHITECTURES[arch]
    if dtype == torch.float32:
        return table.fp32
    rows_per_request = -(-num_tokens // max(batch_size, 1)) * num_heads
    items16 = _row_tiles(num_tokens, batch_size, num_heads, 16, decode) * num_splits
    if hopper and table.hopper is not None:
        if items16 <= num_sms // 8:
            return table.hopper.phases
        # An extend has row tiles that may be empty, whose programs of 64 rows wait for a multiprocessor each: 41 us where a decode takes 26.
        if decode and num_heads >= HOPPER_ROWS and items16 <= num_sms // 2:
            return replace(table.hopper.phases, block_rows=HOPPER_ROWS)
        if items16 <= num_sms or rows_per_request < HOPPER_ROWS // 2:
            return table.hopper.few
        items = _hopper_row_tiles(num_tokens, batch_size, num_heads, decode) * num_splits
        return replace(table.hopper.many, value_slices=2 if 2 * items <= num_sms else 1)
    if table.rows16 is None or (arch != "interpreter" and items16 <= num_sms // 8):
        return table.few
    rows64 = table.rows64
    if rows64 is not None and rows_per_request > rows64.block_rows // 2 and (
            _row_tiles(num_tokens, batch_size, num_heads, rows64.block_rows, decode) * num_splits >= num_sms * 3 // 4):
        return rows64
    if table.full16 is not None and items16 > num_sms:
        return table.full16
    return table.rows16


def plan_attention(
    *,
    num_tokens: int,
    batch_size: int,
    num_heads: int,
    max_seq_len: int,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    decode: bool = True,
    arch: str = "sm_90",
    num_sms: int = 132,
    order: ReductionOrder = DEFAULT_ORDER,
    schedule: Schedule | None = None,
) -> AttentionPlan:
    """Plan a decode (one query token a request) or an extend call.

    Args:
        num_tokens: query tokens T of the call; equal to ``batch_size`` in a decode.
        max_seq_len: no request of a call with this plan may be longer. A longer one is refused on a CPU; on a GPU, where the host does
            not see lengths, its rows become NaN.
        arch: a name of `tuning.ARCHITECTURES`; num_sms: multiprocessors of the device.
        schedule: overrides the choice by the table; it cannot change a bit.

    Raises:
        ValueError: an argument the kernels cannot serve, by name.
    """
    for name, value, least in (("num_tokens", num_tokens, 0), ("batch_size", batch_size, 0), ("max_seq_len", max_seq_len, 0), ("num_sms", num_sms, 1)):
        _check_int(name, value, least)
    check_num_heads(num_heads)
    check_dims(kv_lora_rank, qk_rope_head_dim)
    check_page_size(page_size)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {DTYPES}")
    if not isinstance(order, ReductionOrder):
        raise ValueError(f"order={order!r} must be a ReductionOrder")
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ValueError(f"schedule={schedule!r} must be a Schedule")
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch={arch!r} must be one of {sorted(ARCHITECTURES)}")
    if not isinstance(decode, bool):
        raise ValueError(f"decode={decode!r} must be True or False")
    if decode and num_tokens != batch_size:
        raise ValueError(f"num_tokens={num_tokens!r} must equal batch_size={batch_size!r} in a decode")
    num_splits = max(1, -(-max_seq_len // order.kv_split))
    if schedule is None:
        refusal = hopper_refusal(num_heads=num_heads, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, dtype=dtype, page_size=page_size,
                                 order=order)
        schedule = choose_schedule(num_tokens=num_tokens, batch_size=batch_size, num_heads=num_heads, num_splits=num_splits, dtype=dtype,
                                   decode=decode, arch=arch, num_sms=num_sms, hopper=refusal is None)
    num_tiles = num_splits * (order.kv_split // order.block_n)
    tile_bytes = 4 * (schedule.block_rows * _partials_per_row(num_splits, kv_lora_rank) + scores_size(schedule, num_tiles, order.block_n))
    programs, value_rows = 0, 0
    if schedule.form == "hopper":
        row_tiles = _hopper_row_tiles(num_tokens, batch_size, num_heads, decode)
        slices = schedule.value_slices
        # kernels/hopper/decode_work.py: only so many row tiles are not folded
        wave = _wave(min(row_tiles, -(-8 * num_sms // (9 * slices))), tile_bytes, 2 * MAX_WORKSPACE_BYTES)
        programs = max(1, min(num_sms, row_tiles * num_splits * slices))
    else:
        row_tiles = _row_tiles(num_tokens, batch_size, num_heads, schedule.block_rows, decode)
        wave = _wave(row_tiles, tile_bytes, MAX_WORKSPACE_BYTES)
        if schedule.form == "hopper_few":
            programs = -(-num_splits // max(1, wave * num_splits // (FEW_PROGRAMS_PER_SM * num_sms)))
        if schedule.form == "hopper_two_phase":
            busy = wave if decode else min(wave, max(1, batch_size, -(-num_tokens * num_heads // schedule.block_rows)))
            programs, value_rows = min(num_tiles, max(1, num_sms // busy)), rows_of_values(schedule.block_rows, busy * num_splits, num_sms)
    return AttentionPlan(
        num_tokens=num_tokens, batch_size=batch_size, num_heads=num_heads, max_seq_len=max_seq_len, kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim, dtype=dtype, page_size=page_size, decode=decode, arch=arch, order=order, schedule=schedule,
        num_splits=num_splits, num_row_tiles=row_tiles, wave_row_tiles=wave,
        num_score_programs=min(num_tiles, max(1, MAX_PROGRAMS_PER_SM * num_sms // wave)), num_programs=programs, value_rows=value_rows,
    )


@dataclass(frozen=True)
class PrefillPlan:
    """How `mla_prefill_paged` is cut into launches: waves of heads, in each wave groups of requests, and of each group the chunks, ascending.

    Attributes:
        chunk_tokens: tokens of a chunk, at absolute multiples of itself; num_chunks: of the longest possible request.
        head_wave, request_group: heads and requests whose keys and values of one chunk are in the workspace together.
    """

    num_tokens: int
    batch_size: int
    num_heads: int
    max_seq_len: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    dtype: torch.dtype
    chunk_tokens: int
    num_chunks: int
    head_wave: int
    request_group: int

    @property
    def sections(self) -> tuple[int, int, int, int, int, int, int]:
        """Bytes of the workspace's parts: the work, keys and values [request_group * chunk_tokens, head_wave, nope + v], as many latents [R] and
        rope keys [P], and the state's acc, sums and reference (none where every request has one chunk). Each is a multiple of 16."""
        tokens, rows = self.request_group * self.chunk_tokens, self.num_tokens * self.head_wave if self.num_chunks > 1 else 0
        of_token = tokens * self.dtype.itemsize
        kv = of_token * self.head_wave * (self.qk_nope_head_dim + self.v_head_dim)
        return (4 * prefill_work_size(self.num_tokens, self.batch_size), kv, of_token * self.kv_lora_rank, of_token * self.qk_rope_head_dim,
                4 * rows * self.v_head_dim, 4 * rows * ROW_SUMS, 16 * -(-rows // 4))

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of a call, in bytes. Its contents need no initialisation."""
        return sum(self.sections)


def prefill_work_size(num_tokens: int, batch_size: int) -> int:
    """Ints of a Hopper prefill's work: 8 of each query tile, of which a request's begin at multiples of 128 positions, and two; 512 bytes or more."""
    return -(-8 * (num_tokens // PREFILL_TILE + 2 * batch_size + 1) // 128) * 128


def plan_prefill(
    *,
    num_tokens: int,
    batch_size: int,
    num_heads: int,
    max_seq_len: int,
    qk_nope_head_dim: int = 128,
    qk_rope_head_dim: int = 64,
    v_head_dim: int = 128,
    kv_lora_rank: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    order: PrefillOrder = DEFAULT_PREFILL_ORDER,
) -> PrefillPlan:
    """Plan a `mla_prefill_paged` call: as many requests, then heads, together as `MAX_WORKSPACE_BYTES` holds.

    Raises:
        ValueError: an argument the kernels cannot serve, by name.
    """
    for name, value in (("num_tokens", num_tokens), ("batch_size", batch_size), ("max_seq_len", max_seq_len)):
        _check_int(name, value, 0)
    check_num_heads(num_heads)
    check_head_dims(qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
    check_dims(kv_lora_rank, 0)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {DTYPES}")
    if not isinstance(order, PrefillOrder):
        raise ValueError(f"order={order!r} must be a PrefillOrder")
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1 or chunk_tokens % order.block_n:
        raise ValueError(f"chunk_tokens={chunk_tokens!r} must be a positive int, a multiple of order.block_n={order.block_n}")
    num_chunks = max(1, -(-max_seq_len // chunk_tokens))
    chunk = min(chunk_tokens, max(1, -(-max_seq_len // order.block_n)) * order.block_n)  # a single chunk may be shorter

    row_bytes = chunk * (kv_lora_rank + qk_rope_head_dim) * dtype.itemsize  # of the cache
    kv_bytes = chunk * (qk_nope_head_dim + v_head_dim) * dtype.itemsize  # of a head
    state_bytes = 4 * num_tokens * (v_head_dim + ROW_SUMS + 1) if num_chunks > 1 else 0  # of a head
    room = MAX_WORKSPACE_BYTES - 16 - 4 * prefill_work_size(num_tokens, batch_size)  # the reference is rounded up to 16
    requests = max(1, min(batch_size, (room - state_bytes * num_heads) // (kv_bytes * num_heads + row_bytes)))
    heads = num_heads if requests > 1 else max(1, min(num_heads, (room - row_bytes) // (kv_bytes + state_bytes)))
    return PrefillPlan(
        num_tokens=num_tokens, batch_size=batch_size, num_heads=num_heads, max_seq_len=max_seq_len, qk_nope_head_dim=qk_nope_head_dim,
        qk_rope_head_dim=qk_rope_head_dim, v_head_dim=v_head_dim, kv_lora_rank=kv_lora_rank, dtype=dtype, chunk_tokens=chunk, num_chunks=num_chunks,
        head_wave=heads, request_group=requests,
    )
