"""The page pool: no page has two owners or is lost, and a block is found by its tokens or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determinism.pages import PagePool, block_key


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["take", "publish", "find", "release"]), st.integers(0, 4)), max_size=60), st.integers(0, 3))
def test_pages_are_conserved(num_pages, actions, seed):
    pool = PagePool(num_pages, seed=seed)
    held, contents, clean = [], {}, set()
    for action, number in actions:
        clean |= set(pool.stale)
        pool.stale.clear()
        if action == "take":
            page = pool.take()
            clean |= set(pool.stale)
            assert (page is None) == (len(set(held)) == num_pages)
            if page is not None:
                assert page not in held and page in clean, "a page is overwritten before it has a new owner"
                clean.discard(page)
                contents.pop(page, None)
                held.append(page)
        elif action == "publish" and held:
            page = held[number % len(held)]
            key = block_key(b"", [number])
            if page not in contents and key not in {block_key(b"", [n]) for n in contents.values()}:
                contents[page] = number
            pool.publish(page, key)
        elif action == "find":
            page = pool.find(block_key(b"", [number]))
            assert page is None or contents[page] == number
            if page is not None:
                held.append(page)
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
    for page in held:
        pool.release(page)
    assert sorted(pool.take() for _ in range(num_pages)) == list(range(num_pages)) and pool.take() is None


def test_the_longest_idle_page_goes_first():
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    for page, token in ((first, 1), (second, 2)):
        pool.publish(page, block_key(b"", [token]))
    pool.release(second)
    pool.release(first)
    assert pool.take() == second
    assert pool.find(block_key(b"", [2])) is None and pool.find(block_key(b"", [1])) == first


def test_only_held_pages_are_published():
    with pytest.raises(ValueError, match="page=0 must be held"):
        PagePool(1).publish(0, b"key")


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_keys_name_all_tokens_from_the_first_one_on(blocks, data):
    def key(blocks):
        name = b""
        for block in blocks:
            name = block_key(name, block)
        return name

    assert key(blocks) == key([list(block) for block in blocks])
    i = data.draw(st.integers(0, len(blocks) - 1))
    other = [list(block) for block in blocks]
    other[i][-1] += 1
    assert key(other) != key(blocks)
