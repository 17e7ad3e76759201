"""Plain text for terminals: aligned columns, a line of progress, and values of options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows of cells as aligned lines without trailing blanks. `right` lists the columns to align to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are positive integers")
    return int(text)


def folder(text: str) -> Path:
    """A folder that exists, for argparse."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a folder that exists")
    return Path(text)


class ProgressLine:
    """One line on a terminal that is rewritten in place; silent where the stream is not a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty()

    def __call__(self, done: int, total: int, name: str) -> None:
        """Shows `done` of `total` and the name of what has just been done."""
        if self.shown:
            width = 24
            bar = "#" * (width * done // total)
            self._write(f"[{bar:<{width}}] {done}/{total} {name}")

    def clear(self) -> None:
        """Removes the line."""
        if self.shown:
            self._write("")

    def _write(self, text: str) -> None:
        self.stream.write(f"\r\x1b[K{text}")
        self.stream.flush()
