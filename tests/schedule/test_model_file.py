"""Reading a model's description: what it may hold, what is inferred, and the errors a user sees."""

import re

import pytest

from z3trace.engine.schedule.model_file import dtype_name, parse_description
from z3trace.errors import UserError

SMALL = {
    "modules": ["", "embed", "blocks", "blocks.0", "blocks.0.fc"],
    "parameters": {
        "embed.weight": {"shape": [10, 4]},
        "blocks.0.fc.weight": {"numel": 16, "shape": [4, 4]},
        "blocks.0.fc.bias": {"numel": 4},
    },
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
    "world_size": 2,
}


def test_the_tree_and_the_owners_come_from_the_names():
    description = parse_description(SMALL)
    modules = {module.path: module for module in description.model.modules}
    assert modules[""].children == ("embed", "blocks")
    assert modules["blocks"].children == ("blocks.0",)
    assert modules["blocks.0.fc"].partitions == ("blocks.0.fc.weight", "blocks.0.fc.bias")
    assert modules["blocks.0"].partitions == ()
    assert [part.numel for part in description.model.partitions] == [40, 16, 4]
    assert {part.dtype for part in description.model.partitions} == {"float32"}
    assert description.leaves == ()
    assert (description.world_size, description.gradient_accumulation_steps) == (2, 1)


def test_modules_that_are_not_listed_make_their_parent_a_leaf():
    """So DeepSpeed's own list of hooked modules ends at leaves."""
    description = parse_description({**SMALL, "modules": ["", "embed", "blocks.0"]})
    modules = {module.path: module for module in description.model.modules}
    assert modules[""].children == ("embed", "blocks.0")
    assert modules["blocks.0"].partitions == ("blocks.0.fc.weight", "blocks.0.fc.bias")
    assert description.leaves == ("blocks.0",)


def test_what_names_cannot_tell_may_be_given():
    description = parse_description(
        {
            **SMALL,
            "dtype": "bf16",
            "hidden_size": 10,
            "gradient_accumulation_steps": 4,
            "classes": {"embed": "torch.nn.Embedding"},
            "parameters": {
                "embed.weight": {"numel": 40, "trainable": False, "owners": ["embed", "blocks.0"]},
                "blocks.0.fc.weight": {"numel": 16, "dtype": "torch.float32", "group": "experts"},
            },
            "groups": {"experts": 1},
            "calls": {"grad_inputs": {"blocks.0": 0}, "checkpointed": ["blocks.0"], "reentrant": True},
        }
    )
    embed, weight = description.model.partitions
    assert (embed.dtype, embed.trainable) == ("bfloat16", False)
    assert (weight.dtype, weight.group) == ("float32", "experts")
    modules = {module.path: module for module in description.model.modules}
    assert modules["embed"].partitions == modules["blocks.0"].partitions == ("embed.weight",)
    assert modules["embed"].class_name == "torch.nn.Embedding"
    assert description.settings.stage3_prefetch_bucket_size == 90
    assert description.facts.checkpointed == {"blocks.0"}
    assert description.facts.reentrant
    assert description.groups == {"experts": 1}


def test_the_engines_own_description_is_one():
    modules = [{"path": path, "class": f"net.{path.title() or 'Net'}"} for path in SMALL["modules"]]
    order = ["blocks.0", "blocks.0.fc", "embed"]
    description = parse_description({**SMALL, "modules": modules, "call_order": order})
    assert [module.path for module in description.model.modules] == SMALL["modules"]
    assert description.model.modules[1].class_name == "net.Embed"
    assert description.facts.order == ("", *order)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bf16", "bfloat16"), ("torch.float16", "float16"), ("BFloat16", "bfloat16"), ("float", "float32")],
)
def test_dtypes_are_known_by_their_many_names(name, expected):
    assert dtype_name(name) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules": None}, "model.json: modules is NoneType: give a list of names"),
        ({"modules": "blocks"}, "model.json: modules is str: give a list of names"),
        ({"parameters": []}, "model.json: parameters is list: give a mapping"),
        ({"parameters": {"w": {}}}, "model.json: parameter w has neither numel nor shape"),
        ({"parameters": {"w": {"numel": "many"}}}, "numel of parameter w is 'many'"),
        ({"world_size": 0}, "model.json: world_size is 0: give a whole number of at least 1"),
        ({"dtype": "float12"}, "model.json: dtype 'float12' is unknown"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2: ZeRO-3 needs 3"),
        ({"calls": {"order": ["embed"]}}, 'model.json: calls.order does not begin with ""'),
        ({"calls": {"order": ["", "head"]}}, "calls.order names 'head', which is not among the modules"),
        ({"calls": {"checkpointed": ["x"]}}, "calls.checkpointed names 'x', which is not among the modules"),
        ({"calls": {"grad_input": {}}}, "calls.grad_input is unknown: give one of checkpointed"),
        ({"calls": {"order": "x"}}, "model.json: calls.order is str: give a list of names"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_description({**SMALL, **change})


def test_a_missing_key_is_named():
    with pytest.raises(UserError, match="has no parameters"):
        parse_description({"modules": [""]})
