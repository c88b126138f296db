"""Where the time of a window went: compute, communication, memory, idle. The parts add up to the window."""

from dataclasses import dataclass

from z3trace.analyzers import intervals as iv
from z3trace.analyzers.activity import Activity


@dataclass(frozen=True)
class Anatomy:
    """Durations in ns. duration = compute + exposed_comm + exposed_memory + idle, exactly."""

    duration: int
    compute: int
    comm: int
    memory: int
    overlapped: int
    exposed_comm: int
    exposed_memory: int
    idle: int

    @property
    def overlap_fraction(self) -> float | None:
        """overlapped / comm; None without communication."""
        return self.overlapped / self.comm if self.comm else None


def dissect(activity: Activity, start: int, end: int) -> Anatomy:
    """The anatomy of the window [start, end) in ns; device events are clipped to it."""
    compute = iv.clip(activity.compute, start, end)
    communication = iv.clip(activity.communication, start, end)
    memory = iv.clip(activity.memory, start, end)
    exposed_communication = iv.subtract(communication, compute)
    exposed_memory = iv.subtract(memory, iv.merge(compute, communication))
    idle = iv.complement(iv.merge(compute, communication, memory), start, end)
    parts = Anatomy(
        duration=max(0, end - start),
        compute=iv.total(compute),
        comm=iv.total(communication),
        memory=iv.total(memory),
        overlapped=iv.total(communication) - iv.total(exposed_communication),
        exposed_comm=iv.total(exposed_communication),
        exposed_memory=iv.total(exposed_memory),
        idle=iv.total(idle),
    )
    owned = parts.compute + parts.exposed_comm + parts.exposed_memory + parts.idle
    if owned != parts.duration:
        raise AssertionError(f"parts of the window add up to {owned} ns, not {parts.duration} ns")
    return parts


def whole_trace(activity: Activity) -> Anatomy | None:
    """The anatomy from the first start to the last end of all activity; None without activity."""
    busy = activity.busy
    return dissect(activity, int(busy[0, 0]), int(busy[-1, 1])) if len(busy) else None
