"""What the kernels must reach on one H200 (bf16, pages of 64), as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """impl `over` / impl `under` of one workload; at least `least`, or at most `most`."""

    heads: int
    batch: int
    seq_len: int
    over: str
    under: str
    least: float | None = None
    most: float | None = None
    op: str = "decode"

    @property
    def text(self) -> str:
        bound = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"
        return f"{self.op} H={self.heads} B={self.batch} L={self.seq_len}: {self.over} / {self.under} {bound}"


RATIOS: tuple[Ratio, ...] = (
    Ratio(16, 128, 8192, "flashmla", "triton_mla", least=1.0),
    Ratio(16, 128, 8192, "triton_mla", "floor", most=1.15),
    Ratio(16, 1, 8192, "flashmla", "triton_mla", least=1.3),
    Ratio(16, 1, 32768, "flashmla", "triton_mla", least=1.3),
    Ratio(128, 128, 8192, "flashmla", "triton_mla", least=0.5),
    *(
        Ratio(heads, batch, seq_len, "vllm_triton_1", "triton_mla", least=least)
        for heads, least in ((128, 4.0), (16, 3.0))
        for batch in (1, 16, 64, 128)
        for seq_len in (4096, 8192, 32768)
    ),
)

HOST_TIME_US = 40.0
"""Most CPU time of one eager decode call."""
VARIANTS = 6
"""Most compiled kernels of one head count over `host.varying_batches`."""


@dataclass(frozen=True)
class Verdict:
    """One target with what was measured (None: not measured in this run)."""

    text: str
    value: float | None
    reached: bool | None

    def __str__(self) -> str:
        status = {True: "pass", False: "MISS", None: "not measured"}[self.reached]
        value = "" if self.value is None else f"  {self.value:.2f}"
        return f"{status:>12}  {self.text}{value}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdicts(
    rows: Iterable[Mapping[str, Any]],
    host_times: Mapping[str, float] | None = None,
    variants: Mapping[int, Mapping[str, int]] | None = None,
) -> list[Verdict]:
    """Judge every target by result rows, host times (µs by name) and compiled variants (by heads, then kernel)."""
    times = {(r["op"], r["heads"], r["batch"], r["seq_len"], r["impl"]): r["us_median"] for r in rows}
    found = []
    for target in RATIOS:
        over, under = (
            times.get((target.op, target.heads, target.batch, target.seq_len, impl))
            for impl in (target.over, target.under)
        )
        value = over / under if over and under else None
        reached = None
        if value is not None:
            reached = (target.least is None or value >= target.least) and (target.most is None or value <= target.most)
        found.append(Verdict(target.text, value, reached))
    for name in ("triton_mla", "triton_mla reused"):
        us = (host_times or {}).get(name)
        reached = None if us is None else us <= HOST_TIME_US
        found.append(Verdict(f"host time of one eager decode call, {name} <= {HOST_TIME_US:g} us", us, reached))
    for heads, counts in (variants or {}).items():
        total = sum(counts.values())
        found.append(Verdict(f"compiled kernels at H={heads} <= {VARIANTS}", float(total), total <= VARIANTS))
    if not variants:
        found.append(Verdict(f"compiled kernels <= {VARIANTS}", None, None))
    return found
