"""One trace through all stages, from events to the rows of the report's tables."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.activity import Activity, find_activity
from z3trace.analyzers.anatomy import dissect, whole_trace
from z3trace.analyzers.attribution import Attribution, Placement, attribute, framework_of, place
from z3trace.analyzers.attribution.labelled import chains, kinds_by_label
from z3trace.analyzers.collectives import Collectives, find_collectives
from z3trace.analyzers.host import HostThreads, find_threads
from z3trace.analyzers.idle import IdleSplits, host_timeline, split_idle, totals
from z3trace.analyzers.layers import ROOT, LayerNames
from z3trace.analyzers.phases import BACKWARD, NAMES, Phases, find_phases
from z3trace.analyzers.spans import compute_by_layer, union_total
from z3trace.analyzers.steps import Steps, WindowKind, find_steps
from z3trace.analyzers.trace import NULL, Trace


def known(value: Any) -> int | None:
    """An int64 column's value as Python's int, None for NULL."""
    return None if value == NULL else int(value)


@dataclass(frozen=True)
class RankAnalysis:
    """All stages' results for one trace. Rows of tables are made on demand from them."""

    trace: Trace
    rank: int
    threads: HostThreads
    activity: Activity
    steps: Steps
    phases: Phases
    collectives: Collectives
    placement: Placement
    attribution: Attribution
    layers: LayerNames

    @property
    def notes(self) -> list[str]:
        """What a reader has to know about this trace's numbers."""
        return [
            self.activity.definition, *self.activity.hints, *self.steps.notes, *self.phases.notes,
            *self.collectives.notes, *self.attribution.notes,
        ]  # fmt: skip

    @cached_property
    def exposed_ns(self) -> np.ndarray:
        """Exposed time of each collective (NULL without a transfer), each ns owned by one, shape (n,)."""
        start, end = self.collectives.start, self.collectives.end
        timed = start != NULL
        exposed = iv.Coverage(iv.subtract(self.activity.communication, self.activity.compute))
        owned_starts, owned_ends = iv.first_owner(start[timed], end[timed])
        result = np.full(len(start), NULL, np.int64)
        result[timed] = exposed.within(owned_starts, owned_ends)
        return result

    def layer_of(self, k: int) -> str:
        """The layer that owns the k-th collective's parameters."""
        owner = self.attribution.owners[k]
        if owner.layer is not None:
            return owner.layer
        if owner.parameters:
            return self.layers.layer_of_all(owner.parameters)
        return "none" if owner.unit is None else self.layers.layer_of(owner.unit)

    def step_number(self, k: int) -> int | None:
        """The step in which the k-th collective was issued; None outside all marks."""
        index = int(self.placement.step[k])
        return self.steps.steps[index].number if index >= 0 else None

    # Rows of the report's tables.

    def whole_trace_rows(self) -> list[dict[str, Any]]:
        parts = whole_trace(self.activity.recorded(self.trace))
        if parts is None:
            return []
        return [{
            "rank": self.rank, "file": Path(self.trace.path).name, "duration_ns": parts.duration,
            "compute_ns": parts.compute, "comm_ns": parts.comm, "memory_ns": parts.memory,
            "overlapped_ns": parts.overlapped, "exposed_comm_ns": parts.exposed_comm, "idle_ns": parts.idle,
        }]  # fmt: skip

    def step_rows(self) -> list[dict[str, Any]]:
        rows = []
        for step in self.steps.steps:
            parts = dissect(self.activity, step.start, step.end)
            rows.append({
                "rank": self.rank, "step": step.number, "start_ns": step.start, "duration_ns": parts.duration,
                "compute_ns": parts.compute, "comm_ns": parts.comm, "memory_ns": parts.memory,
                "overlapped_ns": parts.overlapped, "exposed_comm_ns": parts.exposed_comm,
                "idle_ns": parts.idle, "exposed_memory_ns": parts.exposed_memory,
                "overlap_fraction": parts.overlap_fraction, "used": step.used,
            })  # fmt: skip
        return rows

    def _sum(self, members: list[int], values: np.ndarray) -> int | None:
        """The sum over the members; None when any of them is unknown."""
        picked = values[members]
        return None if (picked == NULL).any() else int(picked.sum())

    def collective_rows(self) -> list[dict[str, Any]]:
        found = self.collectives
        groups: dict[tuple[int | None, str, str, str | None, int | None], list[int]] = defaultdict(list)
        for k in range(len(found)):
            where = (self.step_number(k), self.placement.phase[k], found.kind[k])
            group = (found.group[k], known(found.world[k]))
            groups[where + group].append(k)
        return [
            {
                "rank": self.rank, "step": step, "phase": phase, "kind": kind, "group": group,
                "world": world, "count": len(members), "bytes": self._sum(members, found.bytes),
                "exposed_ns": self._sum(members, self.exposed_ns),
            }
            for (step, phase, kind, group, world), members in groups.items()
        ]  # fmt: skip

    def layer_rows(self) -> list[dict[str, Any]]:
        groups: dict[tuple[int | None, str, str, str], list[int]] = defaultdict(list)
        for k in range(len(self.collectives)):
            key = (self.step_number(k), self.layer_of(k), self.placement.phase[k], self.collectives.kind[k])
            groups[key].append(k)
        compute = self._compute_by_layer
        with_gathers = {(step, layer, phase) for step, layer, phase, _ in groups}
        alone = [
            {
                "rank": self.rank, "step": step, "layer": layer, "phase": phase, "kind": None, "count": 0,
                "bytes": 0, "compute_ns": ns, "exposed_ns": 0,
            }
            for (step, layer, phase), ns in compute.items()
            if (step, layer, phase) not in with_gathers
        ]  # fmt: skip
        return alone + [
            {
                "rank": self.rank, "step": step, "layer": layer, "phase": phase, "kind": kind,
                "count": len(members), "bytes": self._sum(members, self.collectives.bytes),
                "compute_ns": compute.get((step, layer, phase)),
                "exposed_ns": self._sum(members, self.exposed_ns),
            }
            for (step, layer, phase, kind), members in groups.items()
        ]  # fmt: skip

    @cached_property
    def _compute_by_layer(self) -> dict[tuple[int | None, str, str], int]:
        spans = self.attribution.spans
        if spans is None:
            return {}
        codes, layers, rows, times = compute_by_layer(self.trace, self.activity, spans, self.layers)
        if not len(rows):
            return {}
        phase_codes, _ = self.phases.at(times)
        step_codes = self.steps.index_at(times)
        combined = (step_codes + 1) * 1_000_000 + codes * 10 + phase_codes
        result: dict[tuple[int | None, str, str], int] = {}
        order = np.argsort(combined, kind="stable")
        edges = np.flatnonzero(np.diff(combined[order], prepend=-1))
        for first, last in zip(edges, [*edges[1:], len(order)], strict=True):
            members = order[first:last]
            k = int(members[0])
            step = int(step_codes[k])
            number = self.steps.steps[step].number if step >= 0 else None
            result[number, layers[int(codes[k])], NAMES[int(phase_codes[k])]] = union_total(
                self.trace, rows[members]
            )
        return result

    @cached_property
    def idle(self) -> IdleSplits:
        """All idle time from the first step's start to the last step's end, cut twice."""
        windows = self.steps.steps
        start = min((s.start for s in windows), default=0)
        end = max((s.end for s in windows), default=0)
        timeline = host_timeline(self.trace, self.threads)
        return split_idle(self.trace, self.activity, timeline, start, end)

    def idle_rows(self) -> list[dict[str, Any]]:
        splits = {"host_state": self.idle.host_state, "cause": self.idle.cause}
        return [
            {
                "rank": self.rank, "step": step.number, "split": split, "name": total.name, "gaps": total.pieces,
                "idle_ns": total.ns, "where": total.where,
            }
            for step in self.steps.steps
            for split, pieces in splits.items()
            for total in totals(self.trace, pieces, step.start, step.end)
        ]  # fmt: skip

    def gather_rows(self, transfer: np.ndarray) -> list[dict[str, Any]]:
        """All-gathers; `transfer` is the transfer time of each collective over the ranks (NULL unknown)."""
        rows = []
        again = self._repeated_after()
        for k in np.flatnonzero(self.collectives.is_kind("all_gather")).tolist():
            owner = self.attribution.owners[k]
            start, end = known(self.collectives.start[k]), known(self.collectives.end[k])
            moved = known(transfer[k])
            waited = None
            if start is not None and end is not None and moved is not None:
                waited = end - start - moved
            rows.append({
                "rank": self.rank, "step": self.step_number(k),
                "micro_batch": int(self.placement.micro_batch[k]), "issued_phase": self.placement.phase[k],
                "issued_in": owner.issued_in, "used_phase": owner.used_phase, "used_in": owner.used_in,
                "unit": owner.unit, "parameters": list(owner.parameters) if owner.parameters else None,
                "reason": owner.reason, "group": self.collectives.group[k],
                "world": known(self.collectives.world[k]), "bytes": known(self.collectives.bytes[k]),
                "early_ns": self._early(k), "again_after_ns": again.get(k),
                "start_ns": start if start is not None else int(self.collectives.issue_ns[k]),
                "end_ns": end, "exposed_ns": known(self.exposed_ns[k]), "transfer_ns": moved,
                "peer_wait_ns": waited,
            })  # fmt: skip
        return rows

    def _early(self, k: int) -> int | None:
        """From the end of a prefetch to the first use of what it fetches; negative: it came too late."""
        owner, spans = self.attribution.owners[k], self.attribution.spans
        if spans is None or owner.reason != "prefetch" or owner.used_in is None:
            return None
        use = spans.first_use(owner.used_in, owner.used_phase == BACKWARD, int(self.collectives.issue_ns[k]))
        end = int(self.collectives.end[k])
        return None if use is None or end == NULL else use - end

    def _repeated_after(self) -> dict[int, int]:
        """For each gather of something gathered before in its step: ns since the end of that gather."""
        latest: dict[tuple[int, object], int] = {}
        result: dict[int, int] = {}
        for k in np.flatnonzero(self.collectives.is_kind("all_gather")).tolist():
            owner = self.attribution.owners[k]
            pieces = owner.parameters or ((owner.unit,) if owner.unit is not None else ())
            keys = [(int(self.placement.step[k]), piece) for piece in pieces]
            seen = [latest[key] for key in keys if key in latest]
            if seen:
                result[k] = int(self.collectives.issue_ns[k]) - max(seen)
            end = int(self.collectives.end[k])
            latest |= dict.fromkeys(keys, end if end != NULL else int(self.collectives.issue_ns[k]))
        return result


def analyze_trace(
    trace: Trace,
    rank: int,
    *,
    window: WindowKind = "device",
    communication_pattern: re.Pattern[str] | None = None,
    description: Mapping[str, Any] | None = None,
) -> RankAnalysis:
    """All stages on one trace. `description` is what is known of the run besides the trace (model, settings)."""
    threads = find_threads(trace)
    activity = find_activity(trace, threads, communication_pattern)
    steps = find_steps(trace, threads, activity, window)
    phases = find_phases(trace, threads, steps)
    collectives = find_collectives(trace, activity)
    if framework_of(trace) == "z3trace":
        collectives = replace(collectives, kind=kinds_by_label(collectives, chains(trace, collectives)))
    placement = place(collectives, steps, phases)
    attribution, placement = attribute(trace, collectives, placement, steps, phases, description)
    paths = [p for o in attribution.owners for p in (o.unit, *(o.parameters or ())) if p]
    names = LayerNames(paths if len(set(paths)) > 1 else [*paths, ROOT])
    return RankAnalysis(
        trace, rank, threads, activity, steps, phases, collectives, placement, attribution, names
    )
