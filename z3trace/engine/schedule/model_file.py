"""A model described by a JSON mapping: what `model.json` holds, and what a trace's own metadata holds.

    {"modules": [names in registration order, "" = the model],
     "parameters": {name: {"shape": [...], "numel": n}},
     "zero_optimization": {...}, "world_size": n}

is enough. A module may also be {"path": name, "class": class}, as the engine describes itself, and its
`call_order` is read as `calls.order`. Optional and used where given: `classes` {module: class}; for a
parameter `dtype`, `trainable`, `group`, `owners` (all modules that own it: tied weights) and `autocast_dtype`
(in which torch autocast communicates it); `dtype`, `gradient_accumulation_steps`, `hidden_size` (resolves
`auto`), `groups` {process group: size}, `leaves` and `leaves_after` (modules made leaves by the script, before
or after initialization), and `calls` {`order`, `grad_inputs`, `grad_outputs`, `reads`, `returns`,
`checkpointed`, `checkpointed_bodies`, `reentrant`} as in `CallFacts`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from z3trace.errors import UserError

from .calls import CallFacts
from .interface import Model, Module, Partition
from .settings import ZeroSettings

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_ALIASES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Description:
    """A model, the settings it runs with, and what is known of its calls."""

    model: Model
    settings: ZeroSettings
    world_size: int
    gradient_accumulation_steps: int = 1
    leaves: tuple[str, ...] = ()
    leaves_after: tuple[str, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    autocast_dtypes: Mapping[str, str] = field(default_factory=dict)
    facts: CallFacts = field(default_factory=CallFacts)


def parse_description(data: Mapping[str, Any], where: str = "model.json") -> Description:
    """Check and read a description. Raises UserError naming the key that is missing or wrong."""
    names, classes = _modules(_required(data, "modules", where), f"{where}: modules")
    classes |= _mapping(data.get("classes", {}), f"{where}: classes")
    parameters = _mapping(_required(data, "parameters", where), f"{where}: parameters")
    calls = dict(_mapping(data.get("calls", {}), f"{where}: calls"))
    if data.get("call_order"):
        calls.setdefault("order", ["", *(path for path in data["call_order"] if path)])
    default_dtype = dtype_name(data.get("dtype", "float32"), where)
    known = frozenset(names)
    owned: dict[str, list[str]] = {name: [] for name in names}
    partitions, leaves = [], dict.fromkeys(_strings(data.get("leaves", ()), f"{where}: leaves"))
    for name, entry in parameters.items():
        entry = _mapping(entry, f"{where}: parameter {name}")
        dtype = dtype_name(entry["dtype"], where) if "dtype" in entry else default_dtype
        partitions.append(
            Partition(
                name,
                (name,),
                _numel(name, entry, where),
                dtype,
                bool(entry.get("trainable", True)),
                str(entry.get("group", "")),
            )
        )
        for owner in entry.get("owners", (name.rpartition(".")[0],)):
            listed = _nearest_listed(owner, known)
            if listed != owner:
                leaves[listed] = None  # nothing below it is listed, so nothing below it is hooked
            owned[listed].append(name)
    children: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        if name:
            children[_nearest_listed(name.rpartition(".")[0], known)].append(name)
    model = Model(
        tuple(
            Module(name, str(classes.get(name, "")), tuple(owned[name]), tuple(children[name]))
            for name in names
        ),
        tuple(partitions),
    )
    return Description(
        model,
        ZeroSettings.parse(
            _mapping(data.get("zero_optimization", {}), f"{where}: zero_optimization"),
            hidden_size=data.get("hidden_size"),
            where=f"{where}: zero_optimization",
        ),
        _positive(data.get("world_size", 1), f"{where}: world_size"),
        _positive(data.get("gradient_accumulation_steps", 1), f"{where}: gradient_accumulation_steps"),
        tuple(leaves),
        _strings(data.get("leaves_after", ()), f"{where}: leaves_after"),
        {
            str(name): _positive(size, f"{where}: groups.{name}")
            for name, size in _mapping(data.get("groups", {}), f"{where}: groups").items()
        },
        {
            str(name): dtype_name(entry["autocast_dtype"], where)
            for name, entry in parameters.items()
            if "autocast_dtype" in entry
        },
        _facts(calls, f"{where}: calls", known),
    )


def _modules(entries: Any, where: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names, and classes where they are there: entries are names or {"path": name, "class": class}."""
    if isinstance(entries, list) and entries and all(isinstance(entry, Mapping) for entry in entries):
        pairs = [(str(_required(entry, "path", where)), str(entry.get("class", ""))) for entry in entries]
    else:
        pairs = [(name, "") for name in _strings(entries, where)]
    if not pairs or pairs[0][0] != "":
        pairs.insert(0, ("", ""))
    return tuple(name for name, _ in pairs), {name: kind for name, kind in pairs if kind}


def dtype_name(value: object, where: str = "dtype") -> str:
    """The name of a dtype as torch spells it, from "bf16", "torch.bfloat16", "BFloat16" and the like."""
    name = str(value).rpartition(".")[2].lower()
    name = _ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise UserError(f"{where}: dtype {value!r} is unknown: give one of {', '.join(DTYPE_BYTES)}")
    return name


def _facts(calls: Mapping[str, Any], where: str, known: frozenset[str]) -> CallFacts:
    keys = {entry.name for entry in fields(CallFacts)}
    for key in calls:
        if key not in keys:
            raise UserError(f"{where}.{key} is unknown: give one of {', '.join(sorted(keys))}")
    order = calls.get("order")
    facts = CallFacts(
        None if order is None else _strings(order, f"{where}.order"),
        _mapping(calls.get("grad_inputs", {}), f"{where}.grad_inputs"),
        _mapping(calls.get("grad_outputs", {}), f"{where}.grad_outputs"),
        _string_lists(calls.get("reads", {}), f"{where}.reads"),
        _string_lists(calls.get("returns", {}), f"{where}.returns"),
        frozenset(_strings(calls.get("checkpointed", ()), f"{where}.checkpointed")),
        frozenset(_strings(calls.get("checkpointed_bodies", ()), f"{where}.checkpointed_bodies")),
        bool(calls.get("reentrant", False)),
    )
    if facts.order is not None and facts.order[:1] != ("",):
        raise UserError(f'{where}.order does not begin with "": the model\'s own call comes first')
    for key in keys - {"reentrant"}:
        unknown = sorted(set(getattr(facts, key) or ()) - known)
        if unknown:
            raise UserError(f"{where}.{key} names {unknown[0]!r}, which is not among the modules")
    return facts


def _nearest_listed(path: str, known: frozenset[str]) -> str:
    while path not in known:
        path = path.rpartition(".")[0]
    return path


def _numel(name: str, entry: Mapping[str, Any], where: str) -> int:
    if "numel" in entry:
        return _positive(entry["numel"], f"{where}: numel of parameter {name}")
    if "shape" in entry:
        return math.prod(entry["shape"])
    raise UserError(f"{where}: parameter {name} has neither numel nor shape: give one")


def _required(data: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise UserError(f"{where} has no {key}: `z3trace describe` writes such a file")
    return data[key]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {type(value).__name__}: give a mapping")
    return value


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UserError(f"{where} is {type(value).__name__}: give a list of names")
    return tuple(str(item) for item in value)


def _string_lists(value: Any, where: str) -> dict[str, tuple[str, ...]]:
    return {str(key): _strings(names, f"{where}.{key}") for key, names in _mapping(value, where).items()}


def _positive(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where} is {value!r}: give a whole number of at least 1")
    return value
