"""Sizes of the two-phase forms of decode and extend, for plan.py. Pure functions of numbers."""

from __future__ import annotations

from .tuning import Schedule

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
