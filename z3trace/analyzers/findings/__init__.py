"""Findings: what is wrong with a run, most costly first, and silence where nothing is."""

from collections.abc import Callable, Mapping
from typing import Any

from z3trace.analyzers.findings import (
    copies,
    fragmentation,
    holding,
    host,
    invalidation,
    links,
    optimizer,
    overlap,
    peers,
    recording,
    repeats,
    setup,
)
from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding
from z3trace.analyzers.findings.evidence import Evidence
from z3trace.analyzers.ranks import JoinedRanks

__all__ = ["REGISTRY", "Evidence", "Finding", "find"]

Finder = Callable[[Evidence], Finding | None]

REGISTRY: tuple[Finder, ...] = (
    fragmentation.fragmented_all_gathers,
    fragmentation.tiny_parameters,
    fragmentation.expert_gathers,
    fragmentation.fragmented_reduce_scatters,
    overlap.no_prefetch,
    overlap.no_backward_prefetch,
    overlap.comm_on_compute_stream,
    overlap.serialised_communicator,
    overlap.whole_model_gather,
    optimizer.post_step_persistent_gathers,
    repeats.backward_regathers,
    repeats.last_unit_regather,
    repeats.accumulation_regathers,
    repeats.checkpoint_regathers,
    repeats.generation_regathers,
    invalidation.trace_invalidated,
    host.host_bound,
    host.host_sync,
    host.allocator_stalls,
    host.data_wait,
    host.offload_bound,
    peers.straggler,
    peers.straggler_dataloader,
    peers.mismatched_collectives,
    links.slow_link,
    links.slow_inter_node_link,
    links.unaligned_payload,
    copies.copy_overhead,
    holding.gathered_memory,
    setup.not_sharded,
    setup.dead_knob,
    setup.single_device_connection,
    recording.incomplete_trace,
    recording.profiler_overhead,
)

_ORDER = {"critical": 0, "warning": 1, "info": 2}


def find(
    joined: JoinedRanks,
    *,
    framework: str,
    device: str,
    world_size: int | None,
    description: Mapping[str, Any],
    registry: tuple[Finder, ...] = REGISTRY,
) -> list[dict[str, Any]]:
    """Rows of the findings table: those without a cost that are critical first, then by cost, then the rest."""
    evidence = Evidence(joined, framework, device, world_size, description)
    found = [finding for finder in registry if (finding := finder(evidence)) is not None]
    worth = [f for f in found if f.severity is not None or _matters(f, evidence.step_ns)]
    rows = [finding.row(evidence.step_ns) for finding in worth]
    return sorted(rows, key=lambda row: (_ORDER[row["severity"]], -(row["cost_ns_per_step"] or 0), row["id"]))


def _matters(finding: Finding, step_ns: float) -> bool:
    return finding.cost_ns is None or finding.cost_ns >= th.INFO_FRACTION * step_ns
