"""`batch_invariant_mode`: torch's own products, softmaxes, means and RMS norms answered by the package's batch-invariant kernels.

Covered, for strided fp16, bf16 and fp32 tensors on a CUDA device, and under Triton's interpreter on the CPU too:

- ``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``addmv``, ``dot``, ``vdot``, in place and with ``out=``, ``_foreach_mm`` and ``linear``; and all that
  torch makes of them: ``@``, ``matmul``, ``mv``, ``addbmm``, ``einsum``, ``inner``, ``tensordot``, `torch.nn.Linear`
- ``linalg.multi_dot`` and ``chain_matmul``, from the left: torch's own order follows the sizes, the number of rows among them. So does that of
  opt_einsum, which the mode switches off: an ``einsum`` of three operands or more is contracted from the left too
- ``_grouped_mm`` of rows [S, K] by matrices [E, K, N], and of batches
- ``softmax``, ``log_softmax`` (so also cross entropy), ``mean`` over any dimensions, ``rms_norm``

A product with an added bias [N], as of ``linear``, is rounded once. Any other addend, and any scaling (``alpha``, ``beta``), follow after the
product was rounded to its dtype: product and addend are scaled, each rounded to fp32, their sum is rounded to fp32, and that to the dtype.

Not covered, and refused by ``strict``: the above with other dtypes, with sparse or nested tensors, or with another ``out_dtype``; products of
scaled, packed or structured-sparse operands; convolutions by any name; ``cdist``, ``bilinear``; recurrent layers where one kernel does them, as
those of cuDNN; the fused kernels of ``scaled_dot_product_attention``. `uncovered.UNCOVERED` lists them. ``_int_mm`` is exact in any order and left
alone. Not covered, and not seen, is every other op, among them sums, norms, ``logsumexp``, ``layer_norm``, decompositions, solvers and FFTs.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import checks
from .companion import products, rows
from .errors import UnsupportedError
from .launch import INTERPRETED
from .plan import DTYPES
from .switches import switches
from .uncovered import UNCOVERED

logger = logging.getLogger(__name__)

Number = int | float
Kernel = Callable[..., Any]


def batch_invariant_mode(enabled: bool = True, *, strict: bool = False) -> AbstractContextManager[None]:
    """A context, or a decorator, in which this thread's torch ops of the kinds above have batch-invariant kernels.

    It holds for the thread that entered it, and not for threads that this one starts; `enable_batch_invariant_mode` is for all of a process.
    Levels nest: the innermost decides, and leaving it, by an exception too, gives back what was before. After the last one, in whichever
    thread, the kernels of torch are as they were. Gradients are torch's own formulas, whose products are covered if the mode holds in the
    thread that computes them: of CUDA tensors one of autograd's own, which only `enable_batch_invariant_mode` reaches.

    **torch.compile**: Inductor fuses softmaxes, means and norms into kernels of its own and picks products by timing, so in compiled code the
    mode would be lost. While it is on anywhere, compiled functions therefore run eagerly, in the whole process (the stance "force_eager" of
    `torch.compiler.set_stance`); to enter it within a compiled function is an error. Code compiled ahead of time is not seen.
    **CUDA graphs**: a capture in the mode keeps its kernels, once a call before it has compiled them; any graph replays what it holds.

    While the mode is on anywhere, these switches are set for the whole process: TF32 off for matrix products and cuDNN; reduced-precision
    reductions and fp16 accumulation of cuBLAS off; ``cudnn.benchmark`` off and ``cudnn.deterministic`` on. They bear on ops that are not
    covered. So is opt_einsum. `torch.use_deterministic_algorithms` is left alone: it is about runs, not batches, and refuses ops that this mode
    does not touch.

    torch looks kernels up without a lock: engines should enable the mode once, before other threads compute. Kernels that were taken away under
    a call stay in memory for some seconds, with which switching beside threads that compute was free of faults.

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
    """`batch_invariant_mode` for all threads of the process, except within its levels, which decide there. Called again, it sets ``strict``."""
    _set_default(_checked(True, strict))


def disable_batch_invariant_mode() -> None:
    """Take back `enable_batch_invariant_mode`. Levels are not touched."""
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
_retired: deque[tuple[float, list[Any]]] = deque()
_logged: set[tuple[str, str, str]] = set()
GRACE = 10.0  # seconds


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
    try:
        with _lock:
            levels.append(level)
            _open[id(levels)] = levels
            _install_or_remove()
        yield
    finally:
        with _lock:
            levels.remove(level)
            if not levels:
                del _open[id(levels)]
            _install_or_remove()


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
            for part in (torch.compiler.set_stance("force_eager"), switches(), _overrides()):
                stack.enter_context(part)
            _installed = stack.pop_all()
    elif not wanted and _installed is not None:
        stack, _installed = _installed, None
        stack.close()


