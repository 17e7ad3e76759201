"""Results of a run of the model: plain data, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from determinism.compare import Comparison
from triton_mla.cli.text import columns


@dataclass(frozen=True)
class Row:
    """A scenario or a control. `compared` counts (request, token) rows of log-probabilities; the other figures are those of `Comparison`."""

    kind: Literal["scenario", "control"]
    name: str
    form: str
    status: Literal["passed", "failed", "skipped"]
    compared: int = 0
    differing: int = 0
    first: tuple[str, int] | None = None
    max_delta: float = 0.0
    seconds: float = 0.0
    detail: str = ""
    events: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: Literal["scenario", "control"], name: str, form: str, comparison: Comparison, problem: str, seconds: float) -> Row:
        """A row that has run; problem: why it failed, "" where it passed."""
        return cls(
            kind, name, form, "failed" if problem else "passed", comparison.rows, comparison.differing, comparison.first, comparison.max_delta,
            round(seconds, 2), problem, dict(comparison.events),
        )


@dataclass
class Report:
    """Evidence of one run: `environment` has versions and device, `config` the model's sizes, `fingerprint` all that may change bits, `sources` the files."""

    model: str
    sizes: str
    environment: dict[str, Any]
    config: dict[str, str]
    fingerprint: dict[str, Any]
    source_digest: str
    sources: dict[str, str]
    created: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, kind: str) -> list[Row]:
        """The scenarios, or the controls."""
        return [row for row in self.rows if row.kind == kind]

    @property
    def compared(self) -> int:
        """(request, token) rows that scenarios compared with the reference."""
        return sum(row.compared for row in self.of("scenario") if row.name not in UNCOUNTED)

    @property
    def differing(self) -> int:
        """Of these, the rows in which some bit differed."""
        return sum(row.differing for row in self.of("scenario") if row.name not in UNCOUNTED)

    @property
    def passed(self) -> bool:
        """True when nothing failed, a scenario and a control passed, and rows of log-probabilities were compared."""
        ran = all(any(row.status == "passed" for row in self.of(kind)) for kind in ("scenario", "control"))
        return ran and self.compared > 0 and all(row.status != "failed" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as a json-able dict, with the verdict on top."""
        return {"passed": self.passed, "compared": self.compared, "differing": self.differing, **dataclasses.asdict(self)}

    def render(self) -> str:
        """The report as text."""
        environment = self.environment
        head = [
            ("device", f"{environment['device']['name']} ({self.sizes})"),
            ("model", f"{self.model}: {', '.join(f'{name} {value}' for name, value in self.config.items())}"),
            ("versions", ", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "triton", "numpy"))),
            ("fingerprint", self.fingerprint["digest"][:16]),
        ]
        table = [("", "row", "form", "differing/compared", "first (request, token)", "max |delta|", "time", "result", "")]
        for row in self.rows:
            first = f"{row.first[0]}, {row.first[1]}" if row.first else "-"
            counts = f"{row.differing}/{row.compared}"
            kind = "must not differ" if row.kind == "scenario" else "must differ"
            table.append((kind, row.name, row.form, counts, first, f"{row.max_delta:.2g}", f"{row.seconds:.1f} s", row.status, row.detail))
        verdict = f"{self.compared} rows of log-probabilities compared with those of each request alone, {self.differing} differ; "
        failed = sum(row.status == "failed" for row in self.rows)
        verdict += f"{failed} rows failed, {self.seconds:.0f} s: " + ("no bit follows the batch here" if self.passed else "INVARIANCE IS NOT PROVEN HERE")
        return "\n".join([columns(head), "", columns(table, right=(3, 5, 6)), "", verdict])


UNCOUNTED = ("bs1", "tp")
"""Scenarios whose rows are no log-probabilities held against those of the reference."""
