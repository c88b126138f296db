"""What each stage-3 knob does to the collectives of a step, predicted by the schedule; nothing is run.

    python benchmarks/knobs.py > docs/knobs.md

The model is a transformer of 6 blocks of width 256 with a vocabulary of 1000: 74 parameters, 5,250,560
elements, in bf16 on 2 ranks.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from z3trace.engine.schedule.interface import Collective, Phase
from z3trace.engine.schedule.model_file import Description, parse_description
from z3trace.engine.schedule.predict import predict
from z3trace.engine.schedule.settings import KNOBS, Effect, LeafModules, Offload, auto_values

DEPTH, WIDTH, VOCABULARY = 6, 256, 1000
BLOCKS = [f"blocks.{number}" for number in range(DEPTH)]
STEADY_STEP = 2  # the order is recorded in the first micro-batch

REUSE, PERSISTENCE, PREFETCH, LIVE = (
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
)
BARE = {REUSE: 0, PERSISTENCE: 0, PREFETCH: 0}
"""Nothing kept, nothing prefetched: each module gathers its own parameters, forward and backward."""


@dataclass(frozen=True)
class Row:
    """One line of the table: settings, and what else differs."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """Rows that vary one thing, and what they show."""

    title: str
    reading: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Numbers:
    """Collectives of one steady optimizer step: how many, and the megabytes (1e6) of their outputs
    (gathers) or inputs (reductions)."""

    forward: int
    forward_mb: float
    backward: int
    backward_mb: float
    step: int
    step_mb: float
    reductions: int
    reductions_mb: float


def short(value: Any) -> str:
    """A setting as people write it: 5e7 rather than 50000000."""
    if isinstance(value, LeafModules):
        return "the Mixtral, Qwen2-MoE and Qwen3-MoE blocks"
    if isinstance(value, Offload):
        return value.device
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if value == sys.maxsize:
        return "unlimited"
    digits = str(value).rstrip("0")
    if value >= 10_000 and len(digits) <= 2:
        return f"{'.'.join(digits)}e{len(str(value)) - 1}"
    return f"{value:,}"


def knob(key: str, *values: Any, base: Mapping[str, Any] = BARE) -> tuple[Row, ...]:
    return tuple(Row(f"{key} = {short(value)}", {**base, key: value}) for value in values)


BLOCKS_OF_ROWS = (
    Block(
        "Defaults",
        "The defaults are larger than a small model: the root's fetch prefetches everything in one gather, "
        "backward finds it there, and each of the 54 persistent parameters costs a tiny gather in step().",
        (Row("defaults"),),
    ),
    Block(
        "Nothing kept, nothing prefetched",
        "The unit of a fetch is the hooked module: 38 of them own parameters, each gathers both ways. "
        "All rows below start from here unless they say otherwise.",
        (
            Row("reuse 0, persistence 0, prefetch 0", BARE),
            Row("the same on 3 ranks (padding)", BARE, {"world_size": 3}),
            Row(
                "the same, blocks checkpointed (recompute gathers again)",
                BARE,
                {"calls": {"checkpointed": BLOCKS}},
            ),
        ),
    ),
    Block(
        "Leaf modules",
        "A leaf block is one gather instead of six. Set after deepspeed.initialize it still gathers whole, "
        "but its children keep their hooks: with prefetching the two differ.",
        (
            Row("leaf_module classes = [Block]", {**BARE, "leaf_module": {"classes": ["Block"]}}),
            Row("Block made a leaf after initialize", BARE, {"leaves_after": BLOCKS}),
            *knob("stage3_module_granularity_threshold", 90_000),
            Row(
                "leaf Block, prefetch 8e5",
                {**BARE, PREFETCH: 800_000, "leaf_module": {"classes": ["Block"]}},
            ),
            Row("leaf after initialize, prefetch 8e5", {**BARE, PREFETCH: 800_000}, {"leaves_after": BLOCKS}),
            Row(
                "leaf Block, reuse 2e6",
                {**BARE, REUSE: 2_000_000, "leaf_module": {"classes": ["Block"]}},
            ),
        ),
    ),
    Block(
        "Persistent parameters",
        "Persistence moves gathers from forward and backward into step(), where each parameter is a "
        "collective of its own: fewer elements, many more launches.",
        knob(PERSISTENCE, 0, 10_000, 100_000, 1_000_000),
    ),
    Block(
        "Reuse distance",
        "Only the end of forward and the beginning of backward are near each other: half the distance is "
        "what backward saves. By default (1e9) a small model is never gathered again.",
        knob(REUSE, 0, 800_000, 2_000_000, 1_000_000_000),
    ),
    Block(
        "Prefetch bucket",
        "Every one of the 114 module calls may prefetch another bucket, so a bucket of one layer (8e5) has "
        "the whole model on its way within six calls, and the run-ahead crosses into backward. A huge "
        "bucket is one gather that everything waits for.",
        knob(PREFETCH, 0, 1, 100_000, 800_000, 10_000_000_000),
    ),
    Block(
        "Live parameters",
        "The only real cap on run-ahead: with a large bucket it brings back prefetching that keeps pace, in "
        "backward too.",
        knob(LIVE, 1_000_000, 2_000_000, 1_000_000_000, base={**BARE, PREFETCH: 50_000_000}),
    ),
    Block(
        "Reduce bucket",
        "Gradients are reduced whenever the next one does not fit, and at the end of every backward.",
        knob("reduce_bucket_size", 65_536, 800_000, 500_000_000),
    ),
    Block(
        "Gradient accumulation",
        "The order covers one forward and backward: every micro-batch gathers and reduces all over again.",
        (
            Row(
                "4 micro-batches, persistence 1e4, prefetch 8e5",
                {**BARE, PERSISTENCE: 10_000, PREFETCH: 800_000},
                {"gradient_accumulation_steps": 4},
            ),
        ),
    ),
    Block(
        "The Trainer's auto",
        "Buckets of h² reduce almost every parameter alone; 0.9 h² prefetches about one matrix a gather.",
        (Row(f"auto for a hidden size of {WIDTH}", auto_values(WIDTH)),),
    ),
    Block(
        "How a fetch is carried out",
        "Sequential gathers are one per parameter (and set the prefetch to 1 element); all-reduce fetching "
        "replaces gathers of several parameters (not counted as gathers here).",
        (
            *knob("stage3_allgather_sequential", True),
            *knob("stage3_use_all_reduce_for_fetch_params", True),
            *knob("allgather_bucket_size", 10_000_000_000),
        ),
    ),
)


def transformer() -> dict[str, Any]:
    """The model's description, as a model.json would have it."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, WIDTH)}
    modules = {"": "model.Transformer", "embed": "torch.nn.Embedding", "blocks": "torch.nn.ModuleList"}
    for block in BLOCKS:
        modules[block] = "model.Block"
        for path, kind, size in (
            ("ln1", "LayerNorm", ()),
            ("attn", "Attention", None),
            ("attn.qkv", "Linear", (3 * WIDTH, WIDTH)),
            ("attn.out", "Linear", (WIDTH, WIDTH)),
            ("ln2", "LayerNorm", ()),
            ("mlp", "MLP", None),
            ("mlp.fc1", "Linear", (4 * WIDTH, WIDTH)),
            ("mlp.fc2", "Linear", (WIDTH, 4 * WIDTH)),
        ):
            modules[f"{block}.{path}"] = f"model.{kind}"
            if size is not None:
                shapes[f"{block}.{path}.weight"] = size or (WIDTH,)
                shapes[f"{block}.{path}.bias"] = size[:1] or (WIDTH,)
    modules["head"] = "torch.nn.Linear"
    shapes["head.weight"] = (VOCABULARY, WIDTH)
    return {
        "modules": list(modules),
        "classes": modules,
        "parameters": {name: {"shape": list(shape)} for name, shape in shapes.items()},
        "dtype": "bfloat16",
        "world_size": 2,
    }


