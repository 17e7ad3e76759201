"""batch_invariant_mode: what it puts in place and takes away again, for whom, and what it refuses to enter."""

import contextlib
import functools
import gc
import threading
import time
from contextlib import ExitStack

import pytest
import torch

from triton_mla import mode
from triton_mla.companion import products
from triton_mla.errors import UnsupportedError
from triton_mla.mode import batch_invariant_mode, disable_batch_invariant_mode, enable_batch_invariant_mode, is_batch_invariant_mode
from triton_mla.testing import assert_bitwise_equal


def registered():
    """All kernels of the ops that the mode touches, for every dispatch key."""
    names = set(torch._C._dispatch_get_all_op_names())
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in (*mode.KERNELS, *mode.COMPOSED, "matmul") if f"aten::{name}" in names}


def switches():
    """Every switch of torch.backends that bears on precision; None where torch refuses to read one."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    readers = {
        "all": lambda: torch.backends.fp32_precision,
        "matmul": lambda: matmul.fp32_precision,
        "mkldnn": lambda: torch.backends.mkldnn.matmul.fp32_precision,
        "conv": lambda: cudnn.conv.fp32_precision,
        "rnn": lambda: cudnn.rnn.fp32_precision,
        "allow_tf32": lambda: matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "fp16": lambda: (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction_split_k),
        "bf16": lambda: (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k),
        "accumulation": lambda: matmul.allow_fp16_accumulation,
        "benchmark": lambda: cudnn.benchmark,
        "deterministic": lambda: cudnn.deterministic,
        "algorithms": torch.are_deterministic_algorithms_enabled,
        "opt_einsum": lambda: torch.backends.opt_einsum.enabled,
    }
    state = {}
    for name, read in readers.items():
        try:
            state[name] = read()
        except RuntimeError:
            state[name] = None
    return state


@pytest.fixture(autouse=True)
def untouched():
    """Whatever a test does, nothing of the mode is left after it."""
    before, settings = registered(), switches()
    yield
    disable_batch_invariant_mode()
    assert registered() == before and switches() == settings
    assert mode._installed is None and not mode._open and not is_batch_invariant_mode()


@pytest.fixture
def pair(device):
    """Operands [5, 32] and [32, 7]."""
    chance = torch.Generator().manual_seed(0)
    return torch.randn(5, 32, generator=chance).to(device), torch.randn(32, 7, generator=chance).to(device)


def test_on_and_off(pair, calls):
    a, b = pair
    before, plain = registered(), a @ b
    assert not calls
    with batch_invariant_mode():
        assert is_batch_invariant_mode() and registered() != before
        invariant = a @ b
        assert [name for _, name in calls] == ["matmul"]
    assert not is_batch_invariant_mode() and registered() == before
    assert_bitwise_equal(a @ b, plain)
    assert len(calls) == 1
    assert_bitwise_equal(invariant, products.matmul(a, b))


def test_an_exception_leaves_no_override(pair, calls):
    before, settings = registered(), switches()
    with pytest.raises(KeyError), batch_invariant_mode():
        assert registered() != before and switches() != settings
        raise KeyError("the caller's own")
    assert registered() == before and switches() == settings
    torch.mm(*pair)
    assert not calls


def test_levels_nest(pair, calls):
    """True, False, True: each level gives back what was before it."""
    before, plain = registered(), torch.mm(*pair)

    def invariant():
        calls.clear()
        result = torch.mm(*pair)
        if not calls:
            assert_bitwise_equal(result, plain)
        return bool(calls), is_batch_invariant_mode()

    with batch_invariant_mode():
        assert invariant() == (True, True)
        with batch_invariant_mode(False):
            assert invariant() == (False, False) and registered() == before
            with batch_invariant_mode(strict=True):
                assert invariant() == (True, True)
                with pytest.raises(UnsupportedError):
                    torch.mm(*[t.double() for t in pair])
            assert invariant() == (False, False) and registered() == before
        assert invariant() == (True, True)
        torch.mm(*[t.double() for t in pair])  # this level is not strict
    assert invariant() == (False, False)


def test_levels_left_in_another_order(pair, calls):
    first, second = ExitStack(), ExitStack()
    first.enter_context(batch_invariant_mode())
    second.enter_context(batch_invariant_mode(False))
    first.close()
    assert not is_batch_invariant_mode()
    third = ExitStack()
    third.enter_context(batch_invariant_mode())
    second.close()
    torch.mm(*pair)
    assert len(calls) == 1
    third.close()


def test_a_decorator(pair, calls):
    invariant = batch_invariant_mode()(torch.mm)
    for i in range(2):
        invariant(*pair)
        assert len(calls) == i + 1 and not is_batch_invariant_mode()


async def coroutine():
    pass


def generator():
    yield


async def async_generator():
    yield


class Calls:
    async def __call__(self):
        pass


SUSPENDED = [coroutine, generator, async_generator, functools.partial(coroutine), contextlib.contextmanager(generator), Calls()]


@pytest.mark.parametrize("function", [*SUSPENDED, Calls, 3])
def test_a_decorator_of_what_it_cannot_cover(function):
    with pytest.raises(ValueError, match="function=.* must be a plain function"):
        batch_invariant_mode()(function)


def test_one_object_many_times(pair, calls):
    """After itself, within itself, and within another level within itself."""
    invariant, plain = batch_invariant_mode(), batch_invariant_mode(False)
    for _ in range(2):
        with invariant:
            with invariant, plain:
                with invariant:
                    assert is_batch_invariant_mode()
                    torch.mm(*pair)
                assert not is_batch_invariant_mode()
            assert is_batch_invariant_mode()
            in_thread(lambda: invariant(torch.mm)(*pair))
        assert not is_batch_invariant_mode()
    assert len(calls) == 4
    with pytest.raises(RuntimeError, match="without having been entered"):
        invariant.__exit__(None, None, None)


def test_a_generator_that_another_thread_closes(pair, calls):
    before = registered()

    def steps():
        with batch_invariant_mode():
            yield

    suspended = steps()
    next(suspended)
    assert is_batch_invariant_mode()
    in_thread(suspended.close)
    assert not is_batch_invariant_mode() and registered() == before


def in_thread(work):
    """The result of a function in a thread of its own; an exception of it is raised here."""
    result = []

    def run():
        try:
            result.append((work(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    value, error = result[0]
    if error is not None:
        raise error
    return value


def test_a_level_is_its_threads_own(pair, calls):
    plain = torch.mm(*pair)

    def outside():
        assert not is_batch_invariant_mode()
        return torch.mm(*pair)

    with batch_invariant_mode(strict=True):
        assert_bitwise_equal(in_thread(outside), plain)
        in_thread(lambda: torch.mm(*[t.double() for t in pair]))
        assert not calls
        torch.mm(*pair)
        assert [ident for ident, _ in calls] == [threading.get_ident()]


def test_two_threads_whose_levels_overlap(pair, calls):
    """The first to leave takes nothing from the other; the last one restores."""
    before, entered, left = registered(), threading.Event(), threading.Event()

    def other():
        with batch_invariant_mode():
            entered.set()
            assert left.wait(60)
            torch.mm(*pair)
            return threading.get_ident(), registered() != before

    with ExitStack() as stack:
        stack.enter_context(batch_invariant_mode())
        worker = []
        thread = threading.Thread(target=lambda: worker.append(other()))
        thread.start()
        assert entered.wait(60)
    assert not is_batch_invariant_mode()
    torch.mm(*pair)
    left.set()
    thread.join(60)
    (ident, installed), = worker
    assert installed and [who for who, _ in calls] == [ident]
    assert registered() == before


def test_switching_while_others_compute(pair):
    """Lookups of torch take no lock: a kernel that was taken away under a call must not be freed under it."""
    plain, stop, failures = torch.mm(*pair), threading.Event(), []

    def compute():
        while not stop.is_set():
            if not torch.equal(torch.mm(*pair), plain):
                failures.append("other bits")

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        with batch_invariant_mode():
            torch.mm(*pair)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_for_the_whole_process(pair, calls):
    enable_batch_invariant_mode()
    in_thread(lambda: torch.mm(*pair))
    torch.mm(*pair)
    assert len(calls) == 2 and is_batch_invariant_mode()
    with batch_invariant_mode(False):
        torch.mm(*pair)
        assert len(calls) == 2 and not is_batch_invariant_mode()
        in_thread(lambda: torch.mm(*pair))
    assert len(calls) == 3
    enable_batch_invariant_mode(strict=True)
    with pytest.raises(UnsupportedError):
        torch.mm(*[t.double() for t in pair])
    with batch_invariant_mode():
        disable_batch_invariant_mode()
        torch.mm(*pair)
        assert is_batch_invariant_mode()
    assert len(calls) == 4 and not is_batch_invariant_mode()
    disable_batch_invariant_mode()


def test_torchs_own_errors_stay(device):
    x = torch.randn(4, 16, device=device)
    ids = torch.zeros(3, dtype=torch.long, device=device)
    calls = (lambda: x @ x, lambda: torch.mm(x, x.t().half()), lambda: torch.mm(x[0], x), lambda: torch.addmm(x, x, x.t()), lambda: torch.bmm(x, x),
             lambda: ids.float().mean(3), lambda: x.mean((0, -2)), lambda: x.softmax(2), lambda: x.log_softmax(-3), lambda: ids.mean(),
             lambda: torch.linalg.multi_dot([x]), lambda: torch.linalg.multi_dot([x, x.t(), x.t()]), lambda: torch.linalg.multi_dot([x, x.t().half()]),
             lambda: torch.linalg.multi_dot([x, x[0], x[0]]), lambda: torch.chain_matmul(x[0], x.t()),
             lambda: torch.nn.functional.linear(x, x[:, :3]), lambda: torch.dot(x[0], x[0, :3]),
             lambda: torch.mm(x, x.t(), out=torch.empty(4, 4, device=device, dtype=torch.int64)))
    for call in calls:
        with pytest.raises((RuntimeError, IndexError)) as plain:
            call()
        with batch_invariant_mode(strict=True), pytest.raises(plain.type):
            call()


def test_wrong_arguments():
    for call in (lambda: batch_invariant_mode(1), lambda: batch_invariant_mode(strict="yes"), lambda: enable_batch_invariant_mode(strict=None)):
        with pytest.raises(ValueError, match="must be True or False"):
            call()


def test_nowhere_to_run(monkeypatch):
    monkeypatch.setattr(mode, "INTERPRETED", False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"), batch_invariant_mode():
        pass
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        enable_batch_invariant_mode()
    assert not is_batch_invariant_mode()
    with batch_invariant_mode(False):
        pass


def test_another_librarys_override(device, calls):
    """It is under that of the mode, answers what the mode does not, and is there afterwards."""
    ones = torch.ones(3, device=device)
    with torch.library._scoped_library("aten", "IMPL") as theirs:
        theirs.impl("vdot", lambda a, b: a.new_zeros(()), device.type.upper())
        before, names = registered(), set(torch.library._impls)
        with batch_invariant_mode():
            assert float(torch.vdot(ones, ones)) == 3 and len(calls) == 1
            assert float(torch.vdot(ones.double(), ones.double())) == 0
            assert in_thread(lambda: float(torch.vdot(ones, ones))) == 0
        assert registered() == before and torch.library._impls == names
        assert float(torch.vdot(ones, ones)) == 0
    assert float(torch.vdot(ones, ones)) == 3


def test_no_library_stays():
    def libraries():
        gc.collect()
        return sum(type(thing) is torch.library.Library for thing in gc.get_objects())

    with batch_invariant_mode():
        pass
    before, names = libraries(), set(torch.library._impls)
    for _ in range(3):
        with batch_invariant_mode():
            assert libraries() == before + 1 and torch.library._impls > names
    assert libraries() == before and torch.library._impls == names


def test_kernels_are_kept_for_a_while_only(monkeypatch):
    monkeypatch.setattr(mode, "_retired", type(mode._retired)())
    for _ in range(3):
        with batch_invariant_mode():
            pass
    assert len(mode._retired) == 3
    monkeypatch.setattr(mode, "GRACE", -1.0)
    with batch_invariant_mode():
        pass
    assert not mode._retired


def newer_tf32():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def mixed():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"


def inherited():
    torch.backends.fp32_precision = "tf32"


def all_off():
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, True)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True


@pytest.mark.parametrize("prepare", [lambda: None, lambda: torch.set_float32_matmul_precision("medium"), newer_tf32, mixed, inherited, all_off],
                         ids=["defaults", "medium", "tf32", "mixed", "inherited", "off"])
def test_switches_are_set_and_restored(prepare):
    matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn.matmul
    default = [(holder, name, getattr(holder, name)) for holder, name in
               ((torch.backends, "fp32_precision"), (matmul, "fp32_precision"), (mkldnn, "fp32_precision"), (cudnn.conv, "fp32_precision"),
                (cudnn.rnn, "fp32_precision"), (cudnn, "benchmark"), (matmul, "allow_bf16_reduced_precision_reduction"),
                (matmul, "allow_fp16_reduced_precision_reduction"))]
    try:
        prepare()
        before = switches()
        with batch_invariant_mode():
            within = switches()
            assert within["matmul"] == within["mkldnn"] == within["conv"] == within["rnn"] == "ieee"
            assert within["allow_tf32"] in (False, None) and within["cudnn.allow_tf32"] in (False, None)
            assert within["fp16"] == within["bf16"] == (False, False) and within["accumulation"] is False
            assert (within["benchmark"], within["deterministic"], within["opt_einsum"]) == (False, True, False)
            assert (within["all"], within["algorithms"]) == (before["all"], before["algorithms"])
            with batch_invariant_mode(False):
                assert switches() == before
            assert switches() == within
        assert switches() == before
        if prepare is inherited:  # still inherited, and not merely equal
            torch.backends.fp32_precision = "ieee"
            assert matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = True
        for setting in default:
            setattr(*setting)


def test_compiled_functions_run_eagerly(pair, calls):
    runs = []

    def backend(graph, _inputs):
        def run(*args):
            runs.append(1)
            return graph(*args)

        return run

    compiled = torch.compile(lambda a, b: torch.mm(a, b).relu(), backend=backend)
    plain = compiled(*pair)
    assert len(runs) == 1 and not calls
    with batch_invariant_mode():
        assert_bitwise_equal(compiled(*pair), products.matmul(*pair).relu())
        assert len(runs) == 1 and len(calls) == 2
        with batch_invariant_mode(False):
            assert_bitwise_equal(compiled(*pair), plain)
            assert len(runs) == 2
    assert_bitwise_equal(compiled(*pair), plain)
    assert len(runs) == 3 and len(calls) == 2


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("enter", ["context", "object", "decorated", "enable"])
def test_entering_within_a_compiled_function_is_an_error(pair, enter, fullgraph):
    """torch says so itself where it may not leave anything to Python."""
    level = batch_invariant_mode()

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def entering(a, b):
        a = a + 1
        if enter == "enable":
            enable_batch_invariant_mode()
            return torch.mm(a, b)
        if enter == "decorated":
            return level(torch.mm)(a, b)
        with level if enter == "object" else batch_invariant_mode():
            return torch.mm(a, b)

    with pytest.raises(RuntimeError, match="" if fullgraph else "was entered in a function that torch compiles"):
        entering(*pair)
    assert not is_batch_invariant_mode()


def test_gradients(device, calls):
    """Those of torch, through products in the mode."""
    chance = torch.Generator().manual_seed(1)
    x, w, bias = (torch.randn(*shape, generator=chance).to(device).requires_grad_() for shape in ((3, 2, 16), (8, 16), (8,)))

    def gradients():
        y = torch.nn.functional.linear(x.transpose(0, 1), w, bias)
        z = (y @ y.transpose(1, 2)).softmax(-1) + y.mean(-1, keepdim=True).log_softmax(0)
        z = z * torch.nn.functional.rms_norm(y, (8,), bias).sum(-1, keepdim=True)
        return torch.autograd.grad(z.square().sum(), (x, w, bias))

    expected = gradients()
    assert not calls
    with batch_invariant_mode():
        actual = gradients()
    assert {"matmul", "linear", "softmax", "log_softmax", "mean"} <= {name for _, name in calls}
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
