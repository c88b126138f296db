"""The engine in JSON's types, for run metadata and for people."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from z3trace.engine.engine import Engine


def describe(engine: "Engine") -> dict[str, Any]:
    """Settings as resolved, modules in registration order and as first called, units, parameters.

    Sizes are in elements. `padded_numel` is what a gather fetches, `shard_numel` what each rank keeps.
    """
    return {
        "framework": "z3trace",
        "schedule": engine.config.z3trace.schedule,
        "world_size": engine.comm.size,
        "rank": engine.comm.rank,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps,
        "settings": engine.config.to_dict(),
        "modules": [
            {"path": path, "class": f"{type(module).__module__}.{type(module).__qualname__}"}
            for path, module in engine.module.named_modules()
        ],
        "call_order": list(engine.call_order),
        "units": [
            {
                "name": partition.plan.name,
                "parameters": list(partition.plan.parameters),
                "numel": partition.numel,
                "padded_numel": partition.padded_numel,
                "shard_numel": partition.shard_numel,
            }
            for partition in engine.partitions.values()
        ],
        "parameters": {
            member.name: {
                "shape": list(member.shape),
                "numel": member.numel,
                "dtype": str(partition.shard.dtype).removeprefix("torch."),
                "trainable": partition.plan.trainable,
                "persistent": partition.plan.name in engine.policy.persistent,
            }
            for partition in engine.partitions.values()
            for member in partition.members
        },
    }
