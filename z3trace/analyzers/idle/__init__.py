"""Idle time, split by what the host was doing and by cause."""

from z3trace.analyzers.idle.causes import IdleSplits, Pieces, Total, split_idle, totals
from z3trace.analyzers.idle.states import Timeline, host_timeline

__all__ = ["IdleSplits", "Pieces", "Timeline", "Total", "host_timeline", "split_idle", "totals"]