def describe(row: Row) -> Description:
    settings = {"stage": 3, "leaf_module": {"classes": []}, **row.settings}
    return parse_description({**transformer(), "zero_optimization": settings, **row.more})


def measure(row: Row) -> Numbers:
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for one in predict(describe(row), STEADY_STEP + 1):
        gather = one.kind is Collective.ALL_GATHER
        if one.step == STEADY_STEP and (gather or one.reason == "gradient"):
            key = one.phase.value if gather else "reductions"
            counts[key] += 1
            sizes[key] += one.bytes

    def megabytes(key: str) -> float:
        return round(sizes[key] / 1e6, 2)

    return Numbers(
        counts[Phase.FORWARD.value],
        megabytes(Phase.FORWARD.value),
        counts[Phase.BACKWARD.value],
        megabytes(Phase.BACKWARD.value),
        counts[Phase.OPTIMIZER.value],
        megabytes(Phase.OPTIMIZER.value),
        counts["reductions"],
        megabytes("reductions"),
    )


def page() -> Iterable[str]:
    yield "# The stage-3 knobs"
    yield ""
    yield "This page is printed by `python benchmarks/knobs.py`. Its numbers come from the schedule: the very"
    yield "code that the engine runs and the simulator predicts with. Nothing is measured; that DeepSpeed 0.19.8"
    yield "issues these collectives is tested against real runs of it, one collective at a time."
    yield ""
    yield "The model has 6 blocks of width 256 and a vocabulary of 1000: 74 parameters, 5,250,560 elements, bf16,"
    yield "2 ranks. Each cell gives the collectives of one steady optimizer step and their MB: all-gathers by the"
    yield "phase that issues them (outputs), reductions of gradients (inputs). Sizes of knobs are in elements."
    for block in BLOCKS_OF_ROWS:
        yield ""
        yield f"## {block.title}"
        yield ""
        yield block.reading
        yield ""
        yield "| settings | forward | backward | step() | reductions |"
        yield "|---|---:|---:|---:|---:|"
        for row in block.rows:
            n = measure(row)
            yield (
                f"| {row.name} | {n.forward} / {n.forward_mb:.2f} | {n.backward} / {n.backward_mb:.2f} "
                f"| {n.step} / {n.step_mb:.2f} | {n.reductions} / {n.reductions_mb:.2f} |"
            )
    yield ""
    yield "## Every key"
    for effect, title in (
        (Effect.SCHEDULE, "Change which collectives are issued, where, or how large"),
        (Effect.EXECUTION, "Change memory, streams, compute or checkpoints, not the parameters' collectives"),
        (Effect.UNMODELLED, "Change collectives in ways that the schedule here does not follow"),
        (Effect.DEAD, "Accepted, without effect in stage 3"),
    ):
        yield ""
        yield f"### {title}"
        yield ""
        yield "| key | default | effect |"
        yield "|---|---|---|"
        for entry in KNOBS.values():
            if entry.effect is effect:
                yield f"| `{entry.name}` | {short(entry.default)} | {entry.about} |"


if __name__ == "__main__":
    print("\n".join(page()))
