"""Greedy list scheduling: each choice is replayed by a second, plain simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.plan import greedy_order

# Whole numbers: sums are exact, and ties are common.
PARTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 4)), max_size=12)


@settings(deadline=None)
@given(PARTS)
def test_the_wire_never_idles_and_takes_the_most_urgent(parts: list[tuple[int, int, int]]) -> None:
    ready, wire, need = ([part[i] for part in parts] for i in range(3))
    order = greedy_order(ready, wire, need)
    assert sorted(order) == list(range(len(parts)))
    left, free = set(order), 0
    for taken in order:
        start = max(free, ready[taken])
        assert start == max(free, min(ready[i] for i in left)), "the wire waited although a part was ready"
        could = [i for i in left if ready[i] <= start]
        assert taken == min(could, key=lambda i: (need[i], i)), "a more urgent part was ready"
        left.remove(taken)
        free = start + wire[taken]


@settings(deadline=None)
@given(PARTS, st.integers(1, 5))
def test_the_unit_of_time_does_not_matter(parts: list[tuple[int, int, int]], scale: int) -> None:
    ready, wire, need = ([part[i] for part in parts] for i in range(3))
    scaled = greedy_order([r * 2.0**scale for r in ready], [w * 2.0**scale for w in wire], need)
    assert scaled == greedy_order(ready, wire, need)


def test_an_urgent_part_passes_those_that_wait_but_not_the_one_on_the_wire() -> None:
    assert greedy_order([1, 0, 0, 0], [1, 2, 2, 2], [0, 1, 1, 1]) == [1, 0, 2, 3]


def test_uncut_it_has_to_wait() -> None:
    assert greedy_order([1, 0], [1, 6], [0, 1]) == [1, 0]


def test_times_before_zero_and_no_parts() -> None:
    assert greedy_order([], [], []) == []
    assert greedy_order([-3.0, -5.0], [1.0, 1.0], [0, 0]) == [1, 0]


def test_lists_of_different_lengths_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        greedy_order([0.0, 1.0], [1.0], [0])
