"""Which files a path names, which rank each is, and what is known about the run."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from z3trace.analyzers.inputs import open_run, rank_from_name
from z3trace.analyzers.load import load
from z3trace.errors import UserError

EVENT = {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": 1, "dur": 1}


def write(path: Path, rank: int | None = None, **metadata: Any) -> Path:
    if rank is not None:
        metadata["distributedInfo"] = {"rank": rank, "world_size": 4}
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps({**metadata, "traceEvents": [EVENT]}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_run_directory(tmp_path: Path) -> None:
    for rank in (1, 0):
        write(tmp_path / f"rank{rank}.pt.trace.json.gz", rank)
    (tmp_path / "run.json").write_text('{"world": 2, "framework": "z3trace"}')
    (tmp_path / "notes.txt").write_text("mine")
    run = open_run([tmp_path])
    assert run.ranks == (0, 1)
    assert run.description == {"world": 2, "framework": "z3trace"}
    assert run.model is None
    assert run.notes == []


def test_a_model_file_beside_the_traces_or_given(tmp_path: Path) -> None:
    write(tmp_path / "a" / "rank0.json", 0)
    beside = {"modules": ["", "layer"], "parameters": {"layer.weight": {"shape": [2], "numel": 2}}}
    (tmp_path / "a" / "model.json").write_text(json.dumps(beside))
    run = open_run([tmp_path / "a"])
    assert run.description == beside == run.model
    other = tmp_path / "other.json"
    other.write_text('{"modules": ["x"]}')
    assert open_run([tmp_path / "a"], model=other).model == {"modules": ["x"]}
    for text, words in (("[1]", "object"), ("{", "JSON")):
        other.write_text(text)
        with pytest.raises(UserError, match=words):
            open_run([tmp_path / "a"], model=other)
    with pytest.raises(UserError, match="no such file"):
        open_run([tmp_path / "a"], model=tmp_path / "none.json")


def test_what_the_trace_itself_says_of_the_run(tmp_path: Path) -> None:
    own = {"rank": 2, "world_size": 4, "modules": ["", "a"]}
    run = open_run([write(tmp_path / "t.json", z3trace=own)])
    assert (run.ranks, run.description, run.model) == ((2,), own, own)
    assert run.traces[0].world_size == 4


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-12.json.gz", 12), ("rank12_trace.json", 12), ("rank0.pt.trace.json.gz", 0), ("trace_rank_3.json", 3),
        ("Rank7.json", 7), ("worker5.1694128201545.pt.trace.json", 5), ("worker-5_step_12.json", 5),
        ("host_1234.1694128201545.pt.trace.json", None), ("frank3.json", None), ("trace.json", None),
    ],
)  # fmt: skip
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_from_name(f"/somewhere/rank9/{name}") == rank


def test_the_order_of_evidence(tmp_path: Path) -> None:
    assert open_run([write(tmp_path / "rank7.json", 1, z3trace={"rank": 2})]).ranks == (1,)
    assert open_run([write(tmp_path / "rank7.json", None, z3trace={"rank": 2})]).ranks == (2,)
    assert open_run([write(tmp_path / "rank7.json")], rank_regex=r"(\d+)/rank").ranks == (7,)
    first = write(tmp_path / "n3" / "trace.json")
    second = write(tmp_path / "n4" / "trace.json")
    run = open_run([first, second], rank_regex=r"n(\d+)/")
    assert run.ranks == (3, 4)
    assert [trace.path for trace in run.traces] == [str(first), str(second)]
    with pytest.raises(UserError, match="--rank-regex"):
        open_run([first, second])
    alone = open_run([first])
    assert alone.ranks == (0,)
    assert "taken as rank 0" in alone.notes[0]


@pytest.mark.parametrize("pattern", ["(", r"n\d+"])
def test_a_wrong_pattern(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UserError, match="--rank-regex"):
        open_run([write(tmp_path / "t.json")], rank_regex=pattern)


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    write(tmp_path / "a.json", 1)
    write(tmp_path / "b.json", 1)
    with pytest.raises(UserError, match=r"a\.json and .*b\.json both claim to be rank 1"):
        open_run([tmp_path])


def test_globs_several_paths_and_a_choice_of_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path / "one" / f"rank{rank}.json", rank)
    write(tmp_path / "two" / "rank3.json.gz", 3)
    assert open_run([str(tmp_path / "one" / "rank[01].json")]).ranks == (0, 1)
    assert open_run([str(tmp_path / "**" / "*.json*")]).ranks == (0, 1, 2, 3)
    assert open_run([str(tmp_path / "*")]).ranks == (0, 1, 2, 3)
    assert open_run([tmp_path / "one", tmp_path / "two"], ranks=[3, 1]).ranks == (1, 3)
    same = tmp_path / "one" / "rank0.json"
    assert open_run([same, same]).ranks == (0,)
    with pytest.raises(UserError, match="no trace of rank 9: there are ranks 0, 1, 2"):
        open_run([tmp_path / "one"], ranks=[9])


def test_other_files_in_a_directory_are_no_traces(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", 0)
    (tmp_path / "report.json").write_text('{"schema": "z3trace.report/1", "steps": []}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "rank1.json").write_bytes(b"")
    run = open_run([tmp_path])
    assert run.ranks == (0,)
    (note,) = run.notes
    assert "rank1.json: empty" in note and note.startswith("left out")
    with pytest.raises(UserError, match="without traceEvents"):
        open_run([tmp_path / "report.json"])


def test_paths_that_name_no_trace(tmp_path: Path) -> None:
    cases: list[tuple[list[Path | str], str]] = [
        ([], "no trace given"),
        ([tmp_path / "none.json"], "none.json: no such file"),
        ([str(tmp_path / "no*.json")], "nothing matches"),
        ([tmp_path], "no traces in this directory"),
    ]
    for paths, words in cases:
        with pytest.raises(UserError, match=words) as error:
            open_run(paths)
        assert "\n" not in str(error.value)
    write(tmp_path / "iteration_10" / "rank0_trace.json")
    with pytest.raises(UserError, match="there are files in iteration_10"):
        open_run([tmp_path])
    (tmp_path / "a.json").write_bytes(b"")
    (tmp_path / "b.json").write_bytes(b"{")
    with pytest.raises(UserError, match=r"no readable trace among 2 files: .*a\.json: empty"):
        open_run([tmp_path])


def test_damage_is_a_note_of_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", 0)
    path.write_bytes(path.read_bytes()[:-10])
    run = open_run([path])
    assert run.notes == [f"{path}: the file ends within an event: that event is lost"]


@pytest.mark.distributed
def test_several_processes_load_the_same(shared_traces: Path) -> None:
    folder = shared_traces / "gpu/v100_dlrm_8rank"
    one, two = open_run([folder]), open_run([folder], jobs=2)
    assert one.ranks == two.ranks == tuple(range(8))
    for a, b in zip(one.traces, two.traces, strict=True):
        assert np.array_equal(a.ts, b.ts) and np.array_equal(a.launches, b.launches)
        assert a.values("name") == b.values("name")
        assert not b.ts.flags.writeable


def test_a_trace_survives_pickling(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "t.json", 3)).with_rank(5)
    again = pickle.loads(pickle.dumps(trace))
    assert (again.rank, again.world_size, again.ts.tolist()) == (5, 4, [1000])
