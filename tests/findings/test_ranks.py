"""Ranks joined: sequences, clocks, transfer and waiting, allocator and memory events."""

import json

import numpy as np
import pytest

from z3trace.analyzers import analyze, open_run
from z3trace.analyzers.memory import Held, peak_of
from z3trace.analyzers.ranks.clocks import align
from z3trace.analyzers.trace import NULL


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def row_of(report, finding):
    return next(row for row in report["findings"] if row["id"] == finding)


def test_first_difference_of_sequences_is_shown(sim, tmp_path):
    folder = sim.write_run(tmp_path / "run", sim.Plan(), sim.Plan(missing_gather=True))
    row = row_of(analyze(open_run([folder])), "mismatched_collectives")
    size = sim.Plan().layer_elements // 4096 * 4096 * 2
    assert (row["severity"], row["evidence"]["step"], row["evidence"]["index"]) == ("critical", 2, 3)
    assert row["evidence"]["seen"] == [
        {"rank": 0, "kind": "all_gather", "bytes": size}, {"rank": 1, "kind": "all_gather", "bytes": size // 2},
    ]  # fmt: skip


def test_a_sequence_that_ends_earlier_is_information(sim, tmp_path):
    folder = sim.write_run(tmp_path / "run", sim.Plan(), sim.Plan())

    def cut(document):
        last = max(e["ts"] for e in document["traceEvents"] if e["name"] == "c10d::_reduce_scatter_base_")
        document["traceEvents"] = [
            e for e in document["traceEvents"] if e["ts"] < last or "Profiler" in e["name"]
        ]

    edit(folder / "rank1.json", cut)
    row = row_of(analyze(open_run([folder])), "mismatched_collectives")
    assert row["severity"] == "info"
    assert row["evidence"]["seen"][1] == {"rank": 1, "kind": None, "bytes": None}


def test_groups_of_one_name_with_other_members_are_not_joined(sim, tmp_path):
    folder = sim.write_run(tmp_path / "run", sim.Plan(), sim.Plan())
    edit(folder / "rank1.json", lambda d: d["distributedInfo"]["pg_config"][0].update(ranks=[8, 9]))
    report = analyze(open_run([folder]))
    assert [row["joined_collectives"] for row in report["ranks"]] == [0, 0]
    assert all(row["wait_ns"] is None for row in report["ranks"])
    assert any("no collective in common" in note for note in report.notes)


def test_one_rank_says_what_cannot_be_told(sim, tmp_path):
    sim.Rank(sim.Plan()).write(tmp_path / "rank0.json")
    report = analyze(open_run([tmp_path / "rank0.json"]))
    assert report["ranks"].records()[0]["wait_ns"] is None
    assert any(note.startswith("one rank: time in collectives cannot be split") for note in report.notes)
    assert "record and give the traces of all ranks" in row_of(report, "incomplete_trace")["settings"]


@pytest.mark.parametrize("skew", [0, 7_000_000, -2_500_000])
def test_clocks_are_aligned_before_anyone_is_called_late(sim, tmp_path, skew):
    folder = sim.write_run(tmp_path / "run", sim.Plan(), sim.Plan(slow=1.3))

    def shift(document):
        for event in document["traceEvents"]:
            event["ts"] += skew / 1000

    edit(folder / "rank1.json", shift)
    report = analyze(open_run([folder]))
    assert report["ranks"].column("clock_skew_ns") == [0, pytest.approx(skew, abs=1000)]
    assert row_of(report, "straggler")["evidence"]["ranks"] == [1]
    assert any("clocks differ" in note for note in report.notes) is bool(skew)


def test_lateness_in_one_of_many_steps_is_no_habit(sim, tmp_path):
    folder = sim.write_run(tmp_path / "run", sim.Plan(steps=6), sim.Plan(steps=6, slow=1.0))
    report = analyze(open_run([folder]))
    assert "straggler" not in [row["id"] for row in report["findings"]]


def test_noise_of_ends_is_not_taken_for_skew():
    ends = np.array([[0, 900_000], [10, -400_000], [20, 500_000], [30, 40_000], [40, -300_000]], np.int64)
    assert not align(ends).differ
    ends = np.column_stack((np.arange(5), np.arange(5) + 5_000_000))
    assert align(ends).skew_ns.tolist() == [0, 5_000_000]


def test_clocks_of_ranks_without_a_common_collective_follow_others():
    ends = np.full((12, 3), NULL, np.int64)
    ends[:6, 0], ends[:6, 1] = np.arange(6), np.arange(6) + 1_000_000
    ends[6:, 1], ends[6:, 2] = np.arange(6) + 1_000_000, np.arange(6) + 4_000_000
    assert align(ends).skew_ns.tolist() == [0, 1_000_000, 4_000_000]


def test_transfer_and_wait_add_up_and_name_the_last(sim, tmp_path):
    folder = sim.write_run(tmp_path / "run", sim.Plan(), sim.Plan(dataloader=5_000_000))
    report = analyze(open_run([folder]))
    for rank in report.ranks:
        gathers = list(report["gathers"].where(rank=rank.rank))
        assert gathers and all(
            g["transfer_ns"] + g["peer_wait_ns"] == g["end_ns"] - g["start_ns"] for g in gathers
        )
    first, second = report["ranks"].records()
    assert first["exposed_wait_ns"] == second["caused_wait_ns"] > 4_000_000
    assert (second["exposed_wait_ns"], first["caused_wait_ns"]) == (0, 0)
    assert second["last_arrivals"] > first["last_arrivals"]


def test_peak_is_split_by_why_it_is_held():
    held = [
        Held(0, 0, 100, 8, True), Held(0, 10, 60, 4, False), Held(5, 20, 40, 2, False), Held(6, 50, 90, 1, False),
        Held(70, 75, 80, 1, False),
    ]  # fmt: skip
    peak = peak_of(held)
    assert (peak.at, peak.bytes, peak.persistent) == (6, 15, 8)
    assert (peak.prefetched, peak.in_use, peak.kept) == (7, 0, 0)
    later = peak_of([Held(0, 0, 100, 4, False), Held(10, 10, 100, 2, False), Held(20, 50, 60, 1, False)])
    assert (later.at, later.prefetched, later.in_use, later.kept) == (20, 1, 2, 4)
    assert peak_of([]) is None


def test_allocator_calls_and_memory_events(sim, tmp_path):
    sim.Rank(sim.Plan(malloc=500_000, allocated=10**9, layers=4)).write(tmp_path / "rank0.json")
    rows = analyze(open_run([tmp_path / "rank0.json"]))["memory"].records()
    assert [row["allocator_calls"] for row in rows] == [2, 2, 2]
    assert all(row["allocator_ns"] >= 1_000_000 for row in rows)
    assert rows[-1]["peak_allocated_bytes"] == 10**9
    assert rows[-1]["peak_reserved_bytes"] == 2 * 10**9
    assert rows[0]["peak_allocated_bytes"] is None
