"""Rows by request and position: against a dictionary, and against its limit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tltlab.runtime.engine.vllm.capture import PAGE, RowStore

WIDTH = 3
CONTEXT = 6 * PAGE


class Writer:
    """Makes rows that are all different, writes them to the store, and remembers them the slow way."""

    def __init__(self, store):
        self.store = store
        self.rows = {}
        self.value = 0.0

    def iteration(self, runs):
        bounds, positions, values = [0], [], []
        for name, start, count in runs:
            for position in range(start, start + count):
                self.value += 1
                values.append(self.value)
                positions.append(position)
                self.rows.setdefault(name, {})[position] = self.value
            bounds.append(len(positions))
        # A padded batch is longer than what it holds.
        hidden = torch.tensor([*values, -1.0])[:, None].expand(-1, WIDTH)
        names = [name for name, _, _ in runs]
        self.store.put(names, np.array(bounds), np.array([*positions, 0]), hidden, [hidden + 0.25, hidden + 0.5])

    def expected(self, name, num_rows):
        """The unbroken run that ends at `num_rows`: its first position and its values."""
        rows, first = self.rows[name], num_rows
        while first - 1 in rows:
            first -= 1
        return first, [rows[position] for position in range(first, num_rows)]

    def check(self, name, num_rows):
        found = self.store.close(name, num_rows)
        first, values = self.expected(name, num_rows)
        assert found.first == first
        assert found.hidden.tolist() == [[value] * WIDTH for value in values]
        assert found.aux.tolist() == [[value + 0.25] * WIDTH + [value + 0.5] * WIDTH for value in values]


def store(pages, *expected):
    return RowStore(pages * PAGE * WIDTH * 3 * 4, CONTEXT, *expected)


@settings(max_examples=20)
@given(st.data())
def test_the_last_row_of_each_position_is_returned(data):
    writer = Writer(store(10_000))
    ends = {}
    for number in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 3))):
            name = f"r{number}.{len(ends)}"
            ends[name] = data.draw(st.sampled_from([0, 0, 5, PAGE]))
            writer.store.open(name)
        runs = []
        for name in data.draw(st.permutations(sorted(ends))):
            # It continues, takes back rejected drafts, or after preemption starts again further up; or further on,
            # behind a prefix that another request had computed meanwhile, and then what came before the hole is no
            # more.
            start = max(ends[name] - data.draw(st.sampled_from([0, 0, 1, 4, PAGE + 3, -9, -PAGE])), 0)
            count = min(data.draw(st.integers(1, PAGE + 4)), CONTEXT - start)
            if count > 0 and data.draw(st.booleans()):
                runs.append((name, start, count))
                ends[name] = start + count
                rows = writer.rows.get(name, {})
                writer.rows[name] = {p: v for p, v in rows.items() if p < start} if start - 1 in rows else {}
        writer.iteration([*runs, ("nobody asked for this one", 0, 2)])
        for name in [name for name, _, _ in runs if data.draw(st.integers(0, 3)) == 0]:
            writer.check(name, ends.pop(name))
    assert writer.store.skipped == writer.store.lost == 0


def test_shorter_requests_release_pages_first():
    writer = Writer(store(3))
    for name in "abcd":
        writer.store.open(name)
    writer.iteration([("a", 0, PAGE), ("b", 0, PAGE), ("c", 0, 5), ("d", 0, 5)])
    assert (writer.store.skipped, writer.store.lost) == (1, 0), "d is no longer than c, and came last"
    writer.iteration([("a", PAGE, 1), ("b", PAGE, 1), ("c", 5, 1), ("d", 5, 1)])
    assert (writer.store.skipped, writer.store.lost) == (1, 2), "a takes c's page, and b finds nobody shorter"
    for name, num_rows in (("b", PAGE + 1), ("c", 6), ("d", 6)):
        assert writer.store.close(name, num_rows) is None
    writer.check("a", PAGE + 1)
    writer.store.open("e")
    writer.iteration([("e", 0, 3 * PAGE)])
    writer.check("e", 3 * PAGE)
    assert (writer.store.skipped, writer.store.lost, len(writer.store)) == (1, 2, 0)
    assert writer.store.peak_bytes == writer.store.max_bytes


def test_when_full_those_stay_that_get_long():
    lengths = {"short": 50, "middle": 500, "long": 5000, "longest": 6000}
    few = store(6, lambda names, ends: np.maximum([lengths[name] for name in names], ends))
    writer = Writer(few)
    for name in ("short", "middle", "long"):
        few.open(name)
    writer.iteration([("short", 0, 2 * PAGE), ("middle", 0, 2 * PAGE), ("long", 0, 2 * PAGE)])
    few.open("longest")
    writer.iteration([("short", 2 * PAGE, 1), ("middle", 2 * PAGE - 3, 3), ("longest", 0, PAGE)])
    assert (few.skipped, few.lost) == (0, 1), "the short one asked in vain, and what it had is the longest one's"
    assert few.close("short", 2 * PAGE + 1) is None
    writer.iteration([("long", 2 * PAGE, PAGE), ("longest", PAGE, PAGE)])
    assert (few.skipped, few.lost) == (0, 2)
    assert few.close("middle", 2 * PAGE) is None
    few.open("short")
    writer.rows["short"] = {}
    writer.iteration([("short", 0, 2 * PAGE)])
    assert (few.skipped, few.lost) == (1, 2)
    writer.check("long", 3 * PAGE)
    writer.check("longest", 2 * PAGE)


@pytest.mark.parametrize(("pages", "num_rows", "counts"), [(10, 9, (0, 1)), (0, 8, (1, 0))])
def test_without_its_last_rows_or_page_nothing_comes(pages, num_rows, counts):
    writer = Writer(store(pages))
    writer.store.open("a")
    writer.iteration([("a", 0, 8)])
    assert writer.store.close("a", num_rows) is None
    assert (writer.store.skipped, writer.store.lost) == counts
    assert writer.store.peak_bytes <= writer.store.max_bytes
