"""The table of stage-3 knobs: names, defaults, `auto` and the errors a user sees."""

import dataclasses
import re
import sys

import pytest

from z3trace.engine.schedule.settings import (
    KNOBS,
    Effect,
    LeafModules,
    Offload,
    ZeroSettings,
    auto_values,
    set_keys,
)
from z3trace.errors import UserError


def test_defaults_are_deepspeeds():
    settings = ZeroSettings.parse({"stage": 3})
    assert settings == ZeroSettings()
    assert settings.stage3_prefetch_bucket_size == 50_000_000
    assert settings.stage3_param_persistence_threshold == 100_000
    assert settings.stage3_model_persistence_threshold == sys.maxsize
    assert settings.stage3_max_live_parameters == settings.stage3_max_reuse_distance == 10**9
    assert settings.reduce_bucket_size == 5 * 10**8
    assert settings.overlap_comm is True


def test_sizes_may_be_written_as_json_writes_them():
    settings = ZeroSettings.parse(
        {"stage3_prefetch_bucket_size": 5e6, "stage3_max_reuse_distance": "2e6", "overlap_comm": None}
    )
    assert settings.stage3_prefetch_bucket_size == 5_000_000
    assert isinstance(settings.stage3_prefetch_bucket_size, int)
    assert settings.stage3_max_reuse_distance == 2_000_000
    assert settings.overlap_comm is True


def test_short_names_are_accepted():
    assert ZeroSettings.parse({"prefetch_bucket_size": 7}).stage3_prefetch_bucket_size == 7


def test_auto_follows_the_trainers_formulas():
    auto = dict.fromkeys(auto_values(1), "auto")
    settings = ZeroSettings.parse({"stage": 3, **auto}, hidden_size=256)
    assert settings.reduce_bucket_size == 65_536
    assert settings.stage3_prefetch_bucket_size == 58_982
    assert settings.stage3_param_persistence_threshold == 2_560
    assert ZeroSettings.parse(auto) == ZeroSettings()
    assert ZeroSettings.parse({"sub_group_size": "auto"}, hidden_size=256) == ZeroSettings()


def test_leaf_modules_replace_only_what_is_given():
    leaf = ZeroSettings.parse({"leaf_module": {"names": "blocks.0", "name_suffixes": ["a", "b", "a"]}})
    assert leaf.leaf_module == LeafModules(names=("blocks.0",), name_suffixes=("a", "b"))
    assert ZeroSettings.parse({"leaf_module": {"classes": []}}).leaf_module.classes == ()


def test_deprecated_keys_set_their_successors():
    settings = ZeroSettings.parse({"cpu_offload": True, "cpu_offload_use_pin_memory": True})
    assert settings.offload_optimizer == Offload("cpu")
    assert ZeroSettings.parse({"cpu_offload_param": False}).offload_param == Offload()
    with pytest.raises(UserError, match="already set"):
        ZeroSettings.parse({"offload_param": {"device": "nvme"}, "cpu_offload_param": True})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"stage": 2}, "zero_optimization.stage is 2: ZeRO-3 needs 3"),
        ({"stage3_prefetch_bucketsize": 1}, "did you mean stage3_prefetch_bucket_size?"),
        ({"mics_shard_size": 8}, "was removed from DeepSpeed"),
        ({"reduce_bucket_size": 0}, "give at least 1"),
        ({"stage3_max_live_parameters": -1}, "give at least 0"),
        ({"stage3_prefetch_bucket_size": 58982.4}, "give a whole number of elements"),
        ({"stage3_prefetch_bucket_size": True}, "give a whole number of elements"),
        ({"stage3_prefetch_bucket_size": "many"}, "give a whole number of elements"),
        ({"stage3_prefetch_bucket_size": "inf"}, "give a whole number of elements"),
        ({"overlap_comm": 1}, "give true or false"),
        ({"compute_grad_norm": False}, "leave it out"),
        ({"leaf_module": ["Block"]}, "give a mapping"),
        ({"leaf_module": {"class": ["Block"]}}, "did you mean classes?"),
        ({"offload_param": {"device": "gpu"}}, "give none, cpu or nvme"),
        ({"offload_param": {"devise": "cpu"}}, "did you mean device?"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(UserError, match=re.escape(message)):
        ZeroSettings.parse(config)


def test_dead_knobs_are_accepted_and_reported():
    config = {"stage": 3, "allgather_bucket_size": 1, "round_robin_gradients": True, "overlap_comm": False}
    assert ZeroSettings.parse(config).allgather_bucket_size == 1
    assert set_keys(config, Effect.DEAD) == ("allgather_bucket_size", "round_robin_gradients")
    dead = {name for name, knob in KNOBS.items() if knob.effect is Effect.DEAD}
    assert {"allgather_partitions", "use_multi_rank_bucket_allreduce", "parameter_alignment"} < dead


def test_settings_round_trip_through_a_configuration():
    config = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 5,
        "leaf_module": {"classes": ["Block"]},
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "overlap_comm": False,
    }
    settings = ZeroSettings.parse(config)
    assert settings.to_config() == config
    assert ZeroSettings.parse(settings.to_config()) == settings


def test_every_knob_says_what_it_does():
    assert set(KNOBS) == {entry.name for entry in dataclasses.fields(ZeroSettings)}
    for knob in KNOBS.values():
        assert knob.about.endswith(".")


def test_sequential_gathers_force_the_prefetch_to_one_element():
    assert ZeroSettings(stage3_allgather_sequential=True).prefetch_limit == 1
    assert ZeroSettings().prefetch_limit == 50_000_000
