"""The tables of a report: every column, its unit and its meaning."""

from z3trace.analyzers.table import Column, Schema


def _rank_step() -> tuple[Column, ...]:
    return (
        Column("rank", "integer", "", "rank of the process in the job"),
        Column("step", "integer", "", "number of the training step, as its mark in the trace says"),
    )


def _group() -> tuple[Column, ...]:
    return (
        Column("group", "text", "", "name of the process group; absent where the backend does not tell"),
        Column("world", "integer", "", "ranks in the group"),
    )


def _anatomy() -> tuple[Column, ...]:
    return (
        Column("compute_ns", "integer", "ns", "union of compute activity"),
        Column("comm_ns", "integer", "ns", "union of communication"),
        Column("memory_ns", "integer", "ns", "union of memory copies and fills"),
        Column("overlapped_ns", "integer", "ns", "time in both the compute and the communication union"),
        Column("exposed_comm_ns", "integer", "ns", "communication that no compute hides"),
        Column("idle_ns", "integer", "ns", "window minus all activity"),
    )


WHOLE_TRACE = Schema(
    "whole_trace",
    (
        Column("rank", "integer", "", "rank of the process in the job"),
        Column("file", "text", "", "the trace's file name"),
        Column("duration_ns", "integer", "ns", "first start to last end of the activity"),
        *_anatomy(),
    ),
)

STEPS = Schema(
    "steps",
    (
        *_rank_step(),
        Column("start_ns", "integer", "ns", "start of the step's window on the trace's clock"),
        Column("duration_ns", "integer", "ns", "length of the window"),
        *_anatomy(),
        Column(
            "exposed_memory_ns", "integer", "ns", "memory activity under neither compute nor communication"
        ),
        Column("overlap_fraction", "number", "", "overlapped_ns / comm_ns; absent without communication"),
        Column("used", "flag", "", "whether averages are taken over this step"),
    ),
)

COLLECTIVES = Schema(
    "collectives",
    (
        *_rank_step(),
        Column("phase", "text", "", "forward, backward, optimizer or other: where it was issued"),
        Column("kind", "text", "", "all_gather, reduce_scatter, all_reduce, ..."),
        *_group(),
        Column("count", "integer", "", "collectives issued"),
        Column("bytes", "integer", "bytes", "all-gather: output; reduce-scatter: input; others: message"),
        Column("exposed_ns", "integer", "ns", "time in them that no compute hides, each ns owned once"),
    ),
)

LAYERS = Schema(
    "layers",
    (
        *_rank_step(),
        Column("layer", "text", "", "repeated block that owns the parameters; root: the rest; a+b: several"),
        Column("phase", "text", "", "where it was issued"),
        Column("kind", "text", "", "all_gather, reduce_scatter, ...; absent where the layer only computes"),
        Column("count", "integer", "", "collectives issued"),
        Column("bytes", "integer", "bytes", "as in collectives"),
        Column("compute_ns", "integer", "ns", "compute of the layer in this phase"),
        Column("exposed_ns", "integer", "ns", "as in collectives"),
    ),
)

GATHERS = Schema(
    "gathers",
    (
        *_rank_step(),
        Column("micro_batch", "integer", "", "index in the step"),
        Column("issued_phase", "text", "", "phase in which it was issued"),
        Column("issued_in", "text", "", "module in whose hook it was issued; empty: the model itself"),
        Column("used_phase", "text", "", "phase of its first use"),
        Column("used_in", "text", "", "module of its first use"),
        Column("unit", "text", "", "module whose parameters it fetches"),
        Column("parameters", "list", "", "names of the parameters in it"),
        Column("reason", "text", "", "demand, prefetch, post_step or recompute"),
        *_group(),
        Column("bytes", "integer", "bytes", "output bytes"),
        Column("early_ns", "integer", "ns", "of a prefetch: from its end to its first use; negative: late"),
        Column(
            "again_after_ns", "integer", "ns", "since the end of the last gather of the same in this step"
        ),
        Column(
            "start_ns", "integer", "ns", "start of the transfer on the trace's clock (issue when unknown)"
        ),
        Column("end_ns", "integer", "ns", "end of the transfer"),
        Column("exposed_ns", "integer", "ns", "time in it that no compute hides"),
        Column("transfer_ns", "integer", "ns", "shortest over the ranks; absent with one rank"),
        Column("peer_wait_ns", "integer", "ns", "the rest: waiting for peers; absent with one rank"),
    ),
)

