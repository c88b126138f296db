"""What the findings look at: means over the used steps of all ranks, and the lists they are taken from."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.anatomy import Anatomy, dissect
from z3trace.analyzers.findings.stalls import Stall, find_stalls
from z3trace.analyzers.idle.causes import NAMES as CAUSES
from z3trace.analyzers.phases import NAMES as PHASES
from z3trace.analyzers.pipeline import RankAnalysis
from z3trace.analyzers.ranks import JoinedRanks
from z3trace.analyzers.trace import NULL

SHARDING = ("deepspeed", "fsdp1", "fsdp2", "z3trace")
PASSES = ("forward", "backward")
HOOKS = ("host_hooks", "host_collective_issue")
SYNCS = ("sync_stream", "sync_device")
HOST = (*HOOKS, *SYNCS, "sync_event", "allocator", "host_dataloader", "host_dispatch", "host_other")


@dataclass(frozen=True)
class Gather:
    """One all-gather of a used step. `rank` is a position, `k` the index among the rank's collectives."""

    rank: int
    k: int
    step: int
    micro_batch: int
    phase: str
    bytes: int
    layer: str
    unit: str | None
    parameters: tuple[str, ...]
    reason: str | None


PassKey = tuple[int, int, int, str]  # rank, step, micro-batch, phase


