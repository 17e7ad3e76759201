"""`batch_invariant_mode`: torch's own products, softmaxes, means and RMS norms answered by the package's batch-invariant kernels.

Covered, for strided fp16, bf16 and fp32 tensors on a CUDA device, and under Triton's interpreter on the CPU too:

- ``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``addmv``, ``dot``, ``vdot``, in place and with ``out=``, and ``linear``; with them all that torch
  makes of them: ``@``, ``matmul``, ``mv``, ``addbmm``, ``einsum``, ``inner``, ``tensordot``, ``chain_matmul``, `torch.nn.Linear`
- ``_grouped_mm`` of rows [S, K] by matrices [E, K, N], and of batches; ``_foreach_mm``
- ``softmax``, ``log_softmax`` (so also cross entropy), ``mean`` over any dimensions, ``rms_norm``

A product with an added bias [N], as of ``linear``, is rounded once. Where torch scales or adds anything else (``addmm`` of a matrix, ``alpha``,
``beta``, ``baddbmm``, ``addmv``), the product is rounded to its dtype first; then product and addend are scaled, each rounded to fp32, their
sum is rounded to fp32, and that to the dtype.

Not covered, and refused by ``strict``: the above with other dtypes, with sparse or nested tensors, or with another ``out_dtype``; products of
scaled, packed or structured-sparse operands; convolutions; the fused kernels of ``scaled_dot_product_attention``. Integer products are exact in
any order and are left alone. Not covered, and not seen: every other op. Among them are sums, norms, ``logsumexp``, ``layer_norm`` and recurrent
layers; whether their rows depend on the batch is for torch to say.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from typing import Any

import torch

from .companion import products, rows
from .errors import UnsupportedError
from .launch import INTERPRETED
from .plan import DTYPES

logger = logging.getLogger(__name__)

Number = int | float
Kernel = Callable[..., Any]


def batch_invariant_mode(enabled: bool = True, *, strict: bool = False) -> AbstractContextManager[None]:
    """A context, or a decorator, in which this thread's torch ops of the kinds above have batch-invariant kernels.

    It holds for the thread that entered it, and not for threads that this one starts. Levels nest: the innermost decides, and leaving it, by an
    exception too, gives back what was before. After the last one, in whichever thread, the kernels of torch are as they were.
    `enable_batch_invariant_mode` is for all threads of a process.

    Gradients are torch's own formulas; products in them are covered where the mode holds in the thread that computes them. Of CUDA tensors
    that is a thread of autograd, which only `enable_batch_invariant_mode` reaches.

    **torch.compile**: Inductor fuses softmaxes, means and norms into kernels of its own and picks products by timing, so in compiled code the
    mode would be lost. While it is on anywhere, compiled functions therefore run eagerly, in the whole process (the stance "force_eager" of
    `torch.compiler.set_stance`); to enter it within a compiled function is an error. Code compiled ahead of time is not seen.
    **CUDA graphs**: the kernels only launch, so a capture in the mode keeps them, once a call before it has compiled them. A graph captured
    outside of the mode replays what it holds.

    While the mode is on anywhere, these switches are set for the whole process: TF32 off for matrix products and cuDNN; reduced-precision
    reductions and fp16 accumulation of cuBLAS off; ``cudnn.benchmark`` off and ``cudnn.deterministic`` on. They bear on ops that are not
    covered. `torch.use_deterministic_algorithms` is left alone: it is about runs, not batches, and refuses ops that this mode does not touch.

    torch looks kernels up without a lock. Entering the first level and leaving the last one while another thread is inside of a covered op is
    guarded against as far as Python can; engines should enable the mode once, before they start to compute.

    Args:
        enabled: False gives this thread the kernels of torch, within a level that gave it the others.
        strict: refuse what is not covered, as the module tells. Otherwise it runs as without the mode, and is logged once at WARNING.

    Raises:
        ValueError: an argument is wrong; on entering, that torch has no CUDA and the interpreter is off.
        RuntimeError: on entering, that the caller is being compiled.
        UnsupportedError: in the mode, if ``strict``, naming the op and what it has no kernel for. It is a ValueError.
    """
    return _mode(_checked(enabled, strict))


def enable_batch_invariant_mode(*, strict: bool = False) -> None:
    """The mode for all threads of the process, but where one is in a level of `batch_invariant_mode`, which decides there.

    Calling it again only changes ``strict``. Arguments and errors are those of `batch_invariant_mode`.
    """
    _set_default(_checked(True, strict))


def disable_batch_invariant_mode() -> None:
    """Take back `enable_batch_invariant_mode`. Levels of `batch_invariant_mode` are not touched."""
    _set_default(_Level(False, False))


def is_batch_invariant_mode() -> bool:
    """Whether the calling thread's ops have batch-invariant kernels."""
    return _level().enabled


