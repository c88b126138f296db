"""Run real DeepSpeed on random settings and write down what it did; started by test_deepspeed.py, once a rank.

Everything is observed from outside, by wrapping: what happened (module hooks, gradients, steps) becomes the
events of a schedule, and each call of a torch.distributed collective becomes an answer to compare with.
The log of a case is a list, in time order, of

    ["begin", grad enabled]    ["pre_forward", module, recompute]    ["post_forward", module, recompute]
    ["read", module, parameter]    ["returned", module, parameter]
    ["pre_backward", module]    ["gradient", parameter]    ["post_backward", module]
    ["leaf_backward", module]    ["backward_ends"]    ["step_begins"]    ["norm", group]    ["step_ends"]
    ["gather" | "reduce", kind, elements, dtype, group, [parameters]]
"""

import functools
import itertools
import json
import os
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
import deepspeed_cases as cases

LOG: list[list] = []
NAMES: dict[int, str] = {}  # id of a parameter -> its name
PATHS: dict[int, str] = {}  # id of a module -> its path
GROUPS: dict[int, str] = {}  # id of a process group -> its name
RUNNING: list[str] = []  # modules whose forward runs
ON = False


def note(*entry):
    if ON:
        LOG.append(list(entry))


def wrap(owner, name, before=None, after=None):
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if before is not None and ON:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None and ON:
            after(*args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def names_of(parameters):
    return [NAMES[id(parameter)] for parameter in parameters]


def collective(verb, kind, position, keyword):
    """Note a collective; which parameters it carries is filled in by what runs around it."""

    def before(*args, **kwargs):
        tensor = args[position] if len(args) > position else kwargs[keyword]
        group = GROUPS.get(id(kwargs.get("group")), "")
        dtype = str(tensor.dtype).rpartition(".")[2]
        note(verb, kind, tensor.numel(), dtype, group, None)

    return before


def fill(parameters, verb, count=1):
    """Name the parameters of the latest `count` collectives of a kind that have none yet."""
    empty = [entry for entry in LOG if entry[0] == verb and entry[5] is None]
    assert len(empty) == count, (empty, parameters)
    for entry, part in zip(empty, parameters, strict=True):
        entry[5] = names_of(part)


def observe_torch():
    """Before DeepSpeed is imported: it keeps references to these functions."""
    wrap(torch.distributed, "all_gather_into_tensor", collective("gather", "all_gather", 0, "output_tensor"))
    wrap(torch.distributed, "reduce_scatter_tensor", collective("reduce", "reduce_scatter", 1, "input"))
    original = torch.distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if ON and tensor.dim() == 0:
            note("norm", GROUPS.get(id(kwargs.get("group")), ""))
        elif ON:
            verb = "reduce" if REDUCING else "gather"
            collective(verb, "all_reduce", 0, "tensor")(tensor, **kwargs)
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce


REDUCING: list[list[str]] = []  # parameters of the bucket that is being reduced


def observe_deepspeed():
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, stage3
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import z3_leaf_parameter

    offload = parameter_offload.DeepSpeedZeRoOffload
    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    inside_backward = lambda: torch._C._current_graph_task_id() != -1  # noqa: E731

    def enter(_, module):
        RUNNING.append(PATHS[id(module)])
        note("pre_forward", PATHS[id(module)], inside_backward())

    def leave(_, module):
        RUNNING.pop()
        note("post_forward", PATHS[id(module)], inside_backward())

    def external(module, parameter):
        verb = "returned" if parameter.is_external_param else "read"
        note(verb, RUNNING[-1], NAMES[id(parameter)])

    wrap(
        PartitionedParameterCoordinator,
        "reset_step",
        lambda _: (RUNNING.clear(), note("begin", torch.is_grad_enabled())),
    )
    wrap(offload, "pre_sub_module_forward_function", enter)
    wrap(offload, "post_sub_module_forward_function", leave)
    wrap(
        offload,
        "pre_sub_module_backward_function",
        lambda _, module: note("pre_backward", PATHS[id(module)]),
    )
    wrap(
        offload,
        "post_sub_module_backward_function",
        lambda _, module: note("post_backward", PATHS[id(module)]),
    )
    wrap(parameter_offload, "register_external_parameter", external)

    for handle, position in (
        ("AllGatherHandle", 2),
        ("AllGatherCoalescedHandle", 2),
        ("AllReduceCoalescedHandle", 2),
    ):
        cls = getattr(partition_parameters, handle)

        def made(*args, single=handle == "AllGatherHandle", position=position, **kwargs):
            what = args[position] if len(args) > position else kwargs["params"]
            fill([[what] if single else what], "gather")

        wrap(cls, "__init__", made)
    wrap(
        partition_parameters.Init,
        "_allgather_params_coalesced",
        after=lambda _, params, *args, **kwargs: fill([[p] for p in params], "gather", len(params)),
    )
    wrap(
        partition_parameters.Init,
        "_allgather_params_sequential",
        after=lambda _, params, *args, **kwargs: fill([[p] for p in params], "gather", len(params)),
    )

    def gradient(self, parameter):
        if not z3_leaf_parameter(parameter):
            note("gradient", NAMES[id(parameter)])
        elif self.leaf_parameters[parameter.ds_z3_leaf_module][0] is parameter:
            note("leaf_backward", PATHS[id(parameter.ds_z3_leaf_module)])

    wrap(optimizer, "reduce_ready_partitions_and_remove_grads", gradient)
    scatter = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
    contiguous = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"
    wrap(optimizer, scatter, after=lambda _, params, dtype: fill([params], "reduce"))

    def reducing(self, _, dtype):
        REDUCING.append(self.ipg_buckets[dtype].params)

    wrap(optimizer, contiguous, reducing, lambda *_: fill([REDUCING.pop()], "reduce"))
    wrap(optimizer, "independent_gradient_partition_epilogue", lambda _: note("backward_ends"))
    wrap(optimizer, "_partition_all_parameters", lambda _: note("step_begins"))
    wrap(optimizer, "_post_step", lambda *_: note("step_ends"))


def describe(module, case) -> dict:
    from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

    owners: dict[str, list[str]] = {}
    for path, part in module.named_modules():
        for _, parameter in part.named_parameters(recurse=False):
            owners.setdefault(NAMES[id(parameter)], []).append(path)
    by_order = sorted(module.named_parameters(), key=lambda pair: pair[1].ds_id)
    return {
        "modules": [path for path, _ in module.named_modules()],
        "classes": {
            path: f"{type(part).__module__}.{type(part).__qualname__}"
            for path, part in module.named_modules()
        },
        "parameters": {
            name: {
                "numel": parameter.ds_numel,
                "trainable": parameter.requires_grad,
                "dtype": str(parameter.ds_tensor.dtype),
                **(
                    {"autocast_dtype": str(get_allgather_dtype(parameter, parameter.ds_tensor))}
                    if case["autocast"]
                    else {}
                ),
                "owners": owners[name],
                "group": GROUPS.get(id(parameter.ds_process_group), ""),
            }
            for name, parameter in by_order
        },
        "zero_optimization": case["zero"],
        "world_size": torch.distributed.get_world_size(),
        "groups": {
            name: torch.distributed.get_world_size() for name in GROUPS.values() if name != "secondary"
        },
        "gradient_accumulation_steps": case["micro_batches"],
    }


def expert_groups(model):
    """Shard some parameters over a process group of their own, as expert parallelism does."""
    group = torch.distributed.new_group(range(torch.distributed.get_world_size()))
    for block in model.blocks:
        for parameter in block.mlp.parameters():
            parameter.ds_zero_partition_process_group = group
    return group


def run_case(models, case) -> dict:
    global ON
    import deepspeed
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import groups, set_z3_leaf_modules

    torch.manual_seed(case["number"])
    models.ROUTE.seed(case["number"])
    make = functools.partial(models.FAMILIES[case["family"]], case["width"], case["depth"])
    if case["zero"].get(cases.GRANULARITY) == cases.BLOCKS_BY_GRANULARITY:
        case["zero"][cases.GRANULARITY] = cases.granularity_of_blocks(make())
    config = cases.configuration(case)
    # What DeepSpeed keeps for the whole process must not leak from the case before.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    if case["zero_init"]:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = make()
    else:
        model = make()
    expert_group = expert_groups(model) if case["family"] == "Grouped" else None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config
    )
    for registry, items in (
        (NAMES, ((id(parameter), name) for name, parameter in engine.module.named_parameters())),
        (PATHS, ((id(module), path) for path, module in engine.module.named_modules())),
        (
            GROUPS,
            (
                (id(groups._get_zero_param_intra_parallel_group()), "secondary"),
                (id(expert_group), "experts"),
            ),
        ),
    ):
        registry.clear()
        registry.update(items)
    GROUPS.pop(id(None), None)
    if case["leaves_after"]:
        set_z3_leaf_modules(engine.module, [case["leaves_after"]], raise_if_not_found=False)
    description = describe(engine.module, case)
    LOG.clear()
    error = None
    ON = True
    try:
        for step in range(case["steps"]):
            if step in case["evaluations"]:
                engine.eval()
                with torch.no_grad():
                    models.logits_of(engine, batch(models, case, step, 99))
                engine.train()
            for micro_batch in range(case["micro_batches"]):
                tokens = batch(models, case, step, micro_batch)
                logits = models.logits_of(engine, tokens)
                engine.backward(functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()))
                engine.step()
    except RuntimeError as failure:
        error = str(failure)
    ON = False
    engine.destroy()
    return {"case": case, "description": description, "log": list(LOG), "error": error}


def batch(models, case, step, micro_batch):
    seed = 1000 * case["number"] + 10 * step + micro_batch + 500_000 * torch.distributed.get_rank()
    return torch.randint(models.VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(seed))


def main(family: str, folder: str, rank: str, world: str, first: str, count: str) -> None:
    torch.set_num_threads(1)
    models = import_module(family)
    observe_torch()
    import deepspeed

    # A C++ operator that only inference uses, and that takes a compiler and over a minute to build.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    observe_deepspeed()
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{folder}/rendezvous",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
    with (Path(folder) / f"rank{rank}.jsonl").open("w") as output:
        for number in itertools.islice(itertools.count(int(first)), int(count)):
            case = cases.random_case(models, number, int(world))
            print(json.dumps(run_case(models, case)), file=output, flush=True)
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's threads can keep a finished process alive


if __name__ == "__main__":
    main(*sys.argv[1:])
