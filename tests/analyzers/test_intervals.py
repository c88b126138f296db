"""Interval arithmetic against a reference that looks at every nanosecond."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from z3trace.analyzers import intervals as iv

SPAN = 60
raw_intervals = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)), max_size=12)


def arrays(pairs):
    data = np.array(pairs, np.int64).reshape(-1, 2)
    return data[:, 0], data[:, 1]


def brute(pairs):
    return {t for a, b in pairs for t in range(a, b)}


def members(intervals):
    assert intervals.dtype == np.int64
    assert (intervals[:, 1] > intervals[:, 0]).all()
    assert (intervals[1:, 0] > intervals[:-1, 1]).all(), "not disjoint, sorted, and apart"
    return {t for a, b in intervals for t in range(a, b)}


@given(raw_intervals)
def test_union_and_total(pairs):
    union = iv.union(*arrays(pairs))
    assert members(union) == brute(pairs)
    assert iv.total(union) == len(brute(pairs))


@given(raw_intervals, raw_intervals)
def test_two_sets(a, b):
    set_a, set_b = iv.union(*arrays(a)), iv.union(*arrays(b))
    assert members(iv.merge(set_a, set_b)) == brute(a) | brute(b)
    assert members(iv.intersect(set_a, set_b)) == brute(a) & brute(b)
    assert members(iv.subtract(set_a, set_b)) == brute(a) - brute(b)


@given(raw_intervals, st.integers(-5, SPAN + 5), st.integers(-5, SPAN + 5))
def test_windows(pairs, start, end):
    union, inside = iv.union(*arrays(pairs)), brute(pairs) & set(range(start, end))
    assert members(iv.clip(union, start, end)) == inside
    assert members(iv.complement(union, start, end)) == set(range(start, end)) - inside
    coverage = iv.Coverage(union)
    assert coverage.within(np.array([start]), np.array([end])).tolist() == [len(inside)]
    assert coverage.contains(np.arange(-5, SPAN + 5)).tolist() == [
        t in brute(pairs) for t in range(-5, SPAN + 5)
    ]


@given(raw_intervals)
def test_every_nanosecond_has_one_owner(pairs):
    starts, ends = arrays(pairs)
    own_starts, own_ends = iv.first_owner(starts, ends)
    owners = [t for a, b in zip(own_starts, own_ends, strict=True) for t in range(a, b)]
    assert len(owners) == len(set(owners))
    assert set(owners) == brute(pairs)
    for (start, end), a, b in zip(pairs, own_starts, own_ends, strict=True):
        assert b <= a or (start <= a and b <= end)


def test_empty_sets():
    assert iv.total(iv.EMPTY) == 0
    assert iv.union(np.empty(0, np.int64), np.empty(0, np.int64)).shape == (0, 2)
    assert iv.complement(iv.EMPTY, 3, 7).tolist() == [[3, 7]]
