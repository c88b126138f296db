"""Labels around what DeepSpeed ZeRO-3 does: fetches, gathers, waits, reductions, the gathers after a step.

The methods that are wrapped are looked up at each call, so engines that are already there are labelled, too.
A gather's label carries `set`, the number of its parameters in the table `gathered_together` of the trace's
description, and `seq`, which the label of the wait for it repeats.
"""

import functools
import itertools
import weakref
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from z3trace.recording.adapters.labelling import Labels, inside_backward

_labels = Labels("DeepSpeed")
_sequence = itertools.count(1)


class Observed:
    """One model's names, and what was seen of its calls while somebody profiled."""

    def __init__(self, model: Any) -> None:
        self.paths = weakref.WeakKeyDictionary({module: path for path, module in model.named_modules()})
        self.names = {p.ds_id: name for name, p in model.named_parameters() if hasattr(p, "ds_id")}
        self._sets: dict[tuple[str, ...], int] = {}
        self._parts: list[list[list[str]]] = []
        self._order: list[str] = []
        self._recomputed: dict[str, None] = {}

    def number_of(self, parameters: tuple[str, ...]) -> int:
        """The number of a set of parameters that are gathered together."""
        if parameters not in self._sets:
            self._sets[parameters] = len(self._sets)
            self._parts.append([])
        return self._sets[parameters]

    def split(self, number: int, parts: list[list[str]]) -> None:
        """Which of a set's parameters each of its collectives carried, in order."""
        self._parts[number] = parts

    def called(self, path: str, *, again: bool) -> None:
        if again:
            self._recomputed[path] = None
            return
        if path == "":
            self._order = []
        self._order.append(path)

    def sets(self) -> list[dict[str, Any]]:
        """For the description: parameters of each set, and of each of its collectives where it took several."""
        return [
            {"parameters": list(names), **({"collectives": parts} if len(parts) > 1 else {})}
            for names, parts in zip(self._sets, self._parts, strict=True)
        ]

    def calls(self) -> dict[str, Any]:
        """Modules in the order of their calls in the latest forward; those recomputed in backward."""
        if not self._order:
            return {}
        outermost = [path for path in self._recomputed if not _inside(path, self._recomputed)]
        return {"order": list(self._order), **({"checkpointed": outermost} if outermost else {})}


_models: weakref.WeakKeyDictionary[Any, Observed] = weakref.WeakKeyDictionary()


def observed(model: Any) -> Observed:
    """What is known of a model whose parameters DeepSpeed has sharded; made known by asking for it."""
    if model not in _models:
        _models[model] = Observed(model)
    return _models[model]


def label_coordinator(module: ModuleType) -> None:
    """`fetch` around a module's fetch, and in it `gather` around each gather, on demand or ahead."""
    kind = module.PartitionedParameterCoordinator
    mangled = "_PartitionedParameterCoordinator__all_gather_params_"
    fetch, gather = kind.fetch_sub_module, getattr(kind, mangled)

    @functools.wraps(fetch)
    def fetch_sub_module(self: Any, current_submodule: Any, forward: bool) -> Any:
        if not _labels.active:
            return fetch(self, current_submodule, forward)
        running = _Fetch(current_submodule, module, recompute=forward and inside_backward(), forward=forward)
        _running.append(running)
        try:
            with _labels.around("fetch", running.label):
                return fetch(self, current_submodule, forward)
        finally:
            _running.remove(running)

    @functools.wraps(gather)
    def all_gather_params_(self: Any, params: Any, forward: bool, quantize: bool = False) -> Any:
        if not _labels.active:
            return gather(self, params, forward, quantize)
        params = list(params)  # a set, perhaps
        running = _running[-1] if _running else None
        missing = [p for p in params if p.ds_status == module.ZeroParamStatus.NOT_AVAILABLE]
        with _Gather(missing, running):
            return gather(self, params, forward, quantize)

    kind.fetch_sub_module = fetch_sub_module
    setattr(kind, mangled, all_gather_params_)


def label_parameters(module: ModuleType) -> None:
    """`wait` around each wait for a gather; `gather` around what is gathered beside the coordinator."""
    for name, single in (
        ("AllGatherHandle", True),
        ("AllGatherCoalescedHandle", False),
        ("AllReduceCoalescedHandle", False),
    ):
        if hasattr(module, name):
            _label_handle(getattr(module, name), single)
    init = module.Init
    for name, single in (
        ("_allgather_param", True),
        ("_allgather_params_coalesced", False),
        ("_allgather_params_sequential", False),
    ):
        _note_parts(init, name, single)
    gather = init._all_gather

    @functools.wraps(gather)
    def _all_gather(self: Any, param_list: Any, *args: Any, **kwargs: Any) -> Any:
        if not _labels.active:
            return gather(self, param_list, *args, **kwargs)
        missing = [p for p in param_list if p.ds_status == module.ZeroParamStatus.NOT_AVAILABLE]
        with _Gather(missing, None):
            return gather(self, param_list, *args, **kwargs)

    init._all_gather = _all_gather


def label_optimizer(module: ModuleType) -> None:
    """`reduce` around each bucket's reduction, `post_step_gather` around what follows an optimizer step."""
    kind = module.DeepSpeedZeroOptimizer_Stage3
    mangled = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
    reduce, post_step = getattr(kind, mangled), kind._post_step

    @functools.wraps(reduce)
    def reduce_and_partition_ipg_grads(self: Any, communication_data_type: Any) -> Any:
        def values() -> dict[str, int | str]:
            params = self.ipg_buckets[communication_data_type].params
            return {
                "unit": _common_module(_names(params, _model_of(params))),
                "phase": "backward",
                "bytes": sum(p.ds_numel for p in params) * communication_data_type.itemsize,
                "params": len(params),
            }

        with _labels.around("reduce", values):
            return reduce(self, communication_data_type)

    @functools.wraps(post_step)
    def _post_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        _after_step.append(True)
        try:
            with _labels.around("post_step_gather", lambda: {"phase": "optimizer"}):
                return post_step(self, *args, **kwargs)
        finally:
            _after_step.pop()

    setattr(kind, mangled, reduce_and_partition_ipg_grads)
    kind._post_step = _post_step


