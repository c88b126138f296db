"""The wires: bandwidth far below what the link should give, payloads that take NCCL's slow path."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from z3trace.analyzers.findings import thresholds as th
from z3trace.analyzers.findings.base import Finding, Settings
from z3trace.analyzers.findings.evidence import Evidence
from z3trace.analyzers.ranks import Link
from z3trace.analyzers.ranks.links import LARGE_BYTES
from z3trace.analyzers.ranks.matching import members_of_groups
from z3trace.analyzers.trace import NULL

_DEVICES_PER_NODE = 8


def devices_per_node(evidence: Evidence) -> int:
    """Devices in one host, as the trace's metadata lists them; 8 where it does not."""
    devices = evidence.ranks[0].trace.metadata.get("deviceProperties")
    if isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices) > 1:
        return len(devices)
    return _DEVICES_PER_NODE


def device_name(evidence: Evidence) -> str:
    devices = evidence.ranks[0].trace.metadata.get("deviceProperties")
    if isinstance(devices, Sequence) and devices and isinstance(devices[0], Mapping):
        return str(devices[0].get("name", ""))
    return ""


def spans_nodes(evidence: Evidence, link: Link) -> bool | None:
    """Whether a group has members on several hosts; None where its size is not known."""
    per_node = devices_per_node(evidence)
    members = _members(evidence, link.group)
    hosts = _hosts(evidence)
    if members and all(rank in hosts for rank in members):
        return len({hosts[rank] for rank in members}) > 1
    if members:
        return len({rank // per_node for rank in members}) > 1
    return None if link.world is None else link.world > per_node


def _hosts(evidence: Evidence) -> dict[int, str]:
    """Rank -> host, where the run's record says."""
    ranks = evidence.description.get("ranks")
    return {
        entry["rank"]: str(entry["host"])
        for entry in (ranks if isinstance(ranks, list) else [])
        if isinstance(entry, Mapping) and isinstance(entry.get("rank"), int) and entry.get("host")
    }


def _members(evidence: Evidence, group: str | None) -> list[int]:
    text = members_of_groups(evidence.ranks[0].trace).get(group or "")
    try:
        found = ast.literal_eval(text) if text else []
    except (SyntaxError, ValueError):
        return []
    return [r for r in found if isinstance(r, int)] if isinstance(found, list) else []


def _limits(evidence: Evidence, link: Link) -> tuple[float, float, bool]:
    """(slow below, expected, whether between nodes) in GB/s of bus bandwidth."""
    if spans_nodes(evidence, link):
        return th.SLOW_INTER_NODE, th.EXPECTED_INTER_NODE, True
    name = device_name(evidence)
    nvlink = any(mark in name for mark in ("SXM", "H100", "H200", "H800", "B200", "GB200", "MI300", "MI250"))
    if nvlink and "PCIe" not in name:
        return th.SLOW_INTRA_NODE, th.EXPECTED_INTRA_NODE, False
    return th.SLOW_PCIE, th.EXPECTED_PCIE, False


def _slow(evidence: Evidence, between_nodes: bool) -> Finding | None:
    if not evidence.on_device or not evidence.joined.several:
        return None
    cost, slow = 0.0, []
    if _payloads(evidence).slower:
        return None  # that, not the link, is what is slow
    for link in evidence.joined.links:
        if link.bus_gb_per_s is None:
            continue
        limit, expected, inter = _limits(evidence, link)
        if inter is not between_nodes or link.bus_gb_per_s >= limit:
            continue
        exposed = evidence.mean(sum(
            evidence.own_exposed(p, k)
            for p, rank in enumerate(evidence.ranks)
            for k in np.flatnonzero(
                rank.collectives.is_kind(link.kind) & evidence.joined.used(p)
            ).tolist()
            if rank.collectives.group[k] == link.group
        ))  # fmt: skip
        cost += exposed * (1 - link.bus_gb_per_s / expected)
        slow.append({
            "group": link.group, "kind": link.kind, "world": link.world, "expected_gb_per_s": expected,
            "bus_gb_per_s": round(link.bus_gb_per_s, 2), "alpha_us": round(link.alpha_ns / 1e3, 1),
        })  # fmt: skip
    if not slow:
        return None
    reached = min(entry["bus_gb_per_s"] for entry in slow)  # type: ignore[type-var]
    if between_nodes:
        return Finding(
            "slow_inter_node_link",
            f"collectives between nodes reach {reached} GB/s of bus bandwidth",
            cost,
            {"links": slow, "devices_per_node": devices_per_node(evidence)},
            (*Settings(
                deepspeed=(f"zero_hpz_partition_size = {devices_per_node(evidence)}",
                           "zero_quantized_weights, zero_quantized_gradients"),
                fsdp2=("a 2-D mesh (HSDP): shard within a node, replicate between nodes",
                       f"reshard_after_forward={devices_per_node(evidence)}"),
                fsdp1=("sharding_strategy=HYBRID_SHARD",),
            ).of(evidence.framework if evidence.sharding else "none"),
             "nccl-tests between the nodes; NCCL_DEBUG=INFO: is every network card used, GPUDirect RDMA on?"),
        )  # fmt: skip
    return Finding(
        "slow_link",
        f"collectives within a node reach {reached} GB/s of bus bandwidth",
        cost,
        {"links": slow, "device": device_name(evidence)},
        ("NCCL_P2P_DISABLE unset, NCCL_DEBUG=INFO: which transport is used?",
         "nvidia-smi topo -m: are the devices connected by NVLink?"),
    )  # fmt: skip


def slow_link(evidence: Evidence) -> Finding | None:
    """A group inside one node is far below its link."""
    return _slow(evidence, between_nodes=False)


def slow_inter_node_link(evidence: Evidence) -> Finding | None:
    """A group over several nodes is limited by the network."""
    return _slow(evidence, between_nodes=True)


def _payload(evidence: Evidence, position: int, k: int) -> int | None:
    """Bytes that one rank contributes; None where unknown."""
    c = evidence.ranks[position].collectives
    if c.bytes[k] == NULL or c.world[k] in (NULL, 0):
        return None
    return int(c.bytes[k]) // int(c.world[k])


@dataclass(frozen=True)
class _Payloads:
    """Rates in bytes/ns of large aligned and unaligned transfers (medians; None without any), and the unaligned
    transfers themselves: (rank, index, rate)."""

    aligned: float | None
    unaligned: float | None
    odd: tuple[tuple[int, int, float], ...]

    @property
    def slower(self) -> bool:
        """Whether the unaligned ones are seen to be slower."""
        known = self.aligned is not None and self.unaligned is not None
        return known and (self.aligned or 0) >= th.UNALIGNED_SLOWDOWN * (self.unaligned or 0)


def _payloads(evidence: Evidence) -> _Payloads:
    rates: dict[bool, list[float]] = {True: [], False: []}
    odd: list[tuple[int, int, float]] = []
    for position, rank in enumerate(evidence.ranks):
        c, used = rank.collectives, evidence.joined.used(position)
        large = c.is_kind("all_gather", "reduce_scatter") & used & (c.start != NULL)
        for k in np.flatnonzero(large & (c.bytes > LARGE_BYTES)).tolist():
            payload = _payload(evidence, position, k)
            moved = int(evidence.joined.arrivals.transfer[position][k])
            time = moved if moved != NULL else int(c.end[k] - c.start[k])
            if payload is None or time <= 0:
                continue
            rate, aligned = int(c.bytes[k]) / time, payload % th.PAYLOAD_ALIGNMENT == 0
            rates[aligned].append(rate)
            if not aligned:
                odd.append((position, k, rate))
    return _Payloads(
        float(np.median(rates[True])) if rates[True] else None,
        float(np.median(rates[False])) if rates[False] else None,
        tuple(odd),
    )


def unaligned_payload(evidence: Evidence) -> Finding | None:
    """Shards that are no multiple of 16 bytes, and slower for it."""
    if not evidence.on_device:
        return None
    found = _payloads(evidence)
    if not found.slower or not found.aligned or not found.unaligned:
        return None
    usual = found.aligned
    cost = evidence.mean(
        sum(evidence.own_exposed(p, k) * max(0.0, 1 - rate / usual) for p, k, rate in found.odd)
    )
    count = evidence.mean(len(found.odd))
    return Finding(
        "unaligned_payload",
        f"{count:.0f} large collectives a step carry shards that are no multiple of 16 bytes",
        cost,
        {
            "collectives_per_step": round(count, 1), "gb_per_s": round(found.unaligned, 2),
            "aligned_gb_per_s": round(usual, 2),
        },
        ("sizes that divide by the number of ranks times 8 (vocabulary, hidden size): pad them",
         *Settings(z3trace=("z3trace pads its shards: nothing to set",),
                   fsdp2=("shard on dimension 0",)).of(evidence.framework if evidence.sharding else "none")),
    )  # fmt: skip
