"""What may change bits (`ReductionOrder`) and what may not (`Schedule`), and the literal schedule tables by architecture."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from triton import knobs

Form = Literal["one_pass", "two_phase", "hopper", "hopper_few", "hopper_two_phase"]


def _positive_int(name: str, value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}={value!r} must be {what}")


def _check_arithmetic(order: ReductionOrder | PrefillOrder, blocks: str, longest: int) -> None:
    """What both orders hold."""
    if type(order.block_n) is not int or order.block_n not in (16, 32, 64, 128) or order.block_n > longest:
        raise ValueError(f"block_n={order.block_n!r} must be the int {blocks}")
    if type(order.reference_step) is not int or order.reference_step not in (1, 2, 4, 8):
        raise ValueError(f"reference_step={order.reference_step!r} must be the int 1, 2, 4 or 8")
    if order.input_precision != "ieee":
        raise ValueError(f"input_precision={order.input_precision!r} must be 'ieee'")
    if order.fp_fusion is not False:
        raise ValueError(f"fp_fusion={order.fp_fusion!r} must be False: contraction left to the compiler differs between specialisations")


MAX_KV_SPLIT = 1 << 16
"""The page ids of a split lie in registers: 1024 of 64 tokens are 8 a thread."""


@dataclass(frozen=True)
class ReductionOrder:
    """Everything that decides in which order, and how, numbers are added: two equal orders give equal bits.

    Attributes:
        block_n: tokens of a KV tile, at absolute multiples of itself.
        kv_split: tokens of a KV split, at absolute multiples of itself; partial sums are kept per split and merged in ascending order.
        reference_step: the softmax reference moves in steps of this many powers of two.
        input_precision: of fp32 products. "ieee" is the only one that keeps fp32 results free of the tile shape.
        fp_fusion: whether the compiler may contract multiply and add where no fma is written.
    """

    block_n: int = 64
    kv_split: int = 1024
    reference_step: int = 8
    input_precision: Literal["ieee"] = "ieee"
    fp_fusion: bool = False

    def __post_init__(self) -> None:
        _check_arithmetic(self, "16, 32 or 64", 64)
        _positive_int("kv_split", self.kv_split, f"a positive int, a multiple of block_n={self.block_n}")
        if self.kv_split % self.block_n or self.kv_split > MAX_KV_SPLIT:
            raise ValueError(f"kv_split={self.kv_split!r} must be a multiple of block_n={self.block_n}, at most {MAX_KV_SPLIT}")


DEFAULT_ORDER = ReductionOrder()


@dataclass(frozen=True)
class PrefillOrder:
    """What may change bits of `mla_prefill` and `mla_prefill_paged`: the MHA form has an arithmetic of its own.

    Attributes:
        block_n: tokens of a KV tile, at multiples of itself from a request's first token.
        reference_step: the softmax reference moves in steps of this many powers of two.
        input_precision, fp_fusion: as in `ReductionOrder`.
    """

    block_n: int = 128
    reference_step: int = 8
    input_precision: Literal["ieee"] = "ieee"
    fp_fusion: bool = False

    def __post_init__(self) -> None:
        _check_arithmetic(self, "16, 32, 64 or 128", 128)


DEFAULT_PREFILL_ORDER = PrefillOrder()
ROW_SUMS = 8
"""fp32 sums that a row's state keeps of its weights: how far the tree of additions goes within a tile (kernels/tree_sum.py)."""


