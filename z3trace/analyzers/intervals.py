"""Interval arithmetic: every duration in a report comes from these functions.

An interval set is an int64 array of shape (n, 2): half-open intervals [start, end) in nanoseconds, sorted,
disjoint and not touching, none empty. Functions take and return such sets and change nothing in place.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]

EMPTY: Array = np.empty((0, 2), np.int64)
EMPTY.flags.writeable = False


def union(starts: Array, ends: Array) -> Array:
    """The union of any intervals, given as starts and ends of equal length (n,) in any order.

    Intervals with end <= start are empty and contribute nothing.
    """
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.column_stack((starts[first], ends[last]))


def merge(*sets: Array) -> Array:
    """The union of several interval sets."""
    joined = np.concatenate([EMPTY, *sets])
    return union(joined[:, 0], joined[:, 1])


def total(intervals: Array) -> int:
    """The summed length in ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def intersect(a: Array, b: Array) -> Array:
    """The time in both sets."""
    if not len(a) or not len(b):
        return EMPTY
    # Each interval of a meets the intervals first..last-1 of b.
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    which_a = np.repeat(np.arange(len(a)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    which_b = np.repeat(first, counts) + offsets
    return np.column_stack(
        (np.maximum(a[which_a, 0], b[which_b, 0]), np.minimum(a[which_a, 1], b[which_b, 1]))
    )


def complement(intervals: Array, start: int, end: int) -> Array:
    """The time of the window [start, end) that is not in the set."""
    if end <= start:
        return EMPTY
    inside = clip(intervals, start, end)
    edges = np.concatenate(([start], inside.ravel(), [end])).reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def subtract(a: Array, b: Array) -> Array:
    """The time in a that is not in b."""
    if not len(a) or not len(b):
        return a
    return intersect(a, complement(b, int(a[0, 0]), int(a[-1, 1])))


def clip(intervals: Array, start: int, end: int) -> Array:
    """The part of the set inside the window [start, end)."""
    first = int(np.searchsorted(intervals[:, 1], start, side="right"))
    last = int(np.searchsorted(intervals[:, 0], end, side="left"))
    if last <= first or end <= start:
        return EMPTY
    return np.clip(intervals[first:last], start, end)


class Coverage:
    """Answers "how much of [start, end) is in this set" for many windows at once, in O(log n) each."""

    def __init__(self, intervals: Array) -> None:
        self._starts = intervals[:, 0]
        lengths = intervals[:, 1] - intervals[:, 0]
        self._lengths = lengths
        self._before = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))

    def until(self, times: Array) -> Array:
        """The covered time before each of the times, shape (n,), ns."""
        index = np.searchsorted(self._starts, times, side="right")
        if not len(self._starts):
            return np.zeros(len(times), np.int64)
        last = np.maximum(index - 1, 0)
        partial = np.minimum(times - self._starts[last], self._lengths[last])
        return np.where(index > 0, self._before[last] + partial, 0)

    def within(self, starts: Array, ends: Array) -> Array:
        """The covered time of each window [start, end), shape (n,), ns; 0 for an empty window."""
        return np.where(ends > starts, self.until(np.maximum(ends, starts)) - self.until(starts), 0)

    def contains(self, times: Array) -> NDArray[np.bool_]:
        """Whether each instant lies in the set."""
        if not len(self._starts):
            return np.zeros(len(times), np.bool_)
        index = np.searchsorted(self._starts, times, side="right") - 1
        last = np.maximum(index, 0)
        return (index >= 0) & (times < self._starts[last] + self._lengths[last])


def first_owner(starts: Array, ends: Array) -> tuple[Array, Array]:
    """Give every ns of overlapping intervals to exactly one of them: to the one that started first.

    Takes starts and ends (n,) in any order, returns (owned starts, owned ends) in the same order; an interval
    that lies wholly inside earlier ones owns an empty interval. The owned intervals are disjoint and cover
    the same time as the given ones.
    """
    order = np.lexsort((-ends, starts))
    sorted_starts, sorted_ends = starts[order], np.maximum(ends[order], starts[order])
    owned_starts = sorted_starts.copy()
    if len(starts):
        reached = np.maximum.accumulate(sorted_ends)
        owned_starts[1:] = np.maximum(sorted_starts[1:], reached[:-1])
    owned_ends = np.maximum(sorted_ends, owned_starts)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return owned_starts[back], owned_ends[back]
