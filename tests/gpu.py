"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
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


@contextmanager
def no_host_synchronisation() -> Iterator[None]:
    """What waits for the device within the context is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
