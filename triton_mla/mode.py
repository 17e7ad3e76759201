"""`batch_invariant_mode`: torch's own products, softmaxes, means and RMS norms answered by the package's batch-invariant kernels.

Covered, for strided fp16, bf16 and fp32 tensors on a CUDA device, and under Triton's interpreter on the CPU too:

- ``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``addmv``, ``dot``, ``vdot``, in place and with ``out=``, ``_foreach_mm`` and ``linear``; and all that
  torch makes of them: ``@``, ``matmul``, ``mv``, ``addbmm``, ``einsum``, ``inner``, ``tensordot``, `torch.nn.Linear`
- ``linalg.multi_dot`` and ``chain_matmul``, from the left: torch's own order follows the sizes, the number of rows among them. So does that of
  opt_einsum, which the mode switches off: an ``einsum`` of three operands or more is contracted from the left too
- ``_grouped_mm`` of rows [S, K] by matrices [E, K, N], and of batches
- ``softmax``, ``log_softmax`` (so also cross entropy), ``mean`` over any dimensions, ``rms_norm``

A product with an added bias [N], as of ``linear``, is rounded once. Any other addend, and any scaling (``alpha``, ``beta``), follow after the
product was rounded to its dtype: product and addend are scaled, each rounded to fp32, their sum is rounded to fp32, and that to the dtype. So in
fp16 a product above 65504 is inf whatever ``alpha`` is, where torch scales before it rounds: scale an operand instead. What no batch changes are
the rows of the left operand; docs/numerics.md tells when a batch in the right one shows.

Not covered, and refused by ``strict``: the above with other dtypes, with sparse or nested tensors, or with another ``out_dtype``; products of
scaled, packed or structured-sparse operands; convolutions by any name; ``cdist``, ``bilinear``; recurrent layers where one kernel does them, as
those of cuDNN; the fused kernels of ``scaled_dot_product_attention``. `uncovered.UNCOVERED` lists them. ``_int_mm`` is exact in any order and left
alone. Not covered, and not seen, is every other op, among them sums, norms, ``logsumexp``, ``layer_norm``, decompositions, solvers and FFTs.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from .errors import UnsupportedError
from .launch import INTERPRETED
from .mode_kernels import COMPOSED, KERNELS, Kernel, Missing, nothing
from .switches import switches

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Kernel)


def batch_invariant_mode(enabled: bool = True, *, strict: bool = False) -> _Mode:
    """A context, or a decorator, in which this thread's torch ops of the kinds above have batch-invariant kernels.

    It holds for the thread that entered it, and not for threads that this one starts; `enable_batch_invariant_mode` is for all of a process. It
    does not follow a coroutine or a generator: one that is suspended within a level leaves it on for whatever its thread does next. Levels nest:
    the innermost decides, and leaving it, by an exception too, gives back what was before. One object may be entered any number of times, within
    itself too. After the last level, in whichever thread, the kernels of torch are as they were. Gradients are torch's own formulas, whose
    products are covered if the mode holds in the thread that computes them: of CUDA tensors one of autograd's own, which only
    `enable_batch_invariant_mode` reaches.

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
        ValueError: an argument is wrong; on entering, that torch has no CUDA and the interpreter is off; on decorating, that the function is a
            coroutine's or a generator's, of which a level would cover no more than the creation.
        RuntimeError: on entering, that the caller is being compiled; on leaving, that it was not entered.
        UnsupportedError: in the mode, if ``strict``, naming the op and what it has no kernel for. It is a ValueError.
    """
    return _Mode(_checked(enabled, strict))


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


class _Mode(ContextDecorator):
    """Enters and leaves a level."""

    def __init__(self, level: _Level) -> None:
        self._level = level

    def __enter__(self) -> None:
        _refuse_compilation()
        levels: list[_Level] = _thread.__dict__.setdefault("levels", [])
        with _lock:
            levels.append(self._level)
            _open[id(levels)] = levels
            try:
                _install_or_remove()
            except BaseException:
                self._remove(levels)
                raise

    def __exit__(self, *_: object) -> None:
        with _lock:
            own: list[_Level] = _thread.__dict__.get("levels", [])
            levels = next((some for some in (own, *_open.values()) if self._level in some), None)  # another thread may close a generator
            if levels is None:
                raise RuntimeError("batch_invariant_mode was left without having been entered")
            self._remove(levels)

    def _remove(self, levels: list[_Level]) -> None:
        """The last of this object's levels there."""
        del levels[len(levels) - 1 - levels[::-1].index(self._level)]
        if not levels:
            del _open[id(levels)]
        _install_or_remove()

    def __call__(self, function: F) -> F:
        if inspect.isclass(function) or not callable(function) or _suspends(function):
            raise ValueError(f"function={function!r} must be a plain function: of a coroutine or a generator a decorator covers no more than the creation; "
                             "enter batch_invariant_mode within it, around what does not await or yield")
        return super().__call__(function)


def _suspends(function: Any) -> bool:
    """Whether a call makes a coroutine or a generator, behind wrappers, `functools.partial` and objects with ``__call__``."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    if not inspect.isroutine(function):
        function = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch's. Left to Python, it finds that its callers are compiled.
def _refuse_compilation() -> None:
    if torch.compiler.is_compiling() or get_eval_frame_callback():
        raise RuntimeError("batch_invariant_mode was entered in a function that torch compiles; enter it around the call, which then runs eagerly")


def _set_default(level: _Level) -> None:
    global _default
    _refuse_compilation()
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
            which = [entry for device in devices for entry in _overridden(device)]
            # all before any is overridden: with a kernel for the device, torch takes another one for gradients
            originals = [torch.library.get_kernel(f"aten::{name}", key) for name, key, _ in which]
            ours = [_override(library, *entry, original) for entry, original in zip(which, originals, strict=True)]
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
                yield name, f"{layout}{device}", nothing
    for name, kernel in COMPOSED.items():  # a kernel for the device alone would cut off gradients
        yield name, device, kernel
        yield name, f"Autograd{device}", kernel


def _override(library: torch.library.Library, name: str, key: str, kernel: Kernel, original: Any) -> Any:
    """Put a kernel in the place of torch's, to which it gives what it cannot do, and all calls of threads without the mode."""

    def run(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        level = _level()
        if level.enabled:
            try:
                result = kernel(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            except Missing as missing:
                _refuse_or_log(name, key, str(missing), level.strict)
        return original.call_boxed(keyset, *args, **kwargs)

    entry = f"aten/{name}/{key}"
    theirs = entry in torch.library._impls  # torch has overrides of this kind itself, and their entry must not go with ours
    library.impl(name, run, key, with_keyset=True, allow_override=True)
    if theirs:
        library._op_impls.discard(entry)
    return torch.library.get_kernel(f"aten::{name}", key)


def _refuse_or_log(name: str, key: str, what: str, strict: bool) -> None:
    if strict:
        reasons = {"batch-invariant kernels": (f"none for {what} ({key})",)}
        raise UnsupportedError(f"aten::{name} was called in batch_invariant_mode(strict=True)", reasons) from None
    if (name, key, what) not in _logged:
        _logged.add((name, key, what))
        logger.warning("aten::%s has no batch-invariant kernel for %s (%s); it runs as without batch_invariant_mode, and its rows may depend on the batch",
                       name, what, key)
