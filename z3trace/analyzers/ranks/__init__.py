"""Several ranks together: clocks, transfer and waiting, who is late, how fast the links are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.ranks.arrivals import Arrivals, find_arrivals
from z3trace.analyzers.ranks.clocks import Clocks, align
from z3trace.analyzers.ranks.links import Link, fit_links
from z3trace.analyzers.ranks.matching import Joined, Mismatch, join, starts_and_ends
from z3trace.analyzers.trace import NULL

__all__ = ["Arrivals", "Clocks", "JoinedRanks", "Link", "Mismatch", "join_ranks"]


@dataclass(frozen=True)
class JoinedRanks:
    """What the ranks' traces say together. With one rank `joined` is empty and all waits are unknown."""

    ranks: tuple[RankAnalysis, ...]
    joined: tuple[Joined, ...]
    mismatches: tuple[Mismatch, ...]
    clocks: Clocks
    arrivals: Arrivals

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    @cached_property
    def links(self) -> list[Link]:
        """Latency and bandwidth of each group and kind of collective."""
        return fit_links(self.ranks, self.arrivals if self.several else None)

    def used(self, position: int) -> np.ndarray:
        """Mask over one rank's collectives: issued in a step that averages are taken over."""
        rank = self.ranks[position]
        used = np.array([s.used for s in rank.steps.steps] + [False], np.bool_)
        mask: np.ndarray = used[rank.placement.step]
        return mask

    def used_steps(self, position: int) -> int:
        return sum(step.used for step in self.ranks[position].steps.steps)

    @cached_property
    def caused_wait(self) -> np.ndarray:
        """Exposed waiting per step of rank i on rank j, shape (ranks, ranks), ns."""
        caused = np.zeros((len(self.ranks), len(self.ranks)))
        for position in range(len(self.ranks)):
            mask = self.used(position) & (self.arrivals.exposed_wait[position] != NULL)
            last = self.arrivals.last[position][mask]
            waits = self.arrivals.exposed_wait[position][mask]
            for other in np.unique(last[last >= 0]).tolist():
                caused[position, other] = waits[last == other].sum() / max(1, self.used_steps(position))
        return caused

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the ranks table."""
        rows = []
        for position, rank in enumerate(self.ranks):
            steps = max(1, self.used_steps(position))
            mask = self.used(position)
            late = self.arrivals.late[position]
            known = mask & (late != NULL)
            arrived = known.any()
            rows.append({
                "rank": rank.rank,
                "late_ns": round(int(late[known].sum()) / steps) if arrived else None,
                "last_arrivals": int((self.arrivals.last[position][known] == position).sum()) if arrived else None,
                "joined_collectives": int(known.sum()) if self.several else None,
                "wait_ns": self._per_step(self.arrivals.wait[position], known, steps),
                "exposed_wait_ns": self._per_step(self.arrivals.exposed_wait[position], known, steps),
                "transfer_ns": self._per_step(self.arrivals.transfer[position], known, steps),
                "caused_wait_ns": round(float(self._caused_by(position))) if arrived else None,
                "clock_skew_ns": int(self.clocks.skew_ns[position]) if self.several else None,
            })  # fmt: skip
        return rows

    def _caused_by(self, position: int) -> float:
        others = np.delete(self.caused_wait[:, position], position)
        return float(np.median(others)) if len(others) else 0.0

    def caused_by(self, position: int) -> float:
        """What one rank costs the others: the median over them of exposed waiting for it per step, ns."""
        return self._caused_by(position)

    @staticmethod
    def _per_step(values: np.ndarray, known: np.ndarray, steps: int) -> int | None:
        return round(int(values[known].sum()) / steps) if known.any() else None

    def link_rows(self) -> list[dict[str, Any]]:
        """Rows of the links table."""
        return [
            {
                "group": link.group, "kind": link.kind, "world": link.world, "count": link.count,
                "alpha_ns": round(link.alpha_ns), "bus_gb_per_s": link.bus_gb_per_s,
                "waits_known": link.waits_known,
            }
            for link in self.links
        ]  # fmt: skip

    def notes(self) -> list[str]:
        """What a reader has to know: clocks, missing ranks, differing sequences."""
        if not self.several:
            return ["one rank: time in collectives cannot be split into transfer and waiting for peers"]
        notes = []
        if self.clocks.differ:
            skews = ", ".join(
                f"rank {rank.rank} {int(ns) / 1000:+.0f} us"
                for rank, ns in zip(self.ranks, self.clocks.skew_ns, strict=True)
                if ns
            )
            notes.append(f"clocks differ and are aligned on the ends of collectives: {skews}")
        notes += [
            f"the ranks' sequences of collectives differ: {describe(mismatch)}"
            for mismatch in self.mismatches[:1]
        ]
        joined = Counter(p for same in self.joined for p, _ in same.members)
        alone = [rank.rank for p, rank in enumerate(self.ranks) if not joined[p] and len(rank.collectives)]
        if alone:
            notes.append(
                f"ranks {', '.join(map(str, alone))} have no collective in common with another trace"
            )
        return notes


def describe(mismatch: Mismatch) -> str:
    """The first difference of two sequences in words."""

    def what(signature: tuple[str, int] | None) -> str:
        if signature is None:
            return "nothing"
        kind, size = signature
        return kind if size == NULL else f"{kind} of {size} bytes"

    by_what: dict[str, list[int]] = {}
    for rank, signature in mismatch.seen:
        by_what.setdefault(what(signature), []).append(rank)
    said = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{', …' if len(ranks) > 4 else ''}: {text}"
        for text, ranks in by_what.items()
    )
    group = f" of group {mismatch.group.split(' ')[0]}" if mismatch.group else ""
    return f"step {mismatch.step}, collective {mismatch.index}{group}: {said}"


def join_ranks(ranks: Sequence[RankAnalysis]) -> JoinedRanks:
    """Join the ranks' collectives, put their clocks on one time, and split every collective."""
    joined, mismatches = join(ranks)
    starts, ends = starts_and_ends(ranks, joined)
    clocks = align(ends)
    arrivals = find_arrivals(ranks, joined, starts, ends, clocks)
    return JoinedRanks(tuple(ranks), tuple(joined), tuple(mismatches), clocks, arrivals)
