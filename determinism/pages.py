"""A pool of cache pages in shuffled order, with a prefix cache of whole blocks."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence


def block_key(previous: bytes, block: Sequence[int]) -> bytes:
    """Name of a block of tokens behind the blocks that `previous` names (b"" for none): equal only for equal tokens from position 0 on."""
    return hashlib.blake2b(previous + array("q", block).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages by id. A page is free, held by requests, or idle: held by none and kept for what is in it.

    Attributes:
        stale: pages whose contents no one may see again; the owner of the caches takes them out of this list and overwrites them.
    """

    def __init__(self, num_pages: int, *, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._free = list(range(num_pages))
        self._chance.shuffle(self._free)
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # oldest first
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self.stale: list[int] = list(self._free)

    def take(self) -> int | None:
        """A page to write to, held once: a free one, else the one that has been idle longest, else None."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page = next(iter(self._idle))
            del self._idle[page], self._page_of[self._key_of.pop(page)]
            self.stale.append(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def find(self, key: bytes) -> int | None:
        """The page that holds a block, held once more; None where there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return page

    def publish(self, page: int, key: bytes) -> None:
        """Lets `find` find a held page, whose block is complete. The first page of a block stays the one that is found."""
        if page not in self._holders:
            raise ValueError(f"page={page} must be held")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, page: int) -> None:
        """Gives a page back, once for each time it was taken or found."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        del self._holders[page]
        if page in self._key_of:
            self._idle[page] = None
        else:
            self.stale.append(page)
            self._free.insert(self._chance.randrange(len(self._free) + 1), page)