@dataclass(frozen=True)
class PrefillSchedule:
    """Who computes what in a prefill. No field can change a bit.

    Attributes:
        block_m: query tokens of a tile.
        num_warps, num_stages: of the attention kernel.
        block_k: 0: a tile's query stays in registers or shared memory; else nope columns of a product, the query being read again for each.
        group_bytes: keys and values of the heads that run side by side, so that they stay in L2.
        form: "hopper" takes the warp-specialised kernel where `hopper_prefill.serves` the arguments; it knows group_bytes alone.
    """

    block_m: int = 128
    num_warps: int = 8
    num_stages: int = 2
    block_k: int = 0
    group_bytes: int = 32 << 20
    form: Literal["portable", "hopper"] = "portable"

    def __post_init__(self) -> None:
        if self.form not in ("portable", "hopper"):
            raise ValueError(f"form={self.form!r} must be 'portable' or 'hopper'")
        for name, allowed in (("block_m", (16, 32, 64, 128)), ("num_warps", (1, 2, 4, 8)), ("block_k", (0, 16, 32, 64, 128))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        _positive_int("num_stages", self.num_stages, "a positive int")
        _positive_int("group_bytes", self.group_bytes, "a positive int")


@dataclass(frozen=True)
class ProductSchedule:
    """Tiles of the up-projection: block_s tokens, block_o columns, block_k latent columns of a product. No field can change a bit.

    Attributes:
        subtiles: by TMA, the runs of columns, 1 or 2, in which a tile is stored.
    """

    block_s: int = 128
    block_o: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    subtiles: int = 1


@dataclass(frozen=True)
class PrefillTable:
    """Schedules of one architecture: heads of up to 128 columns, ``wide`` ones, fp32 inputs; and the up-projection, which goes by TMA with
    ``product_tma`` where there is one and sizes and strides allow it."""

    narrow: PrefillSchedule
    wide: PrefillSchedule
    fp32: PrefillSchedule
    product: ProductSchedule
    product_tma: ProductSchedule | None = None
    product_fp32: ProductSchedule = ProductSchedule(block_s=64, block_o=64, block_k=32, num_warps=4, num_stages=1)


@dataclass(frozen=True)
class Schedule:
    """Who computes what, when. No field can change a bit; a GPU test proves it for every schedule of the tables.

    Attributes:
        form: "one_pass" reads each latent row once; "two_phase" computes all scores first, then P.V by slices of value columns; "hopper" and
            "hopper_few" are one pass by Gluon kernels, for many rows and for few work items, "hopper_two_phase" is two phases by Gluon kernels,
            for few work items whose splits are long; or where `hopper_decode.refusal` names a reason, "one_pass" with the other fields.
        block_rows: (token, head) rows of a tile: 16 and 32 use mma.sync, 64 warpgroup MMA where the machine has it.
        num_warps, num_stages: of the attention kernel (one pass) or of the values kernel (two phases).
        block_v: value columns of a slice (two phases).
        block_k: latent columns of a product in the scores kernel (two phases).
        score_warps: warps of the scores kernel (two phases).
        pdl: programmatic dependent launch between the kernels of a call (sm_90 and newer).
        value_slices: programs, 1 or 2, that share the value columns of a work item, each of which computes all its scores ("hopper").
    """

    form: Form = "one_pass"
    block_rows: int = 16
    num_warps: int = 4
    num_stages: int = 3
    block_v: int = 64
    block_k: int = 512
    score_warps: int = 4
    pdl: bool = False
    value_slices: int = 1

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r} must be one of {get_args(Form)}")
        for name, allowed in (("block_rows", (16, 32, 64, 128)), ("num_warps", (1, 2, 4, 8)), ("score_warps", (1, 2, 4, 8)),
                              ("block_v", (16, 32, 64, 128, 256, 512)), ("block_k", (16, 32, 64, 128, 256, 512)), ("value_slices", (1, 2))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        _positive_int("num_stages", self.num_stages, "a positive int")
        if self.form == "hopper" and self.block_rows != 64:
            raise ValueError(f"block_rows={self.block_rows!r} must be 64 with form='hopper'")
        if self.form == "hopper_few" and self.block_rows != 16:
            raise ValueError(f"block_rows={self.block_rows!r} must be 16 with form='hopper_few'")
        if self.form == "hopper_two_phase" and self.block_rows not in (16, 32, 64):
            raise ValueError(f"block_rows={self.block_rows!r} must be 16, 32 or 64 with form='hopper_two_phase'")
        if self.form != "hopper" and self.value_slices != 1:
            raise ValueError(f"value_slices={self.value_slices!r} must be 1 with form={self.form!r}")


VALUE_SLICES = 8
"""Slices of value columns of the second phase on Hopper."""


def scores_size(schedule: Schedule, num_tiles: int, block_n: int) -> int:
    """fp32 elements of a row tile's scratch memory between the phases.

    On Hopper (kernels/hopper/two_phase_scores.py) two 16-bit values in addition to each score, two references a row and KV tile, a flag a KV tile.
    """
    rows = schedule.block_rows
    if schedule.form == "hopper_two_phase":
        return num_tiles * (rows * (2 * block_n + 2) + 1)
    return rows * num_tiles * block_n if schedule.form == "two_phase" else 0


def rows_of_values(block_rows: int, splits: int, num_sms: int) -> int:
    """Rows of a program of the second phase on Hopper, for so many splits of row tiles: few while all programs run at once. A program fits a
    multiprocessor, and values are read again for each part of a row tile."""
    for rows in (16, 32):
        if rows < block_rows and splits * (block_rows // rows) * VALUE_SLICES <= num_sms:
            return rows
    return block_rows


@dataclass(frozen=True)
class HopperSchedules:
    """Schedules of the Gluon kernels.

    Attributes:
        phases: two phases, for the fewest (row tile, split) items. few: tiles of 16 rows. many: tiles of 64 rows, in value slices while they
            are not one for each multiprocessor.
    """

    phases: Schedule
    few: Schedule
    many: Schedule

    def all(self) -> list[Schedule]:
        """With the other row tiles and value slices that are taken of them."""
        return [self.phases, replace(self.phases, block_rows=64), self.few, *(replace(self.many, value_slices=n) for n in (1, 2))]


@dataclass(frozen=True)
class Architecture:
    """One kind of GPU: its limits, and which schedule serves which amount of work (`plan.choose_schedule`).

    Attributes:
        shared_memory: bytes that one program may use.
        few: while there are few (row tile, split) items, and wherever no one-pass kernel fits the shared memory.
        rows16: one pass, tiles of few rows; full16: the same on a full machine, where two programs fit one multiprocessor.
        rows64: one pass, tiles of as many rows as fit, up to 64.
        hopper: in the place of all of these where `plan.hopper_refusal` names no reason.
        fp32: fp32 caches, whatever the amount.
    """

    name: str
    shared_memory: int
    few: Schedule
    rows16: Schedule | None = None
    full16: Schedule | None = None
    rows64: Schedule | None = None
    hopper: HopperSchedules | None = None
    fp32: Schedule = field(default_factory=lambda: Schedule(form="two_phase", num_stages=1, block_k=32))

    def schedules(self) -> list[Schedule]:
        """All that 16-bit caches may take."""
        named = [self.few, self.rows16, self.full16, self.rows64, *(self.hopper.all() if self.hopper else [])]
        return list(dict.fromkeys(schedule for schedule in named if schedule is not None))


_SMALL = Schedule(form="two_phase", num_stages=3, block_k=128)
_ROWS16 = Schedule(num_warps=8, num_stages=2)

# Shared memory of a program as reported by the compiler is asserted against these limits in tests/compile. _ROWS16 needs 94,208 B (with 3
# stages 167,936, with one 149,504), and 32 rows 114,688.
ARCHITECTURES: dict[str, Architecture] = {
    "sm_80": Architecture("sm_80", 166_912, few=replace(_SMALL, num_stages=4), rows16=_ROWS16, rows64=replace(_ROWS16, block_rows=32)),
    "sm_86": Architecture("sm_86", 101_376, few=_SMALL, rows16=_ROWS16),
    "sm_89": Architecture("sm_89", 101_376, few=_SMALL, rows16=_ROWS16),
    # Measured on an H200: docs/performance.md. The others follow its shape, as far as their shared memory goes.
    "sm_90": Architecture(
        "sm_90", 232_448,
        few=Schedule(form="two_phase", num_stages=4, score_warps=8, pdl=True),
        rows16=Schedule(num_warps=8, num_stages=3, pdl=True),
        full16=Schedule(num_warps=4, num_stages=2, pdl=True),
        rows64=Schedule(block_rows=64, num_warps=8, num_stages=2, pdl=True),
        hopper=HopperSchedules(
            phases=Schedule(form="hopper_two_phase", num_warps=8, num_stages=2, pdl=True),
            few=Schedule(form="hopper_few", num_warps=8, num_stages=3, pdl=True),
            many=Schedule(form="hopper", block_rows=64, num_warps=8, num_stages=2, pdl=True),
        ),
    ),
    "sm_100": Architecture("sm_100", 232_448, few=replace(_SMALL, num_stages=4, pdl=True), rows16=Schedule(num_stages=2, pdl=True)),
    "sm_120": Architecture("sm_120", 101_376, few=_SMALL, rows16=_ROWS16),
    "gfx942": Architecture("gfx942", 65_536, few=replace(_SMALL, num_stages=2)),
    # One schedule whatever the batch: the interpreter's matmul is BLAS, whose bits depend on the tile shape.
    "interpreter": Architecture("interpreter", 1 << 40, few=Schedule(), rows16=Schedule(), fp32=Schedule()),
}


_PREFILL_FP32 = PrefillSchedule(block_m=16, num_warps=8, num_stages=1, block_k=32)
_PREFILL_SMALL = PrefillTable(
    narrow=PrefillSchedule(block_m=64, num_stages=1), wide=PrefillSchedule(block_m=32, num_stages=1), fp32=_PREFILL_FP32,
    product=ProductSchedule(num_stages=2),
)
# Shared memory and spills as reported by the compiler are asserted in tests/compile.
PREFILL_TABLES: dict[str, PrefillTable] = {
    "sm_80": replace(_PREFILL_SMALL, narrow=PrefillSchedule(block_m=64), wide=PrefillSchedule(block_m=64, num_stages=1)),
    "sm_86": _PREFILL_SMALL,
    "sm_89": _PREFILL_SMALL,
    "sm_90": PrefillTable(
        narrow=PrefillSchedule(form="hopper"), wide=PrefillSchedule(block_m=64, num_stages=1), fp32=_PREFILL_FP32,
        product=ProductSchedule(), product_tma=ProductSchedule(block_o=256, num_stages=4, subtiles=2),
    ),
    "sm_100": _PREFILL_SMALL,
    "sm_120": _PREFILL_SMALL,
    "gfx942": _PREFILL_SMALL,
    "interpreter": PrefillTable(*3 * (PrefillSchedule(block_m=64),), product=ProductSchedule(64, 64, 64), product_fp32=ProductSchedule(64, 64, 64)),
}


def arch_of(device: torch.device) -> str:
    """Architecture of ``device``: a name of `ARCHITECTURES` where kernels run, and else a name that has no table there.

    A GPU is "sm_90" or "gfx942" and the like, known or not. A CPU is "interpreter" while Triton's interpreter is on and "cpu" while it is
    off. Another device has the name of its type.
    """
    if device.type == "cpu" and knobs.runtime.interpret:
        return "interpreter"
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(device)
        name = f"sm_{major}{minor}"
    # sm_103 (B300) has the limits of sm_100, sm_87 (Orin) and sm_121 those of their families with the smallest shared memory.
    return {"sm_103": "sm_100", "sm_87": "sm_86", "sm_121": "sm_120"}.get(name, name)
