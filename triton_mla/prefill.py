"""Prefill in the MHA form: `mla_prefill` over given keys and values, with a resumable state, and `mla_prefill_paged` over the latent cache.

A query row's bits are a function of its query, the keys and values that it sees in position order, the scale, the dtypes and the
`PrefillOrder` alone. They are not the bits of `mla_extend`, which is other arithmetic. See docs/numerics.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from . import checks
from .calls import on_device
from .dims import check_dims, check_head_dims
from .launch import recorded
from .plan import DEFAULT_CHUNK_TOKENS, PrefillPlan, plan_prefill
from .prefill_launch import PrefillState, attend, attend_paged, project
from .repeat import Repeat
from .tuning import DEFAULT_PREFILL_ORDER, ROW_SUMS, PrefillOrder, PrefillSchedule

__all__ = ["PrefillState", "mla_prefill", "mla_prefill_paged", "prefill_workspace_bytes", "project_kv"]


def mla_prefill(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *,
    softmax_scale: float | None = None, causal: bool = True, positions: torch.Tensor | None = None, state: PrefillState | None = None,
    return_lse: bool = False, return_state: bool = False, out: torch.Tensor | None = None, order: PrefillOrder | None = None,
    schedule: PrefillSchedule | None = None,
) -> Any:
    """Ragged attention of T query tokens over S key tokens of H heads, the rope key being shared by the heads.

    ``out[t, h] = sum_s softmax_s(scale * (q[t, h, :nope] . k_nope[s, h] + q[t, h, nope:] . k_pe[s])) * v[s, h]`` over the tokens s of
    the request of t that t sees: with ``causal`` those up to its own position, else all.

    Args:
        q: [T, H, nope + P], fp16, bf16 or fp32; k_nope: [S, H, nope]; k_pe: [S, P]; v: [S, H, V], all of one dtype and any strides with a
            contiguous last dimension: k_nope and v may be views of one [S, H, nope + V] tensor. nope and V are multiples of 16 up to 256,
            P is a multiple of 16 too, or 0.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, begins of the requests' tokens in q, and in k_nope, k_pe and v. A request may be empty in
            either. Query tokens from ``cu_seqlens_q[B]`` on are padding (out 0, lse -inf).
        positions: [B] int32, with ``causal``: position of each request's first query token, counted from its first key token in this call; it
            may be negative. Without it the last query token is the last key token.
        state: of an earlier call with the same queries, to go on from. The order that made it is the order of this call.
        return_state: return the state after these keys instead of a result; with ``state``, that state, changed in place. Keys streamed in
            calls that cut every request's keys at multiples of ``order.block_n`` give the bits of one call with all of them.
        out: preallocated [T, H, V] of q's dtype, which shares no memory with another argument, nor does a state that is changed.
        order: `PrefillOrder`; schedule: overrides the table's, and cannot change a bit.

    Returns:
        out [T, H, V], and lse [T, H] (fp32, natural log) with ``return_lse=True``; or a `PrefillState`. A row that sees no token has out 0
        and lse -inf. On a GPU a request whose keys end past S becomes NaN; on the CPU it is refused.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written, but scratch memory where a given schedule asks for more shared
            memory or registers than the device has.
    """
    scale = checks.softmax_scale(softmax_scale)
    for name, value in (("causal", causal), ("return_lse", return_lse), ("return_state", return_state)):
        checks.boolean(name, value)
    q = checks.tensor("q", q, dims=3)
    checks.float_dtype("q", q)
    device, dtype = q.device, q.dtype
    k_nope = checks.tensor("k_nope", k_nope, dims=3, dtype=dtype, device=device)
    k_pe = checks.tensor("k_pe", k_pe, dims=2, dtype=dtype, device=device)
    v = checks.tensor("v", v, dims=3, dtype=dtype, device=device)
    num_tokens, num_heads, _ = q.shape
    num_keys, _, nope = k_nope.shape
    P, V = k_pe.shape[1], v.shape[2]
    checks.heads(num_heads)
    check_head_dims(nope, P, V)
    checks.shape("q", q, (num_tokens, num_heads, nope + P), "the columns of k_nope and k_pe")
    checks.shape("k_nope", k_nope, (num_keys, num_heads, nope), "the heads of q")
    checks.shape("k_pe", k_pe, (num_keys, P), "one row for each of k_nope")
    checks.shape("v", v, (num_keys, num_heads, V), "one row for each of k_nope, and the heads of q")
    starts = checks.tensor("cu_seqlens_q", cu_seqlens_q, dims=1, dtype=torch.int32, device=device)
    key_starts = checks.tensor("cu_seqlens_k", cu_seqlens_k, dims=1, dtype=torch.int32, device=device)
    if not starts.numel():
        raise ValueError("cu_seqlens_q is empty; it must have one more entry than there are requests")
    checks.shape("cu_seqlens_k", key_starts, tuple(starts.shape), "one entry for each of cu_seqlens_q")
    if positions is not None:
        if not causal:
            raise ValueError("positions was given but causal is False: there every query sees every key")
        checks.tensor("positions", positions, dims=1, dtype=torch.int32, device=device)
        checks.shape("positions", positions, (starts.numel() - 1,), "one position for each request")
    order, schedule = _order(order, state), _schedule(schedule)
    if state is not None:
        _check_state(state, num_tokens, num_heads, V, order, device)
    if return_state and (return_lse or out is not None):
        raise ValueError("return_state was given with return_lse or out: a state is no result yet; go on from it without return_state")
    out = _check_out(out, num_tokens, num_heads, V, dtype, device)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _check_starts("cu_seqlens_q", starts, num_tokens, "q")
        _check_starts("cu_seqlens_k", key_starts, num_keys, "k_nope")
        if out is not None or (return_state and state is not None):
            tensors = {"q": q, "k_nope": k_nope, "k_pe": k_pe, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": key_starts, "positions": positions}
            parts = {} if state is None else {"state.reference": state.reference, "state.total": state.total, "state.acc": state.acc}
            checks.apart(*((parts, tensors) if return_state else ({"out": out}, {**tensors, **parts})))
    if compiling:
        return _compiled(q, k_nope, k_pe, v, starts, key_starts, scale, causal, positions, state, return_lse, return_state, out, order)
    resume = state is not None
    if return_state and state is None:
        state = _new_state(q, V, order)  # the kernel writes all of it
    lse = torch.empty((num_tokens, num_heads) if return_lse else (0,), dtype=torch.float32, device=device)
    if not return_state and out is None:
        out = torch.empty((num_tokens, num_heads, V), dtype=dtype, device=device)
    with on_device(device):
        attend(q, k_nope, k_pe, v, q if out is None else out, lse if return_lse else None, state, starts, key_starts, positions, scale, order, schedule,
               resume=resume, keep=return_state, causal=causal, kv_limit=num_keys, mean_keys=num_keys // max(starts.numel() - 1, 1))
    if return_state:
        return state
    return (out, lse) if return_lse else out


def mla_prefill_paged(
    q: torch.Tensor, kv_cache: torch.Tensor, w_kv_b: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, *,
    softmax_scale: float | None = None, qk_nope_head_dim: int = 128, v_head_dim: int = 128, kv_lora_rank: int = 512,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS, out: torch.Tensor | None = None, return_lse: bool = False, max_seq_len: int | None = None,
    workspace: torch.Tensor | None = None, order: PrefillOrder | None = None, schedule: PrefillSchedule | None = None,
) -> Any:
    """Causal attention of new tokens over a latent cache that already holds them, in the MHA form.

    Keys and values of all tokens, the new ones too, are up-projected from the bytes of the cache, in chunks at absolute multiples of
    ``chunk_tokens``, and `mla_prefill` goes from chunk to chunk by its state. So a row's bits depend neither on where a prompt was cut nor on
    how much of it was cached before nor on ``chunk_tokens``; they are those of `mla_prefill` over keys and values made by `project_kv`.

    Args:
        q: [T, H, nope + P], the requests' new tokens one after another; fp16, bf16 or fp32.
        kv_cache: [num_blocks, block_size, R + P] of q's dtype, block_size 1 or a multiple of 16.
        w_kv_b: [H * (nope + V), R] of q's dtype: the weight of kv_b_proj as models store it, for each head its keys' rows, then its values'.
        block_table: [B, W] int32 page ids; entries past a request's last page are not read.
        cu_seqlens_q: [B + 1] int32, begins of the requests' tokens in q; tokens from ``cu_seqlens_q[B]`` on are padding (out 0, lse -inf).
        seq_lens: [B] int32 tokens of each request, the new ones included: query i is at position ``seq_lens[r] - q_len[r] + i``.
        chunk_tokens: a multiple of ``order.block_n``.
        max_seq_len: bound of seq_lens, if the host knows one: else the block table's capacity, and chunks that no request has cost launches.
        workspace: uint8 tensor of at least `prefill_workspace_bytes` bytes, used by one stream at a time, in memory of its own.
        out, return_lse, order, schedule: as in `mla_prefill`.

    Returns:
        out [T, H, V], and lse [T, H] (fp32, natural log) with ``return_lse=True``. On a GPU a request longer than ``max_seq_len`` or than its
        block table becomes NaN; on the CPU it is refused.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written, but scratch memory where a given schedule asks for more shared
            memory or registers than the device has.
    """
    facts = _facts(
        (q, kv_cache, w_kv_b, block_table, cu_seqlens_q, seq_lens, out, workspace),
        (softmax_scale, qk_nope_head_dim, v_head_dim, kv_lora_rank, chunk_tokens, return_lse, max_seq_len, order, schedule))
    known = None if facts is None else _repeats.get(facts)  # a compiled call must not even look: it would be guarded by what is known
    if known is not None:
        result = _repeat(*known, (q, kv_cache, w_kv_b, block_table, cu_seqlens_q, seq_lens), out, workspace, return_lse)
        if result is not None:
            return result
    scale = checks.softmax_scale(softmax_scale)
    checks.boolean("return_lse", return_lse)
    cache = checks.tensor("kv_cache", kv_cache, dims=3)
    checks.float_dtype("kv_cache", cache)
    device, dtype = cache.device, cache.dtype
    num_pages, page_size, width = cache.shape
    P = checks.latent_dims(kv_lora_rank, width)
    check_head_dims(qk_nope_head_dim, P, v_head_dim)
    checks.paged_cache(cache)
    q = checks.tensor("q", q, dims=3, dtype=dtype, device=device)
    num_tokens, num_heads, _ = q.shape
    checks.heads(num_heads)
    checks.shape("q", q, (num_tokens, num_heads, qk_nope_head_dim + P), "qk_nope_head_dim columns and those that kv_cache has past kv_lora_rank")
    weight = checks.tensor("w_kv_b", w_kv_b, dims=2, dtype=dtype, device=device)
    checks.shape("w_kv_b", weight, (num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank), "keys' and values' rows for each head of q")
    table = checks.tensor("block_table", block_table, dims=2, dtype=torch.int32, device=device)
    lens = checks.tensor("seq_lens", seq_lens, dims=1, dtype=torch.int32, device=device)
    starts = checks.tensor("cu_seqlens_q", cu_seqlens_q, dims=1, dtype=torch.int32, device=device)
    batch_size = lens.shape[0]
    checks.shape("cu_seqlens_q", starts, (batch_size + 1,), "one more entry than seq_lens")
    if table.shape[0] != batch_size:
        raise ValueError(f"block_table has {table.shape[0]} rows; it must have {batch_size}, one for each of seq_lens")
    order, schedule = _order(order, None), _schedule(schedule)
    capacity = table.shape[1] * page_size
    if max_seq_len is None:
        max_seq_len = capacity
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 0:
        raise ValueError(f"max_seq_len={max_seq_len!r} must be an int >= 0, or None")
    limit = min(max_seq_len, capacity)  # chunks past the table have no tokens
    plan = plan_prefill(num_tokens=num_tokens, batch_size=batch_size, num_heads=num_heads, max_seq_len=limit, qk_nope_head_dim=qk_nope_head_dim,
                        qk_rope_head_dim=P, v_head_dim=v_head_dim, kv_lora_rank=kv_lora_rank, dtype=dtype, chunk_tokens=chunk_tokens, order=order)
    out = _check_out(out, num_tokens, num_heads, v_head_dim, dtype, device)
    if torch.compiler.is_compiling():
        result, lse = torch.ops.triton_mla.prefill_paged(q, cache, weight, table, starts, lens, scale, qk_nope_head_dim, v_head_dim, kv_lora_rank,
                                                         chunk_tokens, limit, order.block_n, order.reference_step)
        out = result if out is None else out.copy_(result)
        return (out, lse) if return_lse else out
    checks.lengths(lens, table, page_size, num_pages, starts, num_tokens)
    if device.type == "cpu" and batch_size and int(lens.max()) > limit:
        raise ValueError(f"seq_lens={lens.tolist()} must be at most max_seq_len={max_seq_len}")
    given, given_out = workspace, out
    if workspace is None:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    workspace = checks.tensor("workspace", workspace, dims=1, dtype=torch.uint8, device=device)
    if workspace.numel() < plan.workspace_bytes or workspace.data_ptr() % 16:
        raise ValueError(f"workspace has {workspace.numel()} bytes at {workspace.data_ptr():#x}; it must have at least the {plan.workspace_bytes} of "
                         "prefill_workspace_bytes, aligned to 16")
    if out is not None or given is not None:
        checks.apart({"out": out, "workspace": given},
                     {"q": q, "kv_cache": cache, "w_kv_b": weight, "block_table": table, "cu_seqlens_q": starts, "seq_lens": lens})
    if out is None:
        out = torch.empty((num_tokens, num_heads, v_head_dim), dtype=dtype, device=device)
    lse = torch.empty((num_tokens, num_heads) if return_lse else (0,), dtype=torch.float32, device=device)
    with on_device(device), recorded() as launches:
        attend_paged(plan, q, cache, weight, table, starts, lens, scale, out, lse if return_lse else None, workspace, order, schedule, limit)
    if facts is not None and device.type == "cuda":  # on the CPU the values of the integers are checked, at every call
        tensors = (q, cache, weight, out, workspace, *((lse,) if return_lse else ()), table, starts, lens)
        repeat = Repeat.of(launches, tensors, 5, [i for i, t in ((3, given_out), (4, given)) if t is not None])
        if repeat is not None:
            if len(_repeats) >= MAX_REPEATS:
                _repeats.clear()
            _repeats[facts] = plan, repeat
    return (out, lse) if return_lse else out


MAX_REPEATS = 256
_repeats: dict[Any, tuple[PrefillPlan, Repeat]] = {}


def _facts(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """All that the checks and the launches of a paged prefill look at, but for addresses; None where an argument is of a wrong type, which the
    checks tell, or the call is compiled."""
    if torch.compiler.is_compiling():
        return None
    try:
        facts = (checks.recording(), *[(type(option), option) for option in options],
                 *[None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad) for t in tensors])
        hash(facts)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return facts


def _repeat(plan: PrefillPlan, repeat: Repeat, read: tuple[torch.Tensor, ...], out: torch.Tensor | None, workspace: torch.Tensor | None,
            return_lse: bool) -> Any:
    """The result of a call whose facts an earlier one had; None if it must be made in the ordinary way."""
    q = read[0]
    if out is None:
        out = torch.empty((plan.num_tokens, plan.num_heads, plan.v_head_dim), dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=q.device)
    lse = torch.empty((plan.num_tokens, plan.num_heads), dtype=torch.float32, device=q.device) if return_lse else None
    tensors = (*read[:3], out, workspace, *((lse,) if lse is not None else ()), *read[3:])
    with on_device(q.device):
        done = repeat.run([t.data_ptr() for t in tensors], q.device.index)
    if not done:
        return None
    return (out, lse) if return_lse else out


def project_kv(latent: torch.Tensor, w_kv_b: torch.Tensor) -> torch.Tensor:
    """Keys and values of latent rows, ``latent @ w_kv_b.T``, with the bits that `mla_prefill_paged` gives them.

    A row's bits do not depend on the other rows, nor a column's on the other columns.

    Args:
        latent: [S, R], R a multiple of 16 up to 512; fp16, bf16 or fp32.
        w_kv_b: [O, R] of latent's dtype.

    Returns:
        [S, O] of latent's dtype; with O = H * (nope + V), its view [S, H, nope + V] holds k_nope and v for `mla_prefill`.

    Raises:
        ValueError: an argument is wrong; nothing has been launched.
    """
    latent = checks.tensor("latent", latent, dims=2)
    checks.float_dtype("latent", latent)
    rows, R = latent.shape
    check_dims(R, 0)
    weight = checks.tensor("w_kv_b", w_kv_b, dims=2, dtype=latent.dtype, device=latent.device)
    checks.shape("w_kv_b", weight, (weight.shape[0], R), "the columns of latent")
    out = torch.empty((rows, weight.shape[0]), dtype=latent.dtype, device=latent.device)
    lens = torch.full((1,), rows, dtype=torch.int32, device=latent.device)
    with on_device(latent.device):
        project(latent, weight, lens, out, requests=(0, 1), chunk=(0, rows), kv_limit=rows)
    return out


def prefill_workspace_bytes(**sizes: Any) -> int:
    """Bytes of scratch memory that `mla_prefill_paged` needs; the arguments are those of `plan.plan_prefill`.

    ``max_seq_len`` is that of the call, or the capacity of its block table where the call gives none.
    """
    return plan_prefill(**sizes).workspace_bytes


def _check_out(out: Any, num_tokens: int, num_heads: int, V: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    if out is None:
        return None
    out = checks.tensor("out", out, dims=3, dtype=dtype, device=device)
    checks.shape("out", out, (num_tokens, num_heads, V), "one value vector for each query row")
    checks.no_overlap("out", out)
    return out


def _check_starts(name: str, starts: torch.Tensor, total: int, of: str) -> None:
    """Values of the begins, where the host can see them."""
    if starts.device.type != "cpu":
        return
    values = starts.tolist()
    if values[0] != 0 or values[-1] > total or any(b < a for a, b in pairwise(values)):
        raise ValueError(f"{name}={values} must begin with 0, never fall, and end at no more than the {total} tokens of {of}")


def _order(order: Any, state: Any) -> PrefillOrder:
    if order is not None and not isinstance(order, PrefillOrder):
        raise ValueError(f"order={order!r} must be a PrefillOrder, or None")
    if state is not None and not isinstance(state, PrefillState):
        raise ValueError(f"state={type(state).__name__} must be a PrefillState, as return_state=True returns it")
    if state is not None and not isinstance(state.order, PrefillOrder):
        raise ValueError(f"state.order={state.order!r} must be the PrefillOrder that made it")
    if order is None:
        return DEFAULT_PREFILL_ORDER if state is None else state.order
    if state is not None and state.order != order:
        raise ValueError(f"state.order={state.order!r} must be the order of this call, {order!r}")
    return order


def _schedule(schedule: Any) -> PrefillSchedule | None:
    if schedule is not None and not isinstance(schedule, PrefillSchedule):
        raise ValueError(f"schedule={schedule!r} must be a PrefillSchedule, or None")
    return schedule


def _check_state(state: PrefillState, num_tokens: int, num_heads: int, V: int, order: PrefillOrder, device: torch.device) -> None:
    rows = (num_tokens, num_heads)
    for name, value, expected in (("reference", state.reference, rows), ("total", state.total, (*rows, ROW_SUMS)), ("acc", state.acc, (*rows, V))):
        name = f"state.{name}"
        checks.shape(name, checks.tensor(name, value, dims=len(expected), dtype=torch.float32, device=device), expected, "the rows of q, and the heads' sums")
        if not value.is_contiguous():
            raise ValueError(f"{name} has strides {value.stride()}; it must be contiguous")


def _new_state(q: torch.Tensor, V: int, order: PrefillOrder) -> PrefillState:
    rows = q.shape[:2]
    reference, total, acc = (torch.empty(size, dtype=torch.float32, device=q.device) for size in (rows, (*rows, ROW_SUMS), (*rows, V)))
    return PrefillState(reference, total, acc, order)


def _compiled(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor, scale: float, causal: bool,
    positions: torch.Tensor | None, state: PrefillState | None, return_lse: bool, return_state: bool, out: torch.Tensor | None, order: PrefillOrder,
) -> Any:
    """Under `torch.compile`: one operator."""
    if return_state and state is None:  # rows that have seen no token, for the operator to go on from
        state = _new_state(q, v.shape[2], order)
        state.reference.fill_(-torch.inf)
        state.total.zero_()
        state.acc.zero_()
    parts = (None, None, None) if state is None else (state.reference, state.total, state.acc)
    arguments = (q, k_nope, k_pe, v, starts, key_starts, scale, causal, positions, *parts, order.block_n, order.reference_step)
    if return_state:
        torch.ops.triton_mla.prefill_state(*arguments)
        return state
    result, lse = torch.ops.triton_mla.prefill(*arguments)
    out = result if out is None else out.copy_(result)
    return (out, lse) if return_lse else out
