"""Settings for real DeepSpeed, drawn at random from a number."""

import random

import torch

GRANULARITY = "stage3_module_granularity_threshold"
BLOCKS_BY_GRANULARITY = -1  # stands for the threshold that makes the model's blocks leaves


def granularity(module) -> int:
    """Elements per module with parameters: what stage3_module_granularity_threshold is compared with."""
    counted = [part for part in module.modules() if any(True for _ in part.parameters())]
    counted = [part for part in counted if not isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict))]
    return sum(parameter.numel() for parameter in module.parameters()) // len(counted)


def granularity_of_blocks(model) -> int:
    """A threshold that makes leaves of the blocks but not of the root, at which DeepSpeed fails."""
    threshold = granularity(model.blocks[0])
    assert granularity(model) > threshold
    return threshold


def random_case(models, number: int, world: int) -> dict:
    """The same on every rank, whatever else runs."""
    draw = random.Random(f"settings {number}")
    family = list(models.FAMILIES)[number % len(models.FAMILIES)]
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": draw.choice([0, 0, 8, 24, 70, 200, 10_000]),
        "stage3_prefetch_bucket_size": draw.choice([0, 1, 60, 200, 700, 2_000, 50_000_000]),
        "stage3_max_reuse_distance": draw.choice([0, 0, 100, 500, 1_500, 10**9]),
        "stage3_max_live_parameters": draw.choice([0, 300, 900, 10**9, 10**9]),
        "reduce_bucket_size": draw.choice([1, 64, 200, 500, 5_000, 10**6]),
    }
    if draw.random() < 0.2:
        zero["stage3_model_persistence_threshold"] = draw.choice([50, 150, 400])
    if draw.random() < 0.15:
        zero["stage3_allgather_sequential"] = True
    if draw.random() < 0.15:
        zero["stage3_use_all_reduce_for_fetch_params"] = True
    if draw.random() < 0.2:
        zero["zero_hpz_partition_size"] = world
    if draw.random() < 0.2:
        zero["reduce_scatter"] = False
        zero["contiguous_gradients"] = draw.choice([True, False])
    if draw.random() < 0.2:
        zero["sub_group_size"] = draw.choice([100, 600])
    leaves_after = None
    leaves = models.LEAVES.get(family, models.LEAVES["*"])
    leaf = draw.random() if leaves else 1.0
    if leaf < 0.25:
        zero["leaf_module"] = {"classes": [draw.choice(leaves)]}
    elif leaf < 0.35:
        zero["leaf_module"] = draw.choice(models.NAMED_LEAVES)
    elif leaf < 0.45:
        leaves_after = draw.choice(leaves)
    elif leaf < 0.55 and family in models.BLOCKS_AS_LEAVES:
        zero[GRANULARITY] = BLOCKS_BY_GRANULARITY
    return {
        "number": number,
        "family": family,
        "width": draw.choice(models.WIDTHS),
        "depth": draw.choice([2, 3]),
        "zero": zero,
        "leaves_after": leaves_after,
        "dtype": draw.choice(["float32", "bfloat16"]),
        "autocast": draw.random() < 0.12 and models.PLAIN_TORCH,
        "zero_init": draw.random() < 0.15 and models.PLAIN_TORCH,
        "micro_batches": draw.choice([1, 1, 2]),
        "evaluations": sorted(draw.sample(range(5), draw.choice([0, 0, 1, 2]))),
        "steps": 5,
    }


def configuration(case):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["micro_batches"],
        "zero_optimization": case["zero"],
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if case["autocast"]:
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": ["torch.nn.Linear"],
        }
    elif case["dtype"] == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config
