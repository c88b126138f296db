"""DeepSpeed: its steps, and what it was told and made of it. The labels are in `deepspeed_labels`."""

import functools
import sys
import weakref
from types import ModuleType
from typing import Any

from z3trace.engine.schedule.settings import KNOBS
from z3trace.recording.adapters import huggingface
from z3trace.recording.adapters.deepspeed_labels import Observed, observed
from z3trace.recording.adapters.describing import dtype_of, modules_of, owners_of, parameters_of
from z3trace.recording.messages import say
from z3trace.recording.steps import Authority, Steps

TRIED = "0.19"


class DeepSpeedTraining:
    """A DeepSpeedEngine as the recorder sees it."""

    framework = "deepspeed"

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._told: dict[str, Any] = {}
        self._seen: Observed | None = None
        self._leaves = _leaves(engine.module)
        self.device = str(engine.device).partition(":")[0]
        if engine.zero_optimization_stage() == 3:
            self._seen = observed(engine.module)

    def describe(self) -> dict[str, Any]:
        engine = self._engine()
        if engine is not None:  # else the script has dropped it: what was told before still holds
            self._told = self._describe(engine)
        return self._told

    def collectives(self, steps: tuple[int, ...]) -> list[dict[str, Any]]:
        return []

    def _describe(self, engine: Any) -> dict[str, Any]:
        config, module = engine._config, engine.module
        told: dict[str, Any] = {
            **huggingface.describe(),
            **modules_of(module),
            "zero_optimization": zero_settings(config.zero_config),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_clipping": engine.gradient_clipping(),
        }
        if self._seen is None:
            return {**told, "parameters": parameters_of(module)}
        leaves = _leaves(module)
        told |= {
            "parameters": _parameters(module),
            "leaves": [path for path in leaves if path in self._leaves],
            "leaves_after": [path for path in leaves if path not in self._leaves],
            "gathered_together": self._seen.sets(),
        }
        calls = self._seen.calls()
        return {**told, "calls": calls} if calls else told


def watch_engines(module: ModuleType, steps: Steps) -> None:
    """Trainings are engines; a step is what `step()` does at an accumulation boundary."""
    _check_version()
    kind = module.DeepSpeedEngine
    initialize, forward, step = kind.__init__, kind.forward, kind.step
    trainings: weakref.WeakKeyDictionary[Any, DeepSpeedTraining] = weakref.WeakKeyDictionary()
    begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def training_of(engine: Any) -> DeepSpeedTraining | None:
        if engine not in trainings and getattr(engine, "module", None) is not None:
            trainings[engine] = DeepSpeedTraining(engine)
            steps.created(trainings[engine], Authority.ENGINE)
        return trainings.get(engine)

    guarded = _Guard()

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        guarded(lambda: training_of(self))

    @functools.wraps(forward)
    def forward_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and begun.get(self) != self.global_steps:
            begun[self] = self.global_steps

            def begin() -> None:
                training = training_of(self)
                if training is not None:
                    steps.began(training, Authority.ENGINE, self.global_steps)

            guarded(begin)
        return forward(self, *args, **kwargs)

    @functools.wraps(step)
    def step_(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.global_steps
        result = step(self, *args, **kwargs)
        if self.global_steps > before:  # also where the loss scale made it skip the update
            guarded(lambda: steps.finished(training_of(self), Authority.ENGINE, before))
        return result

    kind.__init__, kind.forward, kind.step = __init__, forward_, step_


class _Guard:
    """Runs what is ours inside DeepSpeed's methods, so that no error of ours comes out of them."""

    def __init__(self) -> None:
        self._failed = False

    def __call__(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            if not self._failed:
                self._failed = True
                say(
                    f"DeepSpeed is not as known ({type(error).__name__}: {error}): its steps are not recorded"
                )


def zero_settings(config: Any) -> dict[str, Any]:
    """`zero_optimization` as DeepSpeed resolved it, without what it was not given and has no value for."""
    known = {*KNOBS, "stage"}
    values = config.model_dump(mode="json", by_alias=True)
    return {key: value for key, value in values.items() if key in known and value is not None}


def _parameters(module: Any) -> dict[str, dict[str, Any]]:
    """In the order in which DeepSpeed gathers them (`ds_id`), sizes as if they were not sharded."""
    from deepspeed.runtime.zero import partition_parameters

    owners = owners_of(module)
    sent = getattr(partition_parameters, "get_allgather_dtype", None)
    told = {}
    for name, parameter in sorted(module.named_parameters(), key=lambda pair: getattr(pair[1], "ds_id", 0)):
        if not hasattr(parameter, "ds_tensor"):
            continue  # left whole
        dtype = dtype_of(parameter.ds_tensor)
        told[name] = {
            "shape": list(parameter.ds_shape),
            "numel": parameter.ds_numel,
            "dtype": dtype,
            "trainable": parameter.requires_grad,
            "persistent": bool(parameter.ds_persist),
            "owners": owners[id(parameter)],
        }
        if sent is not None and (other := str(sent(parameter, parameter.ds_tensor))) != f"torch.{dtype}":
            told[name]["autocast_dtype"] = other.removeprefix("torch.")
    return told


def _leaves(module: Any) -> list[str]:
    return [path for path, part in module.named_modules() if getattr(part, "_z3_leaf", False)]


def _check_version() -> None:
    version = str(getattr(sys.modules.get("deepspeed"), "__version__", "")) or _installed()
    if not version.startswith(f"{TRIED}."):
        say(
            f"DeepSpeed {version} is not the version that recording was tried with ({TRIED}): labels may be missing"
        )


def _installed() -> str:
    from importlib import metadata

    return metadata.version("deepspeed")
