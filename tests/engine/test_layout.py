"""Which parameters are sharded together."""

import models
import pytest
import torch
from torch import nn

from z3trace.engine.layout import block_paths, describe_model, plan_units
from z3trace.errors import UserError


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block() for _ in range(depth))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 9)
        self.experts = nn.ModuleList(models.Block() for _ in range(9))


def test_blocks_of_a_plain_model() -> None:
    assert block_paths(models.build("Chain")) == tuple(f"layers.{i}" for i in range(4))


def test_blocks_in_lists_of_lists() -> None:
    assert block_paths(models.build("Nested")) == tuple(
        f"layers.{i}.{j}" for i, depth in enumerate((1, 3, 2)) for j in range(depth)
    )


def test_the_longest_list_gives_the_class_and_all_of_that_class_are_blocks() -> None:
    model = nn.Sequential(Stage(2), Stage(6), nn.Linear(4, 4))
    assert block_paths(model) == (*(f"0.blocks.{i}" for i in range(2)), *(f"1.blocks.{i}" for i in range(6)))


def test_a_long_mlp_inside_a_block_is_no_list_of_blocks() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))

    assert block_paths(nn.ModuleList([Deep(), Deep()])) == ("0", "1")


def test_bare_layers_are_blocks_where_there_is_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert block_paths(model) == ("0", "2", "4")


def test_experts_are_no_units() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Mixture() for _ in range(3))})
    assert block_paths(model) == tuple(f"layers.{i}" for i in range(3))
    by_module = {p.name: p.parameters for p in plan_units(model, "module", (), {}).partitions}
    assert set(by_module) == {f"layers.{i}{end}" for i in range(3) for end in ("", ".router")}
    assert len(by_module["layers.1"]) == 9 * 7


def test_a_model_without_repetition_is_one_unit() -> None:
    assert block_paths(models.build("Single")) == ()
    planned = plan_units(models.build("Single"), "block", (), {})
    assert [(p.name, p.parameters) for p in planned.partitions] == [("", ("weight",))]
    assert planned.needs == {"": ("",)}


def test_given_classes_override_and_nest_no_units() -> None:
    model = nn.Sequential(Stage(2), Stage(6))
    assert block_paths(model, ["Stage"]) == ("0", "1")
    assert block_paths(model, [f"{models.Block.__module__}.Block", "Stage"]) == ("0", "1")
    with pytest.raises(UserError, match="no module of class 'Block2'"):
        block_paths(model, ["Block2"])


@pytest.mark.parametrize("name", list(models.MODELS))
@pytest.mark.parametrize("unit", ["block", "module"])
def test_every_parameter_is_in_one_partition(name: str, unit: str) -> None:
    model = models.build(name)
    planned = plan_units(model, unit, (), {})
    placed = [n for plan in planned.partitions for n in plan.parameters]
    assert sorted(placed) == sorted(n for n, _ in model.named_parameters())
    trainable = dict(model.named_parameters())
    assert all(
        trainable[n].requires_grad == plan.trainable for plan in planned.partitions for n in plan.parameters
    )
    assert {p for needed in planned.needs.values() for p in needed} == {p.name for p in planned.partitions}


def test_tied_parameters_are_needed_where_they_are_used() -> None:
    by_block = plan_units(models.build("Tied"), "block", (), {})
    assert "head.weight" not in {n for p in by_block.partitions for n in p.parameters}
    by_module = plan_units(models.build("Tied"), "module", (), {})
    assert by_module.needs["embedding"] == ("embedding",)
    assert set(by_module.needs["head"]) == {"embedding", "head"}


def test_a_parameter_of_two_blocks_belongs_to_the_model() -> None:
    model = models.build("Chain")
    model.layers[0].up.weight = model.layers[2].up.weight
    root = next(p for p in plan_units(model, "block", (), {}).partitions if p.name == "")
    assert "layers.0.up.weight" in root.parameters


def test_frozen_parameters_are_sharded_apart() -> None:
    planned = plan_units(models.build("Frozen"), "block", (), {})
    assert planned.needs["layers.1"] == ("layers.1#frozen", "layers.1")
    assert planned.needs["layers.0"] == ("layers.0#frozen",)


def test_optimizer_groups_lie_together() -> None:
    model = models.build("Chain")
    group_of = {id(p): int(p.ndim == 2) for p in model.parameters()}
    for plan in plan_units(model, "block", (), group_of).partitions:
        dims = [dict(model.named_parameters())[n].ndim == 2 for n in plan.parameters]
        assert dims == sorted(dims)


def test_quantized_parameters_stay_whole() -> None:
    model = models.build("Chain")
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    assert "codes" not in {n for p in plan_units(model, "block", (), {}).partitions for n in p.parameters}


def test_the_schedules_view_of_a_model() -> None:
    model = models.build("Chain")
    planned = plan_units(model, "block", (), {})
    seen = describe_model(model, planned.partitions, torch.float32)
    assert [m.path for m in seen.modules] == [path for path, _ in model.named_modules()]
    by_path = {m.path: m for m in seen.modules}
    assert by_path["layers.1"].partitions == ("layers.1",) and by_path["layers.1.up"].partitions == (
        "layers.1",
    )
    assert by_path["layers.1"].children == ("layers.1.norm", "layers.1.up", "layers.1.down")
    assert by_path[""].partitions == () and by_path["head"].partitions == ("",)
    assert by_path["head"].class_name == "torch.nn.modules.linear.Linear"
