"""What a launch hook changes: it sees every launch, and what was compiled for it is not kept."""

from types import SimpleNamespace

import pytest
from triton import knobs

from triton_mla import launch


class Kernel:
    __name__ = "kernel"

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        def made(*args, **options):
            self.log.append("ordinary")
            return SimpleNamespace(run=lambda *arguments: self.log.append("short"), function=1, packed_metadata=None)

        return made


@pytest.fixture
def make(monkeypatch):
    """make() launches one kernel; the log says in which way."""
    log = []
    kernel = Kernel(log)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})

    def one():
        launch.launch(kernel, (), (1, 1), (), {}, {})
        return log[-1]

    return one


def test_a_second_launch_takes_the_short_way(make):
    assert [make(), make()] == ["ordinary", "short"] and not launch.hooked()


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("hook", ["function", "chain"])
def test_a_hook_sees_every_launch(make, monkeypatch, name, hook):
    make()
    monkeypatch.setattr(knobs.runtime, name, (lambda metadata: None) if hook == "function" else SimpleNamespace(calls=[print]))
    assert launch.hooked() and [make(), make()] == ["ordinary", "ordinary"]
    monkeypatch.setattr(knobs.runtime, name, None if hook == "function" else SimpleNamespace(calls=[]))
    assert not launch.hooked() and make() == "short"


def test_what_was_compiled_under_a_hook_is_not_kept(make, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    make()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    assert [make(), make()] == ["ordinary", "short"]
