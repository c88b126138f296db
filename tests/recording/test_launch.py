"""Whose exit code a job of several ranks ends with."""

import signal

import pytest

from z3trace.recording.launch import exit_code
from z3trace.recording.rundir import RankReport

TERM = 128 + signal.SIGTERM


def ended(rank: int, at: int, code: int) -> RankReport:
    return RankReport(rank, 3, "here", ended_ns=at, exit_code=code)


@pytest.mark.parametrize(
    ("reports", "failures", "expected"),
    [
        # all well, also when one was killed because it hung at exit, or aborted there
        ([ended(0, 5, 0), ended(1, 6, 0)], {}, 0),
        ([ended(0, 5, 0), ended(1, 6, 0)], {0: -signal.SIGKILL, 1: -signal.SIGABRT}, 0),
        # the first to end badly, not the first in number
        ([ended(0, 9, 1), ended(1, 5, 7)], {0: 1, 1: 7}, 7),
        # a stopped rank is not the cause, even when it reports first
        ([ended(0, 5, TERM), ended(1, 9, 7)], {0: TERM, 1: 7}, 7),
        # one that died made the others fail
        ([ended(0, 5, 1), RankReport(1, 3, "here")], {0: 1, 1: -signal.SIGKILL}, 128 + signal.SIGKILL),
        # stopped before it could do anything about it, next to the one that failed
        ([], {0: -signal.SIGTERM, 1: 3}, 3),
        # nothing but SIGTERM from outside
        ([ended(0, 5, TERM)], {0: TERM}, TERM),
    ],
)
def test_the_cause_gives_the_exit_code(
    reports: list[RankReport], failures: dict[int, int], expected: int
) -> None:
    assert exit_code(reports, failures) == expected
