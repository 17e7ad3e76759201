"""From the arguments of an attention op to its launches: checked and prepared once for each set of shapes, strides, dtypes and options."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from . import checks, hopper_decode
from .launch import LOG2E, Arguments, PreparedAttention, Strides
from .plan import AttentionPlan, plan_attention
from .tuning import DEFAULT_ORDER, ReductionOrder, arch_of

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
MAX_CALLS = 4096


class Given(NamedTuple):
    """The arguments of `mla_decode` (whose ``cu_seqlens_q`` is None) or `mla_extend`, as the caller gave them."""

    decode: bool
    q: Any
    kv_cache: Any
    block_table: Any
    cu_seqlens_q: Any
    seq_lens: Any
    softmax_scale: Any
    kv_lora_rank: Any
    k_scale: Any
    out: Any
    return_lse: Any
    plan: Any
    order: Any
    workspace: Any
    lse: Any

    def written(self) -> dict[str, torch.Tensor | None]:
        """What the caller gave to write to; a call's own tensors share no memory."""
        return {"out": self.out, "lse": self.lse, "workspace": self.workspace}

    def read(self) -> dict[str, torch.Tensor | None]:
        q = {"q": self.q} if isinstance(self.q, torch.Tensor) else {"q[0]": self.q[0], "q[1]": self.q[1]}
        return {**q, "kv_cache": self.kv_cache, "block_table": self.block_table, "cu_seqlens_q": self.cu_seqlens_q, "seq_lens": self.seq_lens}

    def facts(self) -> tuple[Any, ...]:
        """All that the checks look at, but for values in memory. Where an argument is of a wrong type they are not hashable, or this is an
        AttributeError, or a RuntimeError of torch."""
        q = self.q
        tensors = (*((q,) if isinstance(q, torch.Tensor) else q), *self[2:6], self.out, self.workspace, self.lse)
        return (self.decode, type(q), type(self.return_lse), self.return_lse, type(self.softmax_scale), self.softmax_scale,
                type(self.kv_lora_rank), self.kv_lora_rank, self.k_scale, id(self.plan), id(self.order), checks.recording(),
                *[None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad) for t in tensors])


class Checked(NamedTuple):
    """The arguments in the form that the kernels take."""

    scale: float
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor


class Call(NamedTuple):
    """What the checks made of the arguments."""

    prepared: PreparedAttention
    scale_log2: float
    device: torch.device
    out_shape: tuple[int, int, int]
    workspace_bytes: int
    rope_bytes: int  # from q_nope to q_pe where q is one tensor
    scores_bytes: int  # from the partials to the scores
    spans: tuple[tuple[int, int, int, int], ...]  # `_spans`
    held: tuple[Any, Any]  # the plan and the order given: their ids are among the facts


_calls: dict[Any, Call] = {}


def attend(given: Given) -> Any:
    """Run an attention op; see `attention.mla_decode`."""
    if torch.compiler.is_compiling():
        return _compiled(given)
    call = _call_of(given)
    device, out, lse, workspace = call.device, given.out, given.lse, given.workspace
    if out is None:
        out = given.kv_cache.new_empty(call.out_shape)
    if workspace is None:
        workspace = given.kv_cache.new_empty(call.workspace_bytes, dtype=torch.uint8)
    if not given.return_lse:
        lse = workspace  # an address for what is not stored
    elif lse is None:
        lse = given.kv_cache.new_empty(call.out_shape[:2], dtype=torch.float32)
    with on_device(device):
        if device.type != "cuda" or not _run_ready(call, given, out, lse, workspace):
            _run(call, given, out, lse, workspace)
    return (out, lse) if given.return_lse else out


def _call_of(given: Given) -> Call:
    """Checked and prepared. On a GPU twenty checks take longer than a small decode; equal facts have passed them before."""
    try:
        facts = given.facts()
        call = _calls.get(facts)
    except (AttributeError, TypeError, RuntimeError):
        return _prepare(given)  # the checks say which argument it is
    if call is None:
        call = _prepare(given)
        if call.device.type == "cuda":  # on the CPU the values of the integers are checked, at every call
            if len(_calls) >= MAX_CALLS:
                _calls.clear()
            _calls[facts] = call
    return call


def _run_ready(call: Call, given: Given, out: torch.Tensor, lse: torch.Tensor, workspace: torch.Tensor) -> bool:
    """Launch what an earlier call compiled, from addresses alone; False if there is nothing yet, or an address is not aligned to 16."""
    q = given.q
    if isinstance(q, torch.Tensor):
        q_nope = q.data_ptr()
        q_pe = q_nope + call.rope_bytes
    else:
        q_nope, q_pe = q[0].data_ptr(), q[1].data_ptr()
    kv_cache, seq_lens, output, partials = given.kv_cache.data_ptr(), given.seq_lens.data_ptr(), out.data_ptr(), workspace.data_ptr()
    starts = seq_lens if given.decode else given.cu_seqlens_q.data_ptr()
    at = (q_nope, q_pe, kv_cache, given.block_table.data_ptr(), starts, seq_lens, output, lse.data_ptr(), partials, partials + call.scores_bytes,
          call.scale_log2)  # as in `Arguments`, which takes longer to make
    for i, j, least, most in call.spans:  # addresses are no facts
        if least < at[i] - at[j] < most:
            checks.apart(given.written(), given.read())
            break
    if (q_nope | q_pe | kv_cache | output | partials) & 15:
        return False
    return call.prepared.run_ready(at, call.device.index)


