"""The model and settings with which the DeepSpeed traces of known truth were recorded, for the engine to run."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, DEPTH, HEADS, LENGTH = 1000, 256, 6, 4, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def option(truth: dict[str, Any], name: str, default: str = "") -> str:
    """What the recording was started with."""
    arguments = truth["recorded_with"]
    return str(arguments[arguments.index(name) + 1]) if name in arguments else default


def run_case(folder: Path) -> dict[str, Any]:
    """Train 6 steps; of step 5: what the schedule had carried out, what was counted, what was traced."""
    import z3trace.engine as z3
    from z3trace.engine.executor import Executor
    from z3trace.engine.schedule.interface import Gather

    truth = json.loads((folder / "truth.json").read_text())
    torch.manual_seed(0)
    model = Model(option(truth, "--ckpt") == "1")
    accumulation = truth["gradient_accumulation_steps"]
    zero = dict(truth["zero_optimization"])
    if option(truth, "--leaf") == "before":
        zero["leaf_module"] = {"classes": ["Block"]}
    config = {
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": truth["dtype"] == "bf16"},
        "zero_optimization": zero,
        "z3trace": {
            "schedule": "deepspeed",
            "leaf_classes_after": ["Block"] if option(truth, "--leaf") == "after" else [],
        },
    }
    engine: Any = z3.initialize(model, torch.optim.SGD, config)
    done: list[tuple[int, Any]] = []
    original = Executor._run

    def noted(self: Executor, action: Any) -> None:
        if engine.global_steps == 5 and isinstance(action, Gather):
            done.append((engine._progress.micro_batch, action))
        original(self, action)

    Executor._run = noted  # type: ignore[method-assign]
    try:
        for step in range(5):
            _step(engine, accumulation, step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            _step(engine, accumulation, 5)
    finally:
        Executor._run = original  # type: ignore[method-assign]
    return {
        "parameters": [(m.name, list(m.shape)) for p in engine.partitions.values() for m in p.members],
        "call_order": engine.describe()["call_order"],
        "persistent": [n for n, p in engine.describe()["parameters"].items() if p["persistent"]],
        "gathers": [
            (micro, a.phase.value, a.module, sorted(a.partitions)) for micro, a in done if a.reason.value != "post_step"
        ],
        "totals": engine.counter.totals(5),
        "trace": _traced(profiler),
    }  # fmt: skip


def _step(engine: Any, accumulation: int, step: int) -> None:
    for index in range(accumulation):
        seed = (step * accumulation + index) * dist.get_world_size() + dist.get_rank()
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(tokens, tokens.roll(-1, 1)))
        engine.step()


def _traced(profiler: Any) -> dict[tuple[str, str], int]:
    """Collectives by phase and kind, from labels and the operations that the labels enclose."""
    from z3trace.engine.labels import parse_label

    kinds = {"gather": "c10d::_allgather_base_", "reduce": "c10d::alltoall_base_"}
    events = sorted(profiler.events(), key=lambda e: e.time_range.start)
    operations = [e for e in events if e.name.startswith("c10d::")]
    counts: dict[tuple[str, str], int] = {}
    labels = 0
    for event in events:
        label = parse_label(event.name)
        if label is None or label.verb not in kinds:
            continue
        inside = [
            o.name for o in operations if event.time_range.start <= o.time_range.start <= event.time_range.end
        ]
        assert inside == [kinds[label.verb]], (event.name, inside)
        labels += 1
        key = (label.text("phase") or "", label.verb)
        counts[key] = counts.get(key, 0) + 1
    assert labels == sum(o.name in kinds.values() for o in operations)
    return counts


def run_cases(folders: list[Path]) -> list[dict[str, Any]]:
    return [run_case(folder) for folder in folders]
