"""What the kernels must reach on one H200 (bf16, pages of 64), as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.prefill import CONTINUED, PROMPTS
from benchmarks.registry import AIMED, MIXED, STEPS
from benchmarks.report import by_workload
from benchmarks.workloads import decode, verify

BEST_PEERS = ("flashmla", "fa3_mla_auto")


@dataclass(frozen=True)
class Ratio:
    """The least time of the implementations `over` on one workload / the time of `under`; at least `least`, or at most `most`.

    `under` is of the workload `of`, where that is another one.
    """

    workload: str
    over: tuple[str, ...]
    under: str
    least: float | None = None
    most: float | None = None
    of: str = ""

    @property
    def text(self) -> str:
        bound = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"
        return f"{self.workload}: {' or '.join(self.over)} / {self.under}{self.of and f' of {self.of}'} {bound}"

    def value(self, times: Mapping[str, Mapping[str, float]]) -> float | None:
        """The ratio; None where one of its times is not there."""
        over = [times.get(self.workload, {}).get(impl) for impl in self.over]
        under = times.get(self.of or self.workload, {}).get(self.under)
        found = [us for us in over if us]
        return min(found) / under if under and len(found) == len(over) else None

    def reached(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def faster(workload: Any, *over: str, least: float) -> Ratio:
    """This package takes at most 1 / least of the time of the fastest of the others."""
    return Ratio(workload.name, over, "triton_mla", least=least)


def within(workload: Any, under: str, most: float) -> Ratio:
    """This package takes at most `most` times as long."""
    return Ratio(workload.name, ("triton_mla",), under, most=most)


FULL16 = [decode(16, 128, n) for n in (4096, 8192, 32768)]
RATIOS: tuple[Ratio, ...] = (
    *(faster(w, *BEST_PEERS, least=1.0) for w in (*AIMED, *MIXED)),
    *(within(w, "floor", 1.06) for w in FULL16),
    *(faster(w, "fa3_mla_1", least=7.0) for w in AIMED if w.batch == 1),
    *(faster(w, "vllm_triton_1", least={16: 3.0, 128: 8.0}[w.heads]) for w in AIMED if w.heads != 64),
    *(within(w, "triton_mla_adaptive", 1.05) for w in (*AIMED, *MIXED)),
    # The core's, which stay.
    faster(decode(16, 128, 8192), "flashmla", least=1.0),
    within(decode(16, 128, 8192), "floor", 1.15),
    *(faster(decode(16, 1, n), "flashmla", least=1.3) for n in (8192, 32768)),
    faster(decode(128, 128, 8192), "flashmla", least=0.5),
    *(faster(w, "vllm_triton_1", least=4.0) for w in AIMED if w.heads == 128 and w.batch != 4),
    *(
        Ratio(verify(h, b, 8192, 4).name, ("triton_mla",), "triton_mla", most=1.25, of=decode(h, b, 8192).name)
        for h, b in STEPS
        if h == 16
    ),
    *(faster(p, "fa3", least=least) for p, least in zip(PROMPTS, (1.03, 1.1, 1.0, 1.08), strict=True)),
    *(faster(p, fa3, least=1.0) for p in CONTINUED for fa3 in ("fa3", "fa3_cat")),
    *(faster(p, "cudnn", least=0.9) for p in (PROMPTS[0], PROMPTS[2])),
    *(Ratio(p.name, ("triton_mla_streamed",), "triton_mla", most=1.1) for p in CONTINUED if p.length == 32768),
)

HOST_TIME_US = 20.0
"""Most CPU time of one eager decode call."""
VARIANTS = 8
"""Most compiled kernels of one head count over `host.varying_batches`."""


@dataclass(frozen=True)
class Verdict:
    """One target with what was measured (None: not measured in this run)."""

    text: str
    value: float | None
    reached: bool | None

    def __str__(self) -> str:
        status = {True: "met", False: "MISSED", None: "not measured"}[self.reached]
        value = "" if self.value is None else f"  {self.value:.2f}"
        return f"{status:>12}  {self.text}{value}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdicts(
    rows: Iterable[Mapping[str, Any]],
    host_times: Mapping[str, float] | None = None,
    variants: Mapping[int, Mapping[str, int]] | None = None,
) -> list[Verdict]:
    """Judge the targets of the workloads that result rows have, host times (µs by name), and compiled variants (by heads, then kernel)."""
    times = by_workload(rows)
    found = []
    for target in RATIOS:
        if target.workload in times:
            value = target.value(times)
            found.append(Verdict(target.text, value, None if value is None else target.reached(value)))
    for name, us in (host_times or {}).items():
        if name.startswith("triton_mla"):
            found.append(Verdict(f"host time of one eager decode call, {name} <= {HOST_TIME_US:g} us", us, us <= HOST_TIME_US))
    for heads, counts in (variants or {}).items():
        total = sum(counts.values())
        found.append(Verdict(f"compiled kernels at H={heads} <= {VARIANTS}", float(total), total <= VARIANTS))
    return found
