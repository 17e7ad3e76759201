"""Batch facts become grids here, and nowhere else. Pure functions of data: no tensor, no device, no kernel.

The split table of a request is a function of its length and the `ReductionOrder` alone. The schedule may look at the batch; it decides
who computes a split, never where it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .tuning import ARCHITECTURES, DEFAULT_ORDER, ReductionOrder, Schedule

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_KV_LORA_RANK = 512
MAX_QK_ROPE_HEAD_DIM = 64
MAX_NUM_HEADS = 128
# Programs of one kernel beyond which they walk several splits each: most of a grid made for the longest possible context is empty.
MAX_PROGRAMS_PER_SM = 16
# A first program folds at most this many splits while the later ones are spread: bounds what one long row can hold up.
MAX_FOLD_SPLITS = 8


def split_table(seq_len: int, order: ReductionOrder = DEFAULT_ORDER) -> tuple[tuple[int, int], ...]:
    """(start, end) token ranges of the splits of a row that sees ``seq_len`` tokens: cut at absolute multiples of ``kv_split``."""
    return tuple((start, min(start + order.kv_split, seq_len)) for start in range(0, seq_len, order.kv_split))


def tile_table(seq_len: int, order: ReductionOrder = DEFAULT_ORDER) -> tuple[tuple[int, int], ...]:
    """(start, end) token ranges of the KV tiles of that row, ascending; a tile never crosses a split."""
    return tuple((start, min(start + order.block_n, seq_len)) for start in range(0, seq_len, order.block_n))


@dataclass(frozen=True)
class AttentionPlan:
    """How one call is spread over the machine. Valid for every call of the same shapes whose lengths are at most ``max_seq_len``.

    Attributes:
        num_splits: splits of the longest possible row.
        num_row_tiles: row tiles of the grid (in an extend an upper bound: the host does not know the query lengths).
        num_programs: programs that share the splits of a row tile; num_score_programs: those that share its KV tiles (two phases).
        num_slots: partial states of a row; 0 when every row is finished by its own program, and no combine runs.
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
    num_programs: int
    num_score_programs: int
    num_slots: int

    @property
    def num_rows(self) -> int:
        """(query token, head) pairs of a call."""
        return self.num_tokens * self.num_heads

    @property
    def num_tiles(self) -> int:
        """KV tiles of the longest possible row, in whole splits."""
        return self.num_splits * (self.order.kv_split // self.order.block_n)

    @property
    def partials_size(self) -> int:
        """fp32 elements of the partial states (see kernels/partials.py), rounded up to 64 bytes."""
        size = self.num_slots * self.num_rows * (self.kv_lora_rank + 3) + (self.num_rows if self.num_slots else 0)
        return -(-size // 16) * 16

    @property
    def scores_size(self) -> int:
        """fp32 elements of the scores of the two-phase form."""
        return self.num_rows * self.num_tiles * self.order.block_n if self.schedule.form == "two_phase" else 0

    @property
    def workspace_bytes(self) -> int:
        return 4 * (self.partials_size + self.scores_size)


def _row_tiles(num_tokens: int, batch_size: int, num_heads: int, block_rows: int, decode: bool) -> int:
    if decode:
        return batch_size * -(-num_heads // block_rows)
    return num_tokens * num_heads // block_rows + batch_size + 1


def choose_schedule(
    *, num_tokens: int, batch_size: int, num_heads: int, num_splits: int, dtype: torch.dtype, decode: bool, arch: str, num_sms: int
) -> Schedule:
    """The schedule for what the host knows of a batch. Free to look at all of it, since no schedule changes a bit."""
    table = ARCHITECTURES[arch]
    if dtype == torch.float32 or table.rows16 is None:
        return table.fp32 if dtype == torch.float32 else table.few
    if arch == "interpreter":
        return table.rows16
    rows_per_request = -(-num_tokens // max(batch_size, 1)) * num_heads
    few_items = _row_tiles(num_tokens, batch_size, num_heads, table.few.block_rows, decode) * num_splits
    if num_splits > 1 and few_items <= num_sms // 4:
        return table.few
    schedule = table.rows16
    if table.rows64 is not None and rows_per_request > 32:
        schedule = table.rows64
    tiles = _row_tiles(num_tokens, batch_size, num_heads, schedule.block_rows, decode)
    if tiles * num_splits > 2 * num_sms:
        schedule = replace(schedule, fold_splits=min(num_splits, MAX_FOLD_SPLITS))
    return schedule


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
        max_seq_len: no request of a call with this plan may be longer (a longer one gives NaN).
        arch: a name of `tuning.ARCHITECTURES`; num_sms: multiprocessors of the device.
        schedule: overrides the choice by the table; it cannot change a bit.

    Raises:
        ValueError: an argument the kernels cannot serve, by name.
    """
    for name, value, least in (("num_tokens", num_tokens, 0), ("batch_size", batch_size, 0), ("max_seq_len", max_seq_len, 0), ("num_sms", num_sms, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be an int >= {least}")
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or not 1 <= num_heads <= MAX_NUM_HEADS:
        raise ValueError(f"num_heads={num_heads!r} must be an int from 1 to {MAX_NUM_HEADS}")
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
    if decode and num_tokens != batch_size:
        raise ValueError(f"num_tokens={num_tokens!r} must equal batch_size={batch_size!r} in a decode")
    num_splits = max(1, -(-max_seq_len // order.kv_split))
    if schedule is None:
        schedule = choose_schedule(num_tokens=num_tokens, batch_size=batch_size, num_heads=num_heads, num_splits=num_splits, dtype=dtype,
                                   decode=decode, arch=arch, num_sms=num_sms)
    row_tiles = _row_tiles(num_tokens, batch_size, num_heads, schedule.block_rows, decode)
    later_splits = max(0, num_splits - schedule.fold_splits)
    most_programs = max(1, MAX_PROGRAMS_PER_SM * num_sms // max(row_tiles, 1))
    return AttentionPlan(
        num_tokens=num_tokens, batch_size=batch_size, num_heads=num_heads, max_seq_len=max_seq_len, kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim, dtype=dtype, page_size=page_size, decode=decode, arch=arch, order=order, schedule=schedule,
        num_splits=num_splits, num_row_tiles=row_tiles,
        num_programs=1 + min(later_splits, most_programs),
        num_score_programs=min(num_splits * (order.kv_split // order.block_n), most_programs),
        num_slots=later_splits + 1 if later_splits else 0,
    )


def check_dims(kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """Raise ValueError unless the kernels serve these latent dims."""
    if isinstance(kv_lora_rank, bool) or not isinstance(kv_lora_rank, int) or kv_lora_rank % 16 or not 16 <= kv_lora_rank <= MAX_KV_LORA_RANK:
        raise ValueError(f"kv_lora_rank={kv_lora_rank!r} must be a multiple of 16 from 16 to {MAX_KV_LORA_RANK}")
    if (isinstance(qk_rope_head_dim, bool) or not isinstance(qk_rope_head_dim, int) or qk_rope_head_dim % 16
            or not 0 <= qk_rope_head_dim <= MAX_QK_ROPE_HEAD_DIM):
        raise ValueError(f"qk_rope_head_dim={qk_rope_head_dim!r} must be 0 or a multiple of 16 up to {MAX_QK_ROPE_HEAD_DIM}")


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless the kernels serve this page size."""
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1 or (page_size != 1 and page_size % 16):
        raise ValueError(f"page_size={page_size!r} must be 1 or a multiple of 16")