class _Fetch:
    """A module that is being fetched."""

    def __init__(self, module: Any, coordinator: ModuleType, *, recompute: bool, forward: bool) -> None:
        self._module, self._coordinator, self._recompute = module, coordinator, recompute
        self.phase = "forward" if forward and not recompute else "backward"
        self.path = "?"

    def label(self) -> dict[str, int | str]:
        for known in _models.values():
            if self._module in known.paths:
                self.path = known.paths[self._module]
                if self.phase == "forward" or self._recompute:
                    known.called(self.path, again=self._recompute)
        return {"unit": self.path, "phase": self.phase}

    def reason(self, params: list[Any]) -> str:
        leaf = bool(getattr(self._module, "_z3_leaf", False))
        own = {id(p) for p in self._coordinator.iter_params(self._module, recurse=leaf)}
        if not any(id(p) in own for p in params):
            return "prefetch"
        return "recompute" if self._recompute else "demand"


_running: list[_Fetch] = []
_after_step: list[bool] = []


class _Gather:
    """The label of one gather, which may take several collectives: their parameters are noted as they come."""

    def __init__(self, params: list[Any], running: _Fetch | None) -> None:
        self.sequence = next(_sequence)
        self.values: dict[str, int | str] = {}
        self._params, self._running = params, running
        self._model = _model_of(params)
        self._number = 0
        self._parts: list[list[str]] = []
        self._label: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        if not self._params or self._model is None:
            return
        self._label = _labels.around("gather", self._describe)
        self._label.__enter__()
        _gathering.append(self)

    def __exit__(self, *error: Any) -> None:
        if self._label is None:
            return
        _gathering.remove(self)
        if self._model is not None:
            self._model.split(self._number, self._parts)
        self._label.__exit__(*error)

    def carries(self, params: list[Any], collectives: int = 1) -> None:
        self._parts += [_names(params, self._model)] * collectives

    def _describe(self) -> dict[str, int | str]:
        assert self._model is not None
        names = _names(self._params, self._model)
        self._number = self._model.number_of(tuple(names))
        values: dict[str, int | str] = {"unit": _common_module(names)}
        if self._running is not None:
            values |= {
                "module": self._running.path,
                "phase": self._running.phase,
                "reason": self._running.reason(self._params),
            }
        elif _after_step:
            values |= {"module": "", "phase": "optimizer", "reason": "post_step"}
        else:
            values["reason"] = "demand"
        self.values = values
        return {
            **values,
            "bytes": sum(_gathered_bytes(p) for p in self._params),
            "params": len(names),
            "set": self._number,
            "seq": self.sequence,
        }


_gathering: list[_Gather] = []


def _label_handle(kind: Any, single: bool) -> None:
    initialize, wait = kind.__init__, kind.wait
    gathers: weakref.WeakKeyDictionary[Any, _Gather] = weakref.WeakKeyDictionary()

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if _gathering:
            carried = args[1] if len(args) > 1 else kwargs["param" if single else "params"]
            # Quantized parameters come in two collectives: themselves and their scales.
            count = 1 if kwargs.get("quantization") is None else 2
            _gathering[-1].carries([carried] if single else list(carried), count)
            gathers[self] = _gathering[-1]
        initialize(self, *args, **kwargs)

    @functools.wraps(wait)
    def wait_(self: Any, *args: Any, **kwargs: Any) -> Any:
        gather = gathers.pop(self, None)  # later waits return at once
        if gather is None:
            return wait(self, *args, **kwargs)
        running = _running[-1] if _running else None

        def values() -> dict[str, int | str]:
            place = {} if running is None else {"module": running.path, "phase": running.phase}
            return {"unit": gather.values.get("unit", ""), **place, "seq": gather.sequence}

        with _labels.around("wait", values):
            return wait(self, *args, **kwargs)

    kind.__init__, kind.wait = __init__, wait_


def _note_parts(init: Any, name: str, single: bool) -> None:
    """These take one collective a parameter, without a handle of their own."""
    original = getattr(init, name)

    @functools.wraps(original)
    def noted(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if _gathering:
            for parameter in [params] if single else params:
                _gathering[-1].carries([parameter])
        return original(self, params, *args, **kwargs)

    setattr(init, name, noted)


def _model_of(params: list[Any]) -> Observed | None:
    """The model that the parameters belong to; the ids are DeepSpeed's, unique in a process."""
    if not params:
        return None
    return next((known for known in _models.values() if params[0].ds_id in known.names), None)


def _names(params: list[Any], model: Observed | None) -> list[str]:
    ordered = sorted(params, key=lambda p: p.ds_id)
    return [] if model is None else [model.names.get(p.ds_id, f"#{p.ds_id}") for p in ordered]


def _gathered_bytes(parameter: Any) -> int:
    shard = parameter.ds_tensor
    world = -(-parameter.ds_numel // shard.ds_numel) if shard.ds_numel else 1
    return int(shard.ds_numel * world * shard.element_size())


def _common_module(parameters: list[str]) -> str:
    """The path of the innermost module that holds all of the parameters."""
    owners = [name.split(".")[:-1] for name in parameters]
    common: list[str] = []
    for parts in zip(*owners, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _inside(path: str, others: Any) -> bool:
    return any(path.startswith(f"{other}.") for other in others if other != path)