_FIELDS = {"q": "q_nope", "q[0]": "q_nope", "q[1]": "q_pe", "workspace": "partials"}


def _spans(given: Given) -> tuple[tuple[int, int, int, int], ...]:
    """(i, j, least, most) for each given tensor to write to and each other one: i and j are their fields of `Arguments`, and the memory from the
    first to the last element of both meets where least < address i - address j < most."""
    written, read = ([(Arguments._fields.index(_FIELDS.get(name, name)), checks.span(t)) for name, t in tensors.items() if t is not None]
                     for tensors in (given.written(), given.read()))
    return tuple((i, j, -size, reach) for n, (i, size) in enumerate(written) for j, reach in (*written[n + 1 :], *read) if size and reach)


def _run(call: Call, given: Given, out: torch.Tensor, lse: torch.Tensor, workspace: torch.Tensor) -> None:
    """Launch from tensors, compiling what is missing."""
    plan = call.prepared.plan
    q_nope, q_pe = given.q if not isinstance(given.q, torch.Tensor) else (given.q[..., : plan.kv_lora_rank], given.q[..., plan.kv_lora_rank :])
    if workspace.data_ptr() % 16:
        raise ValueError(f"workspace begins at {workspace.data_ptr():#x}; it must be aligned to 16 bytes")
    scratch = workspace[: call.workspace_bytes].view(torch.float32)
    starts = given.seq_lens if given.decode else given.cu_seqlens_q
    call.prepared.run(Arguments(q_nope, q_pe, given.kv_cache, given.block_table, starts, given.seq_lens, out, lse if given.return_lse else scratch, scratch,
                                scratch[plan.partials_size :], call.scale_log2))


def _compiled(given: Given) -> Any:
    """Under `torch.compile`: one operator, which plans and allocates for itself."""
    c = _check(given)
    order = DEFAULT_ORDER if given.order is None else given.order
    max_seq_len = c.block_table.shape[1] * c.kv_cache.shape[1]
    if given.plan is not None or given.workspace is not None:  # else the graph may be of other sizes, too
        plan = _plan_for(given, c)
        order, max_seq_len = plan.order, plan.max_seq_len
    out, lse = torch.ops.triton_mla.attend(c.q_nope, c.q_pe, c.kv_cache, c.block_table, None if given.decode else c.starts, c.seq_lens, c.scale,
                                           given.kv_lora_rank, max_seq_len, order.block_n, order.kv_split, order.reference_step)
    if given.out is not None:
        out = given.out.copy_(out)
    if given.lse is not None:
        lse = given.lse.copy_(lse)
    return (out, lse) if given.return_lse else out


def _prepare(given: Given) -> Call:
    c = _check(given)
    checks.apart(given.written(), given.read())
    num_tokens, num_heads, R = c.q_nope.shape
    num_pages, page_size, _ = c.kv_cache.shape
    device, dtype, capacity = c.kv_cache.device, c.kv_cache.dtype, c.block_table.shape[1] * page_size
    plan = _plan_for(given, c)
    checks.lengths(c.seq_lens, c.block_table, page_size, num_pages, None if given.decode else c.starts, num_tokens, plan.max_seq_len)
    out_strides = (num_heads * R, R) if given.out is None else given.out.stride()[:2]
    strides = Strides(c.q_nope.stride()[:2], c.q_pe.stride()[:2], c.kv_cache.stride()[:2], c.block_table.stride(0), out_strides)
    if plan.schedule.form.startswith("hopper") and not hopper_decode.serves(plan, strides, num_pages):
        plan = plan.portable()
    return Call(PreparedAttention(plan, strides, capacity, given.return_lse), c.scale * LOG2E, device, (num_tokens, num_heads, R), plan.workspace_bytes,
                R * dtype.itemsize, 4 * plan.partials_size, _spans(given), (given.plan, given.order))


