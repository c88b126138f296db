"""The configuration in DeepSpeed's names: what is accepted, what is dead, and what is refused with a hint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from z3trace.engine.config import EngineSettings, ZeroConfig, load_config
from z3trace.errors import UserError


def test_nothing_given_means_the_defaults() -> None:
    config = load_config(None)
    assert config == ZeroConfig()
    assert config.z3trace == EngineSettings("layerwise", "block", (), 1)
    assert config.gradient_accumulation_steps == 1 and config.gradient_clipping == 0 and not config.bf16
    assert load_config(config) is config


def test_a_file_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    raw = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e6, "allgather_bucket_size": 1e9},
        "z3trace": {"unit": "module", "unit_classes": "Block", "prefetch": 2},
        "steps_per_print": 10,
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(raw))
    config = load_config(path, world_size=3)
    assert config == load_config(raw, world_size=3) == load_config(str(path), world_size=3)
    assert config.train_batch_size == 24
    assert config.zero_optimization.stage3_prefetch_bucket_size == 5_000_000
    assert config.z3trace == EngineSettings("layerwise", "module", ("Block",), 2)
    assert config.dead == ("steps_per_print", "zero_optimization.allgather_bucket_size")
    again = config.to_dict()
    assert json.loads(json.dumps(again)) == again
    assert again["zero_optimization"]["stage"] == 3 and again["bf16"] == {"enabled": True}
    assert again["zero_optimization"]["stage3_max_live_parameters"] == 1_000_000_000
    assert replace(load_config(again, world_size=3), dead=()) == replace(config, dead=())


@pytest.mark.parametrize(
    ("given", "world", "micro", "steps", "whole"),
    [
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, 3, 2, 4, 24),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, 3, 4, 2, 24),
        ({"train_micro_batch_size_per_gpu": 2}, 3, 2, 1, 6),
        ({"train_batch_size": 6}, 3, 2, 1, 6),
        ({"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}, 3, None, 1, None),
    ],
)
def test_batch_sizes_complete_each_other(
    given: dict[str, Any], world: int, micro: int | None, steps: int, whole: int | None
) -> None:
    config = load_config(given, world_size=world)
    assert (
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        config.train_batch_size,
    ) == (
        micro,
        steps,
        whole,
    )


def test_auto_uses_the_hidden_size() -> None:
    config = load_config({"zero_optimization": {"reduce_bucket_size": "auto"}}, hidden_size=64)
    assert config.zero_optimization.reduce_bucket_size == 64 * 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"gradient_acumulation_steps": 2},
            "'gradient_acumulation_steps' is unknown: did you mean 'gradient_accumulation_steps'",
        ),
        ({"z3trace": {"prefech": 2}}, "'z3trace.prefech' is unknown: did you mean 'prefetch'"),
        ({"zero_optimization": {"stage3_prefetch_bucket": 1}}, "did you mean stage3_prefetch_bucket_size"),
        ({"zero_optimization": {"stage": 2}}, "ZeRO-3 needs 3"),
        ({"zero_optimization": 3}, "give a mapping"),
        ({"z3trace": []}, "give a mapping"),
        ({"z3trace": {"schedule": "fast"}}, "layerwise, deepspeed"),
        ({"z3trace": {"unit": "layer"}}, "block, module"),
        ({"z3trace": {"unit_classes": 3}}, "list of class names"),
        ({"z3trace": {"prefetch": -1}}, "how many units"),
        ({"fp16": {"enabled": True}}, "bf16.enabled"),
        ({"bf16": True}, "enabled"),
        ({"bf16": {"enabled": 1}}, "true or false"),
        ({"scheduler": {"type": "WarmupLR"}}, "engine.optimizer"),
        ({"optimizer": "AdamW"}, '"type"'),
        ({"gradient_accumulation_steps": 0}, "at least 1"),
        ({"gradient_accumulation_steps": 1.5}, "at least 1"),
        ({"gradient_clipping": -1}, "largest norm"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size 7 is not"),
    ],
)
def test_mistakes_are_named_with_what_to_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(given, world_size=2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[1]", "no JSON object"), (None, "No such file")]
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(path)