@contextmanager
def _overrides() -> Iterator[None]:
    devices = [device for device, runs in (("CUDA", torch.backends.cuda.is_built()), ("CPU", INTERPRETED)) if runs]
    if not devices:
        raise ValueError("enabled=True needs a torch with CUDA, or Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported")
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            ours = [_override(library, *which) for device in devices for which in _overridden(device)]
        try:
            yield
        finally:
            # A thread that has looked a kernel up may still wait to run it, so it stays in memory for a while after its removal.
            now = time.monotonic()
            _retired.append((now, ours))
            while _retired and _retired[0][0] < now - GRACE:
                _retired.popleft()


def _overridden(device: str) -> Iterator[tuple[str, str, Kernel]]:
    """(op, dispatch key, kernel)"""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = set(torch._C._dispatch_get_all_op_names())
    for name, kernel in KERNELS.items():
        qualified = f"aten::{name}"
        if qualified not in names:
            continue
        if any(has(qualified, key) for key in (device, "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")):
            yield name, device, kernel
        for layout in ("Sparse", "SparseCsr", "NestedTensor"):
            if has(qualified, f"{layout}{device}"):
                yield name, f"{layout}{device}", _nothing
    for name, kernel in COMPOSED.items():  # a kernel for the device alone would cut off gradients
        yield name, device, kernel
        yield name, f"Autograd{device}", kernel


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

    entry = f"aten/{name}/{key}"
    theirs = entry in torch.library._impls  # torch has overrides of this kind itself, and their entry must not go with ours
    library.impl(name, run, key, with_keyset=True, allow_override=True)
    if theirs:
        library._op_impls.discard(entry)
    return torch.library.get_kernel(f"aten::{name}", key)


class _Missing(Exception):
    """There is no batch-invariant kernel for this."""


def _refuse_or_log(name: str, key: str, what: str, strict: bool) -> None:
    if strict:
        reasons = {"batch-invariant kernels": (f"none for {what} ({key})",)}
        raise UnsupportedError(f"aten::{name} was called in batch_invariant_mode(strict=True)", reasons) from None
    if (name, key, what) not in _logged:
        _logged.add((name, key, what))
        logger.warning("aten::%s has no batch-invariant kernel for %s (%s); it runs as without batch_invariant_mode, and its rows may depend on the batch",
                       name, what, key)


# The kernels below have the arguments of the ops that they stand for. NotImplemented: torch's own kernel has an error for this, or asks ops
# that are covered.


def _nothing(*args: Any, **kwargs: Any) -> Any:
    said = [f"{a.dtype}" if a.layout == torch.strided else f"{a.layout} {a.dtype}" for a in args if isinstance(a, Tensor)]
    raise _Missing(", ".join(dict.fromkeys([*said, *[f"dtype={a}" for a in args if isinstance(a, torch.dtype)]])))


