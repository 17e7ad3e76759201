"""Results of a verification run: plain data that can be written as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """One check: `comparisons` were made and `failures` of them failed. `seconds` is wall time."""

    name: str
    contract_line: str
    status: Status
    comparisons: int
    failures: int
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class ControlResult:
    """One negative control: something deliberately wrong. It fails when none of its comparisons differs."""

    name: str
    status: Status
    comparisons: int
    differing: int
    seconds: float
    detail: str = ""


@dataclass
class Report:
    """Evidence of one run.

    `environment` has versions and device, `sources` the digest of each kernel file, `golden` the digests of fixed
    outputs by fingerprint. `created` is a UTC time (ISO 8601).
    """

    profile: str
    environment: dict[str, Any]
    sources: dict[str, str]
    fingerprint: dict[str, Any]
    created: str
    checks: list[CheckResult] = field(default_factory=list)
    controls: list[ControlResult] = field(default_factory=list)
    golden: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True when nothing failed and at least one check and one control ran."""
        results: list[CheckResult | ControlResult] = [*self.checks, *self.controls]
        ran = [any(r.status == "passed" for r in group) for group in (self.checks, self.controls)]
        return all(ran) and all(r.status != "failed" for r in results)

    def to_json(self) -> dict[str, Any]:
        """The report as a json-able dict, `passed` and the digest of the kernel sources on top."""
        data = dataclasses.asdict(self)
        return {"passed": self.passed, "source_digest": self.fingerprint["kernel_sources"], **data}
