"""Which experts a token goes to, and with what weights."""

import triton
import triton.language as tl

from .rows import LOG2E, tree

NONE = tl.constexpr(-(2**63))


@triton.jit
def ranks(value, index):
    """int64 that order fp32 values and, among equal ones, lower indices above higher ones; NaN below every number."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value == value, order, -(2**31) + 1)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(rank):
    return (0x7FFFFFFF - (rank & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def value_of(rank):
    """The value of a rank, NaN where it has one."""
    order = (rank >> 32).to(tl.int32)
    return tl.where(order == -(2**31) + 1, float("nan"), tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True))


@triton.jit
def route_kernel(
    LOGITS, BIAS, WEIGHTS, IDS, stride_token, scale, NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, SIGMOID: tl.constexpr, WITH_BIAS: tl.constexpr, NORMALIZE: tl.constexpr,
):
    """Grid (tokens). Experts lie as [GROUPS, EXPERTS], both padded to powers of two. Every choice is a maximum of distinct integers."""
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, EXPERTS)
    expert = group[:, None] * SIZE + member[None, :]
    there = (group[:, None] < NUM_GROUPS) & (member[None, :] < SIZE)
    logits = tl.load(LOGITS + token * stride_token + expert, mask=there, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.div_rn(tl.zeros_like(logits) + 1.0, 1.0 + tl.exp2(-logits * LOG2E))
    else:
        weights = tl.exp2((logits - tl.max(tl.max(logits, 1), 0)) * LOG2E)
        total = tree(tree(weights)[None, :])
        scores = tl.div_rn(weights, tl.zeros_like(weights) + total)
    biased = scores
    if WITH_BIAS:
        biased += tl.load(BIAS + expert, mask=there, other=0.0).to(tl.float32)
    rank = tl.where(there, ranks(biased, expert), NONE)
    if TOP_GROUPS < NUM_GROUPS:
        best = tl.max(rank, 1)
        if SIGMOID or WITH_BIAS:
            second = tl.max(tl.where(rank == best[:, None], NONE, rank), 1)
            best_of_group = value_of(best) + value_of(second)
        else:
            best_of_group = value_of(best)
        group_rank = tl.where(group < NUM_GROUPS, ranks(best_of_group, group), NONE)
        chosen = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.max(group_rank, 0)
            chosen = chosen | (group_rank == top)
            group_rank = tl.where(group_rank == top, NONE, group_rank)
        rank = tl.where(chosen[:, None], rank, NONE)
    slot = tl.arange(0, SLOTS)
    ids = slot
    taken = slot * 0.0
    total = 0.0
    for i in tl.static_range(TOP_K):
        top = tl.max(tl.max(rank, 1), 0)
        here = rank == top
        weight = tl.sum(tl.sum(tl.where(here, scores, 0.0), 1), 0)  # of one score and zeros
        total += weight
        ids = tl.where(slot == i, index_of(top), ids)
        taken = tl.where(slot == i, weight, taken)
        rank = tl.where(here, NONE, rank)
    if NORMALIZE:
        taken = tl.div_rn(taken, tl.zeros_like(taken) + (total + 1e-20))
    at = token * TOP_K + slot
    tl.store(WEIGHTS + at, taken * scale, mask=slot < TOP_K)
    tl.store(IDS + at, ids, mask=slot < TOP_K)
