"""One row of a run: a scenario or a control of a model whose prompts take one form."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from determinism import tensor_parallel
from determinism.compare import Comparison
from determinism.controls import Control, controls
from determinism.models import MODELS, Build
from determinism.report import Row
from determinism.scenarios import FORMS, SCENARIOS, SIZES, Bench, Scenario, Sizes


@dataclass(frozen=True)
class Plan:
    """What is run. ranks: processes that the model is split over, each on a GPU of its own or all on the CPU.

    Raises ValueError: no model has that name, or it is not split over so many.
    """

    model: str
    device: torch.device
    quick: bool
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r} must be one of {', '.join(MODELS)}")
        if self.ranks not in tensor_parallel.DEGREES:
            raise ValueError(f"ranks={self.ranks!r} must be one of {', '.join(map(str, tensor_parallel.DEGREES))}")
        if self.ranks > 1 and self.model != "small":
            raise ValueError(f"model={self.model!r} must be small: no other one is split over ranks={self.ranks}")

    @property
    def backend(self) -> str:
        """What carries tensors between ranks."""
        return "gloo" if self.device.type == "cpu" else "nccl"

    def on_rank(self, rank: int) -> Plan:
        """The plan with that rank's device."""
        return self if self.device.type == "cpu" else replace(self, device=torch.device("cuda", rank))

    def build(self) -> Build:
        """Makes the model, or this rank's part of it."""
        return MODELS[self.model](self.device) if self.ranks == 1 else tensor_parallel.split(self.device, self.ranks)

    @property
    def sizes(self) -> Sizes:
        """Of the requests."""
        return SIZES[self.device.type, self.quick]

    def all_items(self) -> dict[tuple[str, str], Scenario | Control]:
        """Scenarios and controls by name and form."""
        found: dict[tuple[str, str], Scenario | Control] = {
            (scenario.name, form): scenario
            for form in FORMS for scenario in SCENARIOS if form in scenario.forms and not (scenario.alone and self.ranks > 1)
        }
        ours = controls(self.model, self.device) if self.ranks == 1 else tensor_parallel.controls(self.device, self.ranks)
        return found | {(control.name, control.form): control for control in ours if self.model in control.models}

    def items(self, names: Sequence[str] | None) -> list[tuple[str, str]]:
        """(name, form) of what is to be run; None takes everything, and names without a control among them take all controls.

        Raises ValueError: nothing has such a name.
        """
        found = self.all_items()
        known = dict.fromkeys(name for name, _ in found)
        for name in names or ():
            if name not in known:
                raise ValueError(f"scenarios={name!r} must be one of: {', '.join(known)}")
        asked = set(known if names is None else names)
        controls = {name for (name, _), item in found.items() if isinstance(item, Control)}
        return [item for item in found if item[0] in (asked if asked & controls else asked | controls)]


@lru_cache(maxsize=2)
def bench_of(plan: Plan, form: str) -> Bench:
    """The model and the reference that all rows of a form share in a process."""
    return Bench(plan.build(), form, plan.sizes)


def run_row(plan: Plan, name: str, form: str) -> Row:
    """Runs a scenario or a control. One that breaks has failed; its row says why."""
    item = plan.all_items()[name, form]
    if isinstance(item, Control) and item.gpu and plan.device.type == "cpu":
        return Row("control", name, form, "skipped", detail="needs a GPU")
    start = time.perf_counter()
    total, problem = Comparison(), ""
    try:
        with interpreter(plan.device):
            bench = bench_of(plan, form)
            parts = list(item.body(bench))
        total = sum(parts, Comparison())
        problem = _problem(item, parts, total)
    except Exception as error:  # the other rows still run
        problem = f"{type(error).__name__}: {error}"
    return Row.of(_kind(item), name, form, total, problem, time.perf_counter() - start)


def lost_row(plan: Plan, name: str, form: str, error: BaseException) -> Row:
    """The row of a process that ended before it gave one."""
    return Row(_kind(plan.all_items()[name, form]), name, form, "failed", detail=f"{type(error).__name__}: {error}")


def _kind(item: Scenario | Control) -> Literal["scenario", "control"]:
    return "scenario" if isinstance(item, Scenario) else "control"


def _problem(item: Scenario | Control, parts: Sequence[Comparison], total: Comparison) -> str:
    """Why a row has failed; "" where it has not."""
    if isinstance(item, Control):
        return "" if parts and all(part.differing for part in parts) else "no bit differs"
    if total.differing:
        return "bits differ"
    happened = dict(total.events)
    missing = [event for event in item.needs if not happened.get(event)]
    return f"it had no {', '.join(missing)}" if missing else "" if total.rows else "nothing was compared"


@contextlib.contextmanager
def interpreter(device: torch.device) -> Iterator[None]:
    """On a CPU: the interpreter with a matrix product that means something for bits."""
    if device.type != "cpu":
        yield
        return
    from triton_mla.verification.interpreter import patched_once, tensor_core_dot

    with tensor_core_dot(), patched_once(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of -inf - -inf in lanes that no result comes from
        yield
