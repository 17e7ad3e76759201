"""Lengths against the plan that they are given with, where the host sees them."""

import pytest
import torch

from triton_mla import checks


def lengths(max_seq_len, *values):
    seq_lens = torch.tensor(values, dtype=torch.int32)
    table = torch.arange(len(values) * 8, dtype=torch.int32).view(-1, 8)
    checks.lengths(seq_lens, table, 16, table.numel(), None, len(values), max_seq_len)


def test_lengths_up_to_the_plans():
    lengths(100, 0, 1, 100)
    lengths(None, 101, 128)


def test_a_length_past_the_plans_is_named():
    with pytest.raises(ValueError, match=r"seq_lens\[1\]=101 must be from 0 to plan.max_seq_len=100"):
        lengths(100, 7, 101)


def test_a_length_past_the_table_is_named_first():
    with pytest.raises(ValueError, match=r"seq_lens\[0\]=129 must be from 0 to 128: block_table has 8 pages of 16"):
        lengths(100, 129)
