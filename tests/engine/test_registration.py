"""Ranks that were given different models are told so, all of them, before anything is gathered."""

import models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import run_world

import z3trace.engine as z3
from z3trace.engine.collectives import Communicator
from z3trace.engine.layout import plan_units, sharded_parameters
from z3trace.engine.registration import check_registration
from z3trace.engine.storage import cut
from z3trace.engine.world import world_group
from z3trace.errors import UserError


def given_other_models(kind: str) -> str:
    """The message on this rank when rank 1 builds something else."""
    odd = dist.get_rank() == 1
    model: nn.Module = models.build("Chain")
    assert isinstance(model, models.Chain)
    if odd and kind == "wider":
        model.layers[2].up = nn.Linear(models.DIM, 16)
    if odd and kind == "fewer layers":
        del model.layers[3]
    if odd and kind == "transposed":  # as many elements, so the shards are as long
        model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous())
    try:
        z3.initialize(model, torch.optim.SGD)
    except UserError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "wider",
            "parameter layers.2.up.weight of unit layers.2: shapes differ: "
            "rank 0 (15, 7), rank 1 (16, 7), rank 2 (15, 7)",
        ),
        ("fewer layers", "unit layers.3 differ: rank 0 True, rank 1 has none, rank 2 True"),
        ("transposed", "parameter head.weight of unit (root): shapes differ: rank 0 (11, 7), rank 1 (7, 11)"),
        ("same", "no error"),
    ],
)
def test_every_rank_raises_and_names_parameter_ranks_and_sizes(kind: str, expected: str) -> None:
    for message in run_world(given_other_models, 3, kind):
        assert expected in message


def given_a_wrong_shard() -> str:
    """The same model everywhere, but rank 1's shard of one unit is cut too short."""
    model = models.build("Chain")
    comm = Communicator(world_group())
    parameters = sharded_parameters(model)
    partitions = [
        cut(
            plan,
            [parameters[name] for name in plan.parameters],
            world=comm.size,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for plan in plan_units(model, "block", (), {}).partitions
    ]
    check_registration(partitions, comm)
    if comm.rank == 1:
        partitions[2].shard = partitions[2].shard[:-1]
    try:
        check_registration(partitions, comm)
    except UserError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_the_shards_that_exist_are_compared_not_what_shapes_promise() -> None:
    numel = sum(p.numel() for p in models.Block().parameters())
    half = -(-numel // 2)
    for message in run_world(given_a_wrong_shard, 2):
        assert f"unit layers.1: elements of the shard differ: rank 0 {half}, rank 1 {half - 1}" in message