def _floats(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise _Missing(str(dtype))


def _multiply(a: Tensor, b: Tensor, *, dims: tuple[int, int], bias: Tensor | None = None) -> Any:
    if (a.dim(), b.dim()) != dims or a.shape[-1] != b.shape[-min(2, b.dim())] or a.shape[:-2] != b.shape[:-2] or (a.dtype, a.device) != (b.dtype, b.device):
        return NotImplemented
    _floats(a.dtype)
    return products.matmul(a, b) if bias is None else products.linear(a, b.t(), bias)


def _add(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1, dims: tuple[int, int]) -> Any:
    """``beta * c + alpha * (a @ b)``, where c is not read if beta is 0."""
    if (c.dtype, c.device) != (a.dtype, a.device):
        return NotImplemented
    if dims == (2, 2) and c.dim() == 1 and c.shape == b.shape[1:] and beta == alpha == 1:
        return _multiply(a, b, dims=dims, bias=c)
    product = _multiply(a, b, dims=dims)
    if product is NotImplemented or c.dim() > product.dim() or any(n not in (1, m) for n, m in zip(c.shape[::-1], product.shape[::-1], strict=False)):
        return NotImplemented
    total = product.float() if alpha == 1 else product.float() * alpha
    if beta != 0:
        total = total + (c.float() if beta == 1 else c.float() * beta)
    return total.to(product.dtype)


def _multi_dot(matrices: Sequence[Tensor], *, dims: tuple[int, ...] = (1, 2)) -> Any:
    """From the left, whatever the sizes. ``dims``: which the first and the last may have."""
    if any(t.dim() not in (dims if i in (0, len(matrices) - 1) else (2,)) for i, t in enumerate(matrices)):
        return NotImplemented
    fits = all(a.shape[-1] == b.shape[0] and (a.dtype, a.device) == (b.dtype, b.device) for a, b in pairwise(matrices))
    return reduce(torch.matmul, matrices) if len(matrices) > 1 and fits else NotImplemented


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """In one form for all shapes and strides: a product of matrices."""
    plain = all(t is None or t.layout == torch.strided for t in (x, weight, bias))
    if not plain or x.dim() == 0 or weight.dim() != 2 or (bias is not None and bias.dim() != 1) or x.shape[-1] != weight.shape[1]:
        return NotImplemented
    lines = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    out = torch.mm(lines, weight.t()) if bias is None else torch.addmm(bias, lines, weight.t())
    return out.view(*x.shape[:-1], weight.shape[0])


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Any:
    if bias is not None or x.dtype != weight.dtype:
        return NotImplemented
    _floats(x.dtype)
    if out_dtype not in (None, x.dtype):
        raise _Missing(f"{x.dtype} with out_dtype={out_dtype}")
    if offs is None:
        return _multiply(x, weight, dims=(3, 3))
    if (x.dim(), weight.dim()) != (2, 3):
        raise _Missing(f"groups of {x.dim()}-dimensional by {weight.dim()}-dimensional operands")
    if x.shape[1] != weight.shape[1] or offs.shape != weight.shape[:1] or offs.dtype != torch.int32:
        return NotImplemented
    return products.grouped_linear(x.contiguous(), weight.transpose(1, 2), torch.nn.functional.pad(offs, (1, 0)))


def _softmax(x: Tensor, dim: int, half_to_float: bool, *, log: bool = False) -> Any:
    if not checks.are_dims(x, (dim,)):
        return NotImplemented
    _floats(x.dtype)
    return (rows.log_softmax if log else rows.softmax)(x if x.dim() else x.unsqueeze(0), dim, dtype=torch.float32 if half_to_float else None).view(x.shape)


def _mean(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Any:
    if not checks.are_dims(x, dim or ()) or (dtype is None and out is None and not x.is_floating_point() and not x.is_complex()):
        return NotImplemented
    dtype = dtype or (x if out is None else out).dtype
    _floats(dtype)
    result = rows.mean(x.to(dtype), dim, keepdim)
    return result if out is None else _into(out, result)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
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


def _into(out: Tensor, result: Any, resize: bool = True) -> Any:
    """What ``out=`` and, without ``resize``, an op in place do with a result."""
    if result is NotImplemented or (out.dtype, out.device) != (result.dtype, result.device) or not (resize or out.shape == result.shape):
        return NotImplemented
    return (out if out.shape == result.shape else out.resize_(result.shape)).copy_(result)


def _with_out(kernel: Kernel) -> Kernel:
    return lambda *args, out, **kwargs: _into(out, kernel(*args, **kwargs))


def _in_place(kernel: Kernel) -> Kernel:
    return lambda c, *args, **kwargs: _into(c, kernel(c, *args, **kwargs), resize=False)


_RESULTS: dict[str, Kernel] = {
    "mm": partial(_multiply, dims=(2, 2)), "bmm": partial(_multiply, dims=(3, 3)), "_softmax": _softmax, "_log_softmax": partial(_softmax, log=True)
}
_SUMS: dict[str, Kernel] = {"addmm": partial(_add, dims=(2, 2)), "baddbmm": partial(_add, dims=(3, 3)), "addmv": partial(_add, dims=(2, 1))}
_CHAINS: dict[str, Kernel] = {"linalg_multi_dot": _multi_dot, "chain_matmul": partial(_multi_dot, dims=(2,))}
# Ops that torch composes of others, here of other ones: in its `linear` operands with strides of their own are rounded before the bias, and the
# order of its chains follows the sizes, the number of rows included.
COMPOSED: dict[str, Kernel] = {"linear": _linear, **_CHAINS, **{f"{name}.out": _with_out(kernel) for name, kernel in _CHAINS.items()}}
KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(("dot", "vdot"), partial(_multiply, dims=(1, 1))), **dict.fromkeys(("mean.dim", "mean.out"), _mean),
    "_fused_rms_norm": _rms_norm, "_grouped_mm": _grouped_mm, "_foreach_mm": lambda a, b: [torch.mm(*pair) for pair in zip(a, b, strict=True)],
    **_RESULTS, **_SUMS, **{f"{name}.out": _with_out(kernel) for name, kernel in {**_RESULTS, **_SUMS}.items()},
    **{f"{name}_": _in_place(kernel) for name, kernel in _SUMS.items()},
    **dict.fromkeys(UNCOVERED, _nothing),
}