IDLE = Schema(
    "idle",
    (
        *_rank_step(),
        Column(
            "split", "text", "", "host_state: what the host did at that ns; cause: what the gap is due to"
        ),
        Column("name", "text", "", "state or cause"),
        Column("gaps", "integer", "", "pieces of idle time"),
        Column("idle_ns", "integer", "ns", "idle time; the rows of one split add up to the step's idle time"),
        Column("where", "text", "", "the operation or range that had most of it"),
    ),
)

RANKS = Schema(
    "ranks",
    (
        Column("rank", "integer", "", "rank of the process in the job"),
        Column(
            "late_ns", "integer", "ns", "by how much it came after the others where it was last, per step"
        ),
        Column("last_arrivals", "integer", "", "collectives at which it arrived last, in the used steps"),
        Column("joined_collectives", "integer", "", "collectives seen on other ranks too, in the used steps"),
        Column("wait_ns", "integer", "ns", "in collectives, waiting for peers, per step"),
        Column("exposed_wait_ns", "integer", "ns", "the part of it that no compute hides"),
        Column("transfer_ns", "integer", "ns", "in collectives, transferring, per step"),
        Column("caused_wait_ns", "integer", "ns", "exposed waiting for this rank, median over the others"),
        Column("clock_skew_ns", "integer", "ns", "by how much its clock is ahead of the first rank's"),
    ),
)

LINKS = Schema(
    "links",
    (
        Column("group", "text", "", "process group; absent where the trace does not name it"),
        Column("kind", "text", "", "all_gather, reduce_scatter or all_reduce"),
        Column("world", "integer", "", "members of the group"),
        Column("count", "integer", "", "transfers the fit rests on, all ranks and steps"),
        Column("alpha_ns", "integer", "ns", "fixed time of one transfer, fitted"),
        Column("bus_gb_per_s", "number", "GB/s", "bus bandwidth of the largest messages"),
        Column("waits_known", "flag", "", "whether waiting for peers was taken out"),
    ),
)

MEMORY = Schema(
    "memory",
    (
        *_rank_step(),
        Column(
            "peak_gathered_bytes", "integer", "bytes", "most that gathered parameters hold at one instant"
        ),
        Column("at_ns", "integer", "ns", "that instant, on the host"),
        Column("prefetched_bytes", "integer", "bytes", "then gathered ahead of its first use"),
        Column("in_use_bytes", "integer", "bytes", "then in the unit that runs"),
        Column("kept_bytes", "integer", "bytes", "then kept after its use"),
        Column("persistent_bytes", "integer", "bytes", "then gathered after the optimizer's step, to stay"),
        Column("allocator_calls", "integer", "", "allocations and frees by the driver inside the step"),
        Column("allocator_ns", "integer", "ns", "host time in them"),
        Column("peak_allocated_bytes", "integer", "bytes", "by the profiler's memory events"),
        Column("peak_reserved_bytes", "integer", "bytes", "by the profiler's memory events"),
    ),
)

FINDINGS = Schema(
    "findings",
    (
        Column("id", "text", "", "stable name"),
        Column("severity", "text", "", "info, warning or critical"),
        Column("title", "text", "", "one sentence"),
        Column("evidence", "mapping", "", "the numbers behind it; keys end in their unit"),
        Column("cost_ns_per_step", "integer", "ns", "what a step would lose without it; absent: not known"),
        Column("settings", "list", "", "what to change, in the words of the run's framework"),
    ),
)

RECOMMENDATIONS = Schema(
    "recommendations",
    (
        Column("id", "text", "", "stable name"),
        Column("setting", "text", "", "what to change"),
        Column("from", "text", "", "its value now"),
        Column("to", "text", "", "the value to try"),
        Column("predicted_step_ns", "integer", "ns", "predicted step time"),
        Column("predicted_change_fraction", "number", "", "predicted change of the step time"),
        Column("predicted_memory_bytes", "integer", "bytes", "predicted change of the memory peak"),
        Column("confidence", "text", "", "how sure"),
        Column("how", "mapping", "", "deepspeed_config and code"),
    ),
)

ALL = (
    WHOLE_TRACE,
    STEPS,
    COLLECTIVES,
    LAYERS,
    GATHERS,
    IDLE,
    RANKS,
    LINKS,
    MEMORY,
    FINDINGS,
    RECOMMENDATIONS,
)
