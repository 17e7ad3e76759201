"""Engines measured side by side: turns, those that end or are late, and what is made of the windows."""

import contextlib
import math
import os
import threading
import time
from multiprocessing import Pipe

import pytest

from determinism import vllm_throughput
from determinism.vllm_throughput import SITTINGS, fastest_core, measure, speed


def answering(asked, name, seconds, *, ends_after=None, silent_after=None):
    """A channel to a thread that answers, until it ends or falls silent."""
    ours, theirs = Pipe()

    def answer():
        count = 0
        with contextlib.suppress(EOFError):
            while count != ends_after:
                command = theirs.recv()
                asked.append((name, *command))
                count += 1
                if silent_after is None or count <= silent_after:
                    theirs.send({"begin": 1.0, "window": seconds, "end": None}[command[0]])
        theirs.close()

    threading.Thread(target=answer, daemon=True).start()
    return ours


@pytest.fixture
def cells(monkeypatch):
    monkeypatch.setattr(vllm_throughput, "CELLS", {(4096, 2): 3})
    monkeypatch.setattr(vllm_throughput, "fastest_core", lambda: 0)


def test_engines_take_turns_and_none_is_always_the_first(cells):
    asked = []
    found = measure({name: answering(asked, name, 0.032 * (i + 1)) for i, name in enumerate("ab")}, time.monotonic() + 30)
    sitting = [("a", "begin", 4096, 2, 0), ("b", "begin", 4096, 2, 0), *[(name, "window", 0) for name in "abbaab"], ("a", "end"), ("b", "end")]
    assert asked == sitting * SITTINGS
    run = found["b"]["4096 x 2"]["run"]
    assert found["a"]["4096 x 2"] == {"run": run, "tokens_per_second": 2000.0, "ms_per_step": 1.0, "ms_quartiles": [1.0, 1.0], "prefill_seconds": 1.0,
                                      "prefills": [1.0] * SITTINGS, "windows_ms_per_step": [1.0] * 3 * SITTINGS}
    assert speed(found["a"]["4096 x 2"], found["b"]["4096 x 2"])["median"] == 2


def test_an_engine_that_ends_is_left_out(cells):
    assert set(measure({"a": answering([], "a", 1.0), "b": answering([], "b", 1.0, ends_after=2)}, time.monotonic() + 30)) == {"a"}


def test_what_an_engine_did_before_it_ended_stays(cells):
    found = measure({"a": answering([], "a", 1.0), "b": answering([], "b", 2.0, ends_after=7)}, time.monotonic() + 30)
    a, b = found["a"]["4096 x 2"], found["b"]["4096 x 2"]
    assert (len(b["prefills"]), b["windows_ms_per_step"][:3]) == (2, [62.5] * 3) and speed(a, b) == {"median": 2.0, "interval": [2.0, 2.0], "rounds": 4}


def test_an_engine_that_does_not_answer_is_not_waited_for(cells):
    begun = time.monotonic()
    assert measure({"a": answering([], "a", 1.0, silent_after=2)}, begun + 0.5) == {}
    assert time.monotonic() - begun < 10


def test_a_speed_is_of_rounds_that_both_engines_have():
    own, other = ({"run": "one", "windows_ms_per_step": steps} for steps in ([1.0, 2.0, None, 4.0], [2.0, 2.0, 9.0, 2.0]))
    assert speed(own, other) == {"median": 1.0, "interval": [0.5, 2.0], "rounds": 3}
    assert speed(own, {"run": "one", "windows_ms_per_step": [None, None, 1.0, None]}) == {}
    assert speed(own, {**other, "run": "another"}) == {}


@pytest.mark.parametrize("count", [6, 12, 40, 100])
def test_an_interval_holds_the_median_as_often_as_it_says(count):
    """It reaches from one rank to the one as far from the end. The median lies below a rank r when fewer than r values are below the median."""
    own, other = ({"run": "one", "windows_ms_per_step": steps} for steps in ([1.0] * count, [float(i) for i in range(count)]))
    low, high = speed(own, other)["interval"]
    rank = int(low) + 1
    assert high == count - rank and speed(own, other)["median"] == (count - 1) / 2
    outside = 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
    assert outside <= 0.05


def test_the_fastest_core_is_found_and_all_are_given_back(monkeypatch):
    on, all_cores = [], {0, 1, 2}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: all_cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: on.append(set(cores)))
    assert fastest_core(lambda: (0.3, 0.1, 0.2)[next(iter(on[-1]))]) == 1
    assert on == [{0}, {1}, {2}, all_cores]