def _check(given: Given) -> Checked:
    """All that can be checked without a plan and without the values of the integers."""
    scale = checks.softmax_scale(given.softmax_scale)
    checks.no_scale(given.k_scale)
    checks.boolean("return_lse", given.return_lse)
    if given.order is not None and not isinstance(given.order, ReductionOrder):
        raise ValueError(f"order={given.order!r} must be a ReductionOrder, or None")
    cache = checks.tensor("kv_cache", given.kv_cache, dims=3)
    checks.float_dtype("kv_cache", cache)
    device, dtype, R = cache.device, cache.dtype, given.kv_lora_rank
    P = checks.latent_dims(R, cache.shape[2])
    checks.paged_cache(cache)
    q_nope, q_pe = _split_query(given.q, R, P, dtype, device)
    num_tokens, num_heads, _ = q_nope.shape
    checks.heads(num_heads)
    table = checks.tensor("block_table", given.block_table, dims=2, dtype=torch.int32, device=device)
    lens = checks.tensor("seq_lens", given.seq_lens, dims=1, dtype=torch.int32, device=device)
    batch_size = lens.shape[0]
    if given.decode and num_tokens != batch_size:
        raise ValueError(f"q has {num_tokens} rows and seq_lens {batch_size}; a decode has one query token a request")
    if table.shape[0] != batch_size:
        raise ValueError(f"block_table has {table.shape[0]} rows; it must have {batch_size}, one for each of seq_lens")
    starts = lens
    if not given.decode:
        starts = checks.tensor("cu_seqlens_q", given.cu_seqlens_q, dims=1, dtype=torch.int32, device=device)
        checks.shape("cu_seqlens_q", starts, (batch_size + 1,), "one more entry than seq_lens")
    if given.out is not None:
        out = checks.tensor("out", given.out, dims=3, dtype=dtype, device=device)
        checks.shape("out", out, (num_tokens, num_heads, R), "one latent vector for each query row")
        checks.no_overlap("out", out)
    if given.lse is not None:
        if not given.return_lse:
            raise ValueError("lse was given but return_lse is False; set return_lse=True to have it filled")
        lse = checks.tensor("lse", given.lse, dims=2, dtype=torch.float32, device=device)
        checks.shape("lse", lse, (num_tokens, num_heads), "one value for each query row")
        if not lse.is_contiguous():
            raise ValueError(f"lse has strides {lse.stride()}; it must be contiguous")
    if given.workspace is not None:
        checks.tensor("workspace", given.workspace, dims=1, dtype=torch.uint8, device=device)
    return Checked(scale, q_nope, q_pe, cache, table, starts, lens)


def _split_query(q: Any, R: int, P: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(q, torch.Tensor):
        q = checks.tensor("q", q, dims=3, dtype=dtype, device=device)
        if q.shape[2] != R + P:
            raise ValueError(f"q has shape {tuple(q.shape)}; its last dimension must be {R + P}, kv_cache's width")
        return q[..., :R], q[..., R:]
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise ValueError(f"q={type(q).__name__} must be a tensor or a pair (q_nope, q_pe)")
    q_nope = checks.tensor("q[0]", q[0], dims=3, dtype=dtype, device=device)
    q_pe = checks.tensor("q[1]", q[1], dims=3, dtype=dtype, device=device)
    if q_nope.shape[2] != R:
        raise ValueError(f"q[0] (q_nope) has shape {tuple(q_nope.shape)}; its last dimension must be kv_lora_rank={R}")
    checks.shape("q[1] (q_pe)", q_pe, (*q_nope.shape[:2], P), "the rows of q_nope, and the rest of kv_cache's width")
    return q_nope, q_pe


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def device_facts(device: torch.device) -> tuple[str, int]:
    """(architecture name, multiprocessors)"""
    return _device_facts(device)


@lru_cache(maxsize=64)
def _device_facts(device: torch.device) -> tuple[str, int]:
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return arch_of(device), sms


_cached_plan = lru_cache(maxsize=1024)(plan_attention)


def _plan_for(given: Given, c: Checked) -> AttentionPlan:
    """The caller's plan, if it fits this call, else one from the cache of plans; and the workspace has room for it."""
    plan, order = given.plan, given.order
    num_tokens, num_heads, R = c.q_nope.shape
    page_size = c.kv_cache.shape[1]
    arch, num_sms = device_facts(c.kv_cache.device)
    call = {"num_tokens": num_tokens, "batch_size": c.seq_lens.shape[0], "num_heads": num_heads, "kv_lora_rank": R, "qk_rope_head_dim": c.q_pe.shape[2],
            "dtype": c.kv_cache.dtype, "page_size": page_size, "decode": given.decode, "arch": arch}
    if plan is None:
        make = plan_attention if torch.compiler.is_compiling() else _cached_plan
        plan = make(**call, max_seq_len=c.block_table.shape[1] * page_size, num_sms=num_sms, order=DEFAULT_ORDER if order is None else order)
    elif not isinstance(plan, AttentionPlan):
        raise ValueError(f"plan={plan!r} must be an AttentionPlan, as plan_attention returns it")
    for name, value in call.items():
        if getattr(plan, name) != value:
            raise ValueError(f"plan.{name}={getattr(plan, name)!r} must be {value!r}, as in this call")
    if order is not None and order != plan.order:
        raise ValueError(f"order={order!r} must be the plan's {plan.order!r}, or None")
    if given.workspace is not None and given.workspace.numel() < plan.workspace_bytes:
        raise ValueError(f"workspace has {given.workspace.numel()} bytes; it must have at least plan.workspace_bytes={plan.workspace_bytes}")
    return plan


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


def on_device(device: torch.device) -> Any:
    """Make ``device`` current, if it is not."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING
    return torch.cuda.device(device)
