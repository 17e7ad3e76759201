"""What a test does on a machine that cannot hold a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from triton.runtime.errors import OutOfResources


@contextmanager
def or_skip() -> Iterator[None]:
    """Skip the rest of the test where the call within does not fit the machine."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error.__cause__, OutOfResources):
            raise
        pytest.skip(f"not for this machine: {error.__cause__}")
