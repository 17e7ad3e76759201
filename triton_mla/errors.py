"""The package's own exception. A wrong argument is a plain ``ValueError`` that names it, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class UnsupportedError(ValueError):
    """No backend can do what was asked.

    Attributes:
        reasons: backend name -> every reason why it was refused.
    """

    def __init__(self, what: str, reasons: Mapping[str, Sequence[str]]) -> None:
        self.reasons: dict[str, tuple[str, ...]] = {name: tuple(why) for name, why in reasons.items()}
        lines = [f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("\n".join([what, *lines]))