@dataclass(frozen=True)
class Evidence:
    """A run as the findings see it. Times in ns, means per step and rank.

    `description` is what is known of the run besides its traces: settings, model, environment.
    """

    joined: JoinedRanks
    framework: str
    device: str
    world_size: int | None
    description: Mapping[str, Any]

    @property
    def ranks(self) -> tuple[RankAnalysis, ...]:
        return self.joined.ranks

    @property
    def on_device(self) -> bool:
        return self.device != "cpu"

    @property
    def sharding(self) -> bool:
        """Whether parameters are sharded by a framework whose settings are known here."""
        return self.framework in SHARDING and any(self.gathers)

    @cached_property
    def windows(self) -> int:
        """Used steps of all ranks together: what means are taken over."""
        return sum(self.joined.used_steps(p) for p in range(len(self.ranks)))

    @cached_property
    def anatomy(self) -> dict[str, float]:
        return _mean([parts for by_step in self.anatomy_by_rank for parts in by_step])

    @cached_property
    def anatomy_by_rank(self) -> list[list[dict[str, float]]]:
        return [
            [_times(dissect(rank.activity, s.start, s.end)) for s in rank.steps.steps if s.used]
            for rank in self.ranks
        ]

    @property
    def step_ns(self) -> float:
        return self.anatomy.get("step", 0.0)

    def mean(self, total: float) -> float:
        """A sum over all ranks and used steps as a mean."""
        return total / max(1, self.windows)

    # Stalls.

    @cached_property
    def stalls(self) -> list[list[Stall]]:
        """Stalls of each rank's used steps."""
        return [find_stalls(r, w) for r, w in zip(self.ranks, self.joined.arrivals.wait, strict=True)]

    def each_stall(self) -> Iterator[tuple[int, Stall]]:
        """(rank position, stall) of all."""
        for position, stalls in enumerate(self.stalls):
            for stall in stalls:
                yield position, stall

    def kind_waited(self, position: int, stall: Stall) -> str | None:
        """Kind of the collective waited for."""
        return self.ranks[position].collectives.kind[stall.waited] if stall.waited >= 0 else None

    @cached_property
    def late_room(self) -> dict[str, float]:
        """Phase -> exposed communication that earlier launches by the host would have hidden."""
        found: dict[str, float] = defaultdict(float)
        for _, stall in self.each_stall():
            if stall.late or stall.waited < 0:
                found[stall.phase] += stall.hideable
        return {phase: self.mean(ns) for phase, ns in found.items()}

    # Idle time.

    @cached_property
    def idle_by_rank(self) -> list[dict[tuple[str, str], float]]:
        """For each rank: (cause, phase) -> idle ns per step."""
        result = []
        for position, rank in enumerate(self.ranks):
            found: dict[tuple[str, str], float] = defaultdict(float)
            for cause, phase, ns, _ in self._idle_pieces(rank):
                found[cause, phase] += ns
            steps = max(1, self.joined.used_steps(position))
            result.append({key: ns / steps for key, ns in found.items()})
        return result

    def _idle_pieces(self, rank: RankAnalysis) -> Iterator[tuple[str, str, int, int]]:
        """(cause, phase, ns, host event behind it) of each piece of idle time in the used steps.

        Idle time in a pass that is due to a synchronize outside the passes is given to what the host did
        meanwhile: every loop waits for the device once a step, and has to get ahead again after it.
        """
        pieces = rank.idle.cause
        calls = np.maximum(pieces.rows, 0)
        call_codes, _ = rank.phases.at(rank.trace.ts[calls]) if len(rank.trace) else (calls, calls)
        in_passes = np.isin(call_codes, [PHASES.index(name) for name in PASSES])
        foreign = np.isin(pieces.codes, [CAUSES.index(name) for name in SYNCS]) & ~in_passes
        codes, _ = rank.phases.at(pieces.starts)
        foreign &= np.isin(codes, [PHASES.index(name) for name in PASSES])
        for step in rank.steps.steps:
            if not step.used:
                continue
            first = int(np.searchsorted(pieces.ends, step.start, side="right"))
            last = int(np.searchsorted(pieces.starts, step.end, side="left"))
            for k in range(first, last):
                start, end = max(int(pieces.starts[k]), step.start), min(int(pieces.ends[k]), step.end)
                phase = PHASES[int(codes[k])]
                if foreign[k]:
                    for name, ns, row in _states(rank, start, end):
                        yield name, phase, ns, row
                else:
                    yield CAUSES[int(pieces.codes[k])], phase, end - start, int(pieces.rows[k])

    def idle(self, *causes: str, phases: Sequence[str] = PHASES) -> float:
        """Idle time of these causes in these phases."""
        by_rank = self._idle_of(causes, phases)
        return sum(by_rank) / len(by_rank) if by_rank else 0.0

    def typical_idle(self, *causes: str, phases: Sequence[str] = PHASES) -> float:
        """The same of the rank in the middle."""
        by_rank = self._idle_of(causes, phases)
        return float(np.median(by_rank)) if by_rank else 0.0

    def _idle_of(self, causes: Sequence[str], phases: Sequence[str]) -> list[float]:
        return [
            sum(ns for (cause, phase), ns in found.items() if cause in causes and phase in phases)
            for found in self.idle_by_rank
        ]

    def idle_while(self, *states: str, phase: str) -> float:
        """Idle time of a phase in which the host was in one of these states, whatever the cause."""
        total = 0
        for rank in self.ranks:
            pieces = rank.idle.host_state
            codes, _ = rank.phases.at(pieces.starts)
            own = np.isin(pieces.codes, [CAUSES.index(name) for name in states])
            own &= (codes == PHASES.index(phase)) & _in_used_steps(rank, pieces.starts)
            total += int((pieces.ends - pieces.starts)[own].sum())
        return self.mean(total)

    def idle_calls(self, *causes: str) -> list[tuple[int, str, int, float]]:
        """(rank position, phase of the call, event, ns in all used steps) of each host event idle is charged to."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        for position, rank in enumerate(self.ranks):
            for cause, _, ns, row in self._idle_pieces(rank):
                if cause in causes and row >= 0:
                    found[position, row] += ns
        return [(p, self.phase_of_event(p, row), row, ns) for (p, row), ns in found.items()]

    def phase_of_event(self, position: int, row: int) -> str:
        rank = self.ranks[position]
        code, _ = rank.phases.at(rank.trace.ts[row : row + 1])
        return PHASES[int(code[0])]

    def late_share(self, *causes: str, phases: Sequence[str] = PASSES) -> float:
        """The part of the communication exposed by late launches that falls to these causes.

        What kept the host from launching earlier is what the idle time of the same phase is due to.
        """
        share = 0.0
        for phase in phases:
            room = self.late_room.get(phase, 0.0)
            everything = self.idle(*HOST, phases=(phase,))
            if room and everything:
                share += room * self.idle(*causes, phases=(phase,)) / everything
        return share

    # Gathers.

    @cached_property
    def gathers(self) -> list[list[Gather]]:
        """All-gathers issued in each rank's used steps, in order of issue."""
        result = []
        for position, rank in enumerate(self.ranks):
            used, c = self.joined.used(position), rank.collectives
            own = []
            for k in np.flatnonzero(c.is_kind("all_gather") & used).tolist():
                owner = rank.attribution.owners[k]
                own.append(Gather(
                    position, k, int(rank.placement.step[k]), int(rank.placement.micro_batch[k]),
                    rank.placement.phase[k], int(c.bytes[k]), rank.layer_of(k), owner.unit,
                    owner.parameters or (), owner.reason,
                ))  # fmt: skip
            result.append(own)
        return result

    @cached_property
    def passes(self) -> dict[PassKey, list[Gather]]:
        """Gathers of forward and backward by pass."""
        found: dict[PassKey, list[Gather]] = defaultdict(list)
        for own in self.gathers:
            for gather in own:
                if gather.phase in PASSES:
                    found[gather.rank, gather.step, gather.micro_batch, gather.phase].append(gather)
        return dict(found)

    @cached_property
    def micro_batches(self) -> int:
        """Most micro-batches that communicate in one step."""
        return 1 + max((key[2] for key in self.passes), default=0)

    def exposed_of(self, position: int, k: int) -> int:
        """Exposed time of one collective, 0 where unknown."""
        value = int(self.ranks[position].exposed_ns[k])
        return 0 if value == NULL else value

    def own_exposed(self, position: int, k: int) -> int:
        """Exposed time of one collective less waiting for peers."""
        waited = int(self.joined.arrivals.exposed_wait[position][k])
        return self.exposed_of(position, k) - (waited if waited != NULL else 0)

    @property
    def zero_optimization(self) -> Mapping[str, Any] | None:
        """DeepSpeed's section of the settings, where it is known."""
        for place in (self.description, self.description.get("settings"), self.description.get("config")):
            if isinstance(place, Mapping) and isinstance(place.get("zero_optimization"), Mapping):
                section: Mapping[str, Any] = place["zero_optimization"]
                return section
        return None

    def setting(self, name: str) -> Any:
        """A key of zero_optimization; None where the settings are not known or do not have it."""
        section = self.zero_optimization
        return None if section is None else section.get(name, section.get(name.removeprefix("stage3_")))

    def compute_in(self, phase: str) -> float:
        """Compute launched in a phase, a union over streams per rank, ns per step."""
        return self._compute_by_phase.get(phase, 0.0)

    @cached_property
    def _compute_by_phase(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for rank in self.ranks:
            rows = rank.activity.compute_rows
            trace = rank.trace
            times = trace.ts[rows]
            if rank.activity.on_device:
                launches = trace.launches[rows]
                times = np.where(launches >= 0, trace.ts[np.maximum(launches, 0)], times)
            codes, _ = rank.phases.at(times)
            inside = _in_used_steps(rank, trace.ts[rows])
            for code, name in enumerate(PHASES):
                own = rows[(codes == code) & inside]
                found[name] += _union(trace.ts[own], trace.end[own])
        return {name: self.mean(ns) for name, ns in found.items()}


def _states(rank: RankAnalysis, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """(state, ns, host event) of what the host did in a stretch of idle time."""
    pieces = rank.idle.host_state
    first = int(np.searchsorted(pieces.ends, start, side="right"))
    last = int(np.searchsorted(pieces.starts, end, side="left"))
    for k in range(first, last):
        ns = min(int(pieces.ends[k]), end) - max(int(pieces.starts[k]), start)
        yield CAUSES[int(pieces.codes[k])], ns, int(pieces.rows[k])


def _times(parts: Anatomy) -> dict[str, float]:
    return {
        "step": parts.duration, "compute": parts.compute, "comm": parts.comm, "exposed": parts.exposed_comm,
        "idle": parts.idle, "memory": parts.exposed_memory,
    }  # fmt: skip


def _in_used_steps(rank: RankAnalysis, times: NDArray[np.int64]) -> NDArray[np.bool_]:
    inside = np.zeros(len(times), np.bool_)
    for step in rank.steps.steps:
        if step.used:
            inside |= (times >= step.start) & (times < step.end)
    return inside


def _union(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
    return iv.total(iv.union(starts, ends))


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(r[name] for r in rows) / len(rows) for name in rows[0]} if rows else {}