class _Level:
    def __init__(self, enabled: bool, strict: bool) -> None:
        self.enabled, self.strict = enabled, strict


_lock = threading.RLock()
_default = _Level(False, False)
_thread = threading.local()
_open: dict[int, list[_Level]] = {}  # the levels of each thread that has any
_installed: ExitStack | None = None


def _checked(enabled: object, strict: object) -> _Level:
    for name, value in (("enabled", enabled), ("strict", strict)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")
    return _Level(bool(enabled), bool(strict))


def _level() -> _Level:
    """The level that decides for this thread."""
    levels = getattr(_thread, "levels", None)
    return levels[-1] if levels else _default


@contextmanager
def _mode(level: _Level) -> Iterator[None]:
    levels = _thread.__dict__.setdefault("levels", [])

    def leave() -> None:
        with _lock:
            levels.remove(level)
            if not levels:
                del _open[id(levels)]
            _install_or_remove()

    with _lock:
        levels.append(level)
        _open[id(levels)] = levels
        try:
            _install_or_remove()
        except BaseException:
            leave()
            raise
    try:
        yield
    finally:
        leave()


def _set_default(level: _Level) -> None:
    global _default
    with _lock:
        before, _default = _default, level
        try:
            _install_or_remove()
        except BaseException:
            _default = before
            raise


def _install_or_remove() -> None:
    """Overrides and switches are in place exactly while some thread's innermost level, or the default, is enabled."""
    global _installed
    wanted = _default.enabled or any(levels[-1].enabled for levels in _open.values())
    if wanted and _installed is None:
        with ExitStack() as stack:
            for part in (_eager, _switches, _overrides):
                stack.enter_context(part())
            _installed = stack.pop_all()
    elif not wanted and _installed is not None:
        stack, _installed = _installed, None
        stack.close()


@contextmanager
def _eager() -> Iterator[None]:
    if torch.compiler.is_compiling():
        raise RuntimeError("batch_invariant_mode was entered within torch.compile; enter it outside of the compiled function, which then runs eagerly")
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _switches() -> Iterator[None]:
    """Those of torch.backends. A precision of "none" follows that of torch.backends, which is out of the way while they are read."""
    backends: Any = torch.backends
    matmul, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn.matmul
    settings: list[tuple[Any, str, Any]] = [
        (matmul, "fp32_precision", "ieee"),
        (matmul, "allow_fp16_reduced_precision_reduction", (False, False)),
        (matmul, "allow_bf16_reduced_precision_reduction", (False, False)),
        (matmul, "allow_fp16_accumulation", False),
        (cudnn.conv, "fp32_precision", "ieee"),
        (cudnn.rnn, "fp32_precision", "ieee"),
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
    ]

    def read(holder: Any, name: str) -> Any:
        value = getattr(holder, name)
        return (value, getattr(holder, f"{name}_split_k")) if name.endswith("reduction") else value

    with ExitStack() as stack:
        parent, backends.fp32_precision = backends.fp32_precision, "none"
        try:
            before = [(holder, name, read(holder, name)) for holder, name, _ in [*settings, (mkldnn, "fp32_precision", None)]]
        finally:
            backends.fp32_precision = parent
        for setting in before:
            stack.callback(setattr, *setting)
        # The older switches, which torch keeps beside these and refuses to read where the two disagree.
        older: list[tuple[Kernel, Kernel, Any]] = [
            (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
            (lambda: cudnn.allow_tf32, lambda allow: setattr(cudnn, "allow_tf32", allow), False),
        ]
        for get, put, value in older:
            try:
                stack.callback(put, get())
            except RuntimeError:
                continue
            put(value)
        for setting in (*settings, before[-1]):
            setattr(*setting)
        yield


@contextmanager
def _overrides() -> Iterator[None]:
    devices = [device for device, runs in (("CUDA", torch.backends.cuda.is_built()), ("CPU", INTERPRETED)) if runs]
    if not devices:
        raise ValueError("enabled=True needs a torch with CUDA, or Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported")
    with torch.library._scoped_library("aten", "IMPL") as library:
        ours = [_override(library, *which) for device in devices for which in _overridden(device)]
        try:
            yield
        finally:
            # A thread that has looked a kernel up may still wait to run it, so it stays in memory for a while after its removal.
            now = time.monotonic()
            _retired.append((now, ours))
            while _retired and _retired[0][0] < now - GRACE:
                _retired.popleft()


_retired: deque[tuple[float, list[Any]]] = deque()
GRACE = 10.0  # seconds


def _overridden(device: str) -> Iterator[tuple[str, str, Kernel]]:
    """(op, dispatch key, kernel)"""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = set(torch._C._dispatch_get_all_op_names())
    for name, kernel in KERNELS.items():
        qualified = f"aten::{name}"
        if qualified not in names:
            continue
        if has(qualified, device) or has(qualified, "CompositeExplicitAutograd"):
            yield name, device, kernel
        for layout in ("Sparse", "SparseCsr", "NestedTensor"):
            if has(qualified, f"{layout}{device}"):
                yield name, f"{layout}{device}", _nothing
    # torch composes it of others, and for operands with strides of their own rounds before the bias. A kernel for the device alone would
    # cut off gradients; this one composes it too.
    yield "linear", device, _linear
    yield "linear", f"Autograd{device}", _linear


def _override(library: torch.library.Library, name: str, key: str, kernel: Kernel) -> Any:
    """Put a kernel in the place of torch's, to which it gives what it cannot do, and all calls of threads without the mode."""
    original = torch.library.get_kernel(f"aten::{name}", key)

    def run(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        level = _level()
        if level.enabled:
            try:
                result = kernel(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            except _Missing as missing:
                _refuse_or_log(name, key, str(missing), level.strict)
        return original.call_boxed(keyset, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        entry = f"aten/{name}/{key}"
        theirs = entry in torch.library._impls  # torch has overrides of this kind itself, and their entry must not go with ours
        library.impl(name, run, key, with_keyset=True, allow_override=True)
        if theirs:
            library._op_impls.discard(entry)
    return torch.library.get_kernel(f"aten::{name}", key)


class _Missing(Exception):
    """There is no batch-invariant kernel for this."""


_logged: set[tuple[str, str, str]] = set()


def _refuse_or_log(name: str, key: str, what: str, strict: bool) -> None:
    if strict:
        raise UnsupportedError(f"aten::{name} was called in batch_invariant_mode(strict=True)", {"batch-invariant kernels": (f"none for {what} ({key})",)})
    if (name, key, what) not in _logged:
        _logged.add((name, key, what))
        logger.warning("aten::%s has no batch-invariant kernel for %s (%s); it runs as without batch_invariant_mode, and its rows may depend on the batch",
                       name, what, key)


# The kernels below have the arguments of the ops that they stand for. NotImplemented: torch's own kernel has an error for this.


def _nothing(*args: Any, **kwargs: Any) -> Any:
    said = [f"{a.dtype}" if a.layout == torch.strided else f"{a.layout} {a.dtype}" for a in args if isinstance(a, torch.Tensor)]
    raise _Missing(", ".join(dict.fromkeys([*said, *[f"dtype={a}" for a in args if isinstance(a, torch.dtype)]])))


def _floats(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise _Missing(str(dtype))


def _multiply(op: Kernel, a: torch.Tensor, b: torch.Tensor, dims: int) -> Any:
    inner = a.dim() == b.dim() == dims and a.shape[-1] == b.shape[-2 if dims > 1 else -1] and a.shape[:-2] == b.shape[:-2]
    if not inner or a.dtype != b.dtype or a.device != b.device:
        return NotImplemented
    _floats(a.dtype)
    return op(a, b)


def _mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    return _multiply(products.matmul, a, b, 2)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> Any:
    return _multiply(products.bmm, a, b, 3)


def _dot(a: torch.Tensor, b: torch.Tensor) -> Any:
    return _multiply(products.matmul, a, b, 1)


def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    if c.dim() == 1 and b.dim() == 2 and c.shape[0] == b.shape[1] and beta == alpha == 1 and c.dtype == a.dtype and c.device == a.device:
        return _multiply(lambda a, b: products.linear(a, b.t(), c), a, b, 2)
    return _added(c, _mm(a, b), beta, alpha)


def _baddbmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    return _added(c, _bmm(a, b), beta, alpha)


def _addmv(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Number = 1, alpha: Number = 1) -> Any:
    if b.dim() != 1:
        return NotImplemented
    product = _multiply(products.matmul, a, b.unsqueeze(1), 2)
    return product if product is NotImplemented else _added(c, product.squeeze(1), beta, alpha)


def _added(c: torch.Tensor, product: Any, beta: Number, alpha: Number) -> Any:
    """``beta * c + alpha * product``, where c is not read if beta is 0."""
    if product is NotImplemented or c.dtype != product.dtype or c.device != product.device:
        return NotImplemented
    try:
        c = c.expand(product.shape)
    except RuntimeError:
        return NotImplemented
    total = product.float() if alpha == 1 else product.float() * alpha
    if beta != 0:
        total = total + (c.float() if beta == 1 else c.float() * beta)
    return total.to(product.dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """In one form for all shapes and strides: a product of matrices."""
    plain = all(t is None or t.layout == torch.strided for t in (x, weight, bias))
    if not plain or x.dim() == 0 or weight.dim() != 2 or (bias is not None and bias.dim() != 1) or x.shape[-1] != weight.shape[1]:
        return NotImplemented
    lines = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    out = torch.mm(lines, weight.t()) if bias is None else torch.addmm(bias, lines, weight.t())
    return out.view(*x.shape[:-1], weight.shape[0])


def _grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Any:
    if bias is not None or x.dtype != weight.dtype:
        return NotImplemented
    _floats(x.dtype)
    if out_dtype not in (None, x.dtype):
        raise _Missing(f"{x.dtype} with out_dtype={out_dtype}")
    if offs is None:
        return _bmm(x, weight)
    if (x.dim(), weight.dim()) != (2, 3):
        raise _Missing(f"groups of {x.dim()}-dimensional by {weight.dim()}-dimensional operands")
    if x.shape[1] != weight.shape[1] or offs.shape != weight.shape[:1] or offs.dtype != torch.int32:
        return NotImplemented
    return products.grouped_linear(x.contiguous(), weight.transpose(1, 2), torch.nn.functional.pad(offs, (1, 0)))


def _foreach_mm(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Any:
    return [torch.mm(x, y) for x, y in zip(a, b, strict=True)] if len(a) == len(b) else NotImplemented


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    return _along(rows.softmax, x, dim, half_to_float)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    return _along(rows.log_softmax, x, dim, half_to_float)


def _along(op: Kernel, x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    _floats(x.dtype)
    lines = x if x.dim() else x.unsqueeze(0)
    return op(lines, dim, dtype=torch.float32 if half_to_float else None).view(x.shape)


def _mean(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if dtype is None and not x.is_floating_point() and not x.is_complex():
        return NotImplemented
    _floats(dtype or x.dtype)
    return rows.mean(x.to(dtype or x.dtype), dim, keepdim)


def _mean_out(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: torch.Tensor
) -> Any:
    return _into(out, _mean(x, dim, keepdim, dtype=dtype or out.dtype))


def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> Any:
    """The norm and, where a gradient may be wanted, 1 / root; else the second result has no elements."""
    lead = x.shape[: x.dim() - len(shape)]
    if tuple(x.shape) != (*lead, *shape) or (weight is not None and tuple(weight.shape) != tuple(shape)):
        return NotImplemented
    for operand in (x,) if weight is None else (x, weight):
        _floats(operand.dtype)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    lines = x.reshape(*lead, prod(shape))
    out: Any = rows.rms_norm(lines, None if weight is None else weight.reshape(-1), eps)
    if not torch.is_grad_enabled():
        return out.view(x.shape), x.new_empty(0, dtype=torch.float32)
    inverse = torch.rsqrt(rows.mean(lines.float().square(), -1) + eps)
    return out.view(x.shape), inverse.view(*lead, *[1] * len(shape))


def _into(out: torch.Tensor, result: Any) -> Any:
    """What ``out=`` does with a result."""
    if result is NotImplemented or out.dtype != result.dtype or out.device != result.device:
        return NotImplemented
    return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)


def _with_out(kernel: Kernel) -> Kernel:
    def run(*args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        return _into(out, kernel(*args, **kwargs))

    return run


def _in_place(kernel: Kernel) -> Kernel:
    def run(c: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = kernel(c, *args, **kwargs)
        return NotImplemented if result is NotImplemented or c.shape != result.shape else c.copy_(result)

    return run


KERNELS: dict[str, Kernel] = {
    **{name: kernel for name, kernel in (("dot", _dot), ("vdot", _dot), ("mean.dim", _mean), ("mean.out", _mean_out), ("_fused_rms_norm", _rms_norm),
                                         ("_grouped_mm", _grouped_mm), ("_foreach_mm", _foreach_mm))},
    **{name: kernel for op, f in (("mm", _mm), ("bmm", _bmm), ("_softmax", _softmax), ("_log_softmax", _log_softmax))
       for name, kernel in ((op, f), (f"{op}.out", _with_out(f)))},
    **{name: kernel for op, f in (("addmm", _addmm), ("baddbmm", _baddbmm), ("addmv", _addmv))
       for name, kernel in ((op, f), (f"{op}.out", _with_out(f)), (f"{op}_", _in_place(f)))},
    # What torch has that adds as it likes.
    **dict.fromkeys([
        *[f"{op}.{overload}" for op in ("mm", "addmm", "bmm", "baddbmm") for overload in ("dtype", "dtype_out")],
        "_addmm_activation", "_addmm_activation.out", "_scaled_mm", "_scaled_mm.out", "_scaled_mm_v2", "_scaled_mm_v2.out", "_scaled_grouped_mm",
        "_scaled_grouped_mm_v2", "_mixed_dtypes_linear", "_weight_int4pack_mm", "_weight_int8pack_mm", "_cslt_sparse_mm",
        "_sparse_semi_structured_linear", "_sparse_semi_structured_mm", "_sparse_semi_structured_addmm", "_sparse_softmax", "_sparse_log_softmax",
        "_masked_softmax", "convolution", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention.quantized",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward", "_flash_attention_forward.quantized", "_flash_attention_forward_no_dropout_inplace", "_efficient_attention_forward",
        "_cudnn_attention_forward", "_triton_scaled_dot_attention", "_triton_multi_head_attention", "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    ], _nothing),
}
