"""The events of one micro-batch, derived from the model: forward order, and the backward order it implies.

DeepSpeed's backward hooks sit on a module's output and input tensors, so backward visits the calls of forward
in reverse: each exit is a `pre_backward`, each entry a `post_backward`, except where no output or no
positional input requires a gradient. What hooks would see is inferred from names, classes and which
parameters train; `CallFacts` overrides the inference where it is wrong.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from .call_order import inferred_order, is_rotary
from .interface import Model, Module
from .structure import short_name


class EventKind(str, Enum):
    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PARAMETER_READ = "parameter_read"
    PARAMETER_RETURNED = "parameter_returned"
    PRE_BACKWARD = "pre_backward"
    GRADIENT_READY = "gradient_ready"
    POST_BACKWARD = "post_backward"


@dataclass(frozen=True)
class Event:
    """One event of a `Schedule`; `partition` where the event is about one."""

    kind: EventKind
    module: str = ""
    partition: str = ""
    recompute: bool = False


@dataclass(frozen=True)
class CallFacts:
    """What is known about the calls of the model; everything left out is inferred.

    `order`: paths in the order in which calls begin (a module called twice appears twice); a call lies
    inside the latest open call of an ancestor. `grad_inputs` and `grad_outputs`: number of positional tensor
    inputs, of output tensors, that require a gradient. `reads`: parameters of other modules that a module's
    forward reads, each before it calls the first module that uses it; `returns`: own parameters that it
    returns, as its last outputs. `checkpointed`: modules that are called under activation checkpointing,
    `checkpointed_bodies`: those that run their own forward under it (so the layers of transformers 5);
    `reentrant` is its older kind.
    """

    order: tuple[str, ...] | None = None
    grad_inputs: Mapping[str, int] = field(default_factory=dict)
    grad_outputs: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    returns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpointed: frozenset[str] = frozenset()
    checkpointed_bodies: frozenset[str] = frozenset()
    reentrant: bool = False


@dataclass(frozen=True)
class Call:
    """One call in forward, with the calls inside it; `reads` are (number of an inner call, parameter)."""

    module: str
    inner: tuple["Call", ...] = ()
    grad_inputs: int = 1
    grad_outputs: int = 1
    reads: tuple[tuple[int, str], ...] = ()
    returns: tuple[str, ...] = ()


def call_tree(model: Model, facts: CallFacts | None = None) -> Call:
    """The call of the whole model; without `order`, every module is called once, in the inferred order."""
    facts = facts or CallFacts()
    order = facts.order or inferred_order(model)
    return _Inference(model, facts).call(_nest(order)[0])


def forward_events(call: Call, *, recompute: bool = False) -> list[Event]:
    """The events of a call's forward; a `recompute` is activation checkpointing's second one."""
    module = call.module
    events = [
        Event(EventKind.PRE_FORWARD, module, recompute=recompute),
        *_body_events(call, recompute=recompute),
    ]
    events += [Event(EventKind.PARAMETER_RETURNED, module, name) for name in call.returns if not recompute]
    return [*events, Event(EventKind.POST_FORWARD, module, recompute=recompute)]


def _body_events(call: Call, *, recompute: bool) -> Iterator[Event]:
    for number, inner in enumerate(call.inner):
        for place, name in call.reads:
            if place == number and not recompute:
                yield Event(EventKind.PARAMETER_READ, call.module, name)
        yield from forward_events(inner, recompute=recompute)
    for place, name in call.reads:
        if place == len(call.inner) and not recompute:
            yield Event(EventKind.PARAMETER_READ, call.module, name)


def backward_events(model: Model, call: Call, facts: CallFacts | None = None) -> list[Event]:
    """The events of the backward that follows `call`, recomputation included."""
    return list(_Backward(model, call, facts or CallFacts()).visit(call))


@dataclass(frozen=True)
class _Node:
    module: str
    inner: list["_Node"]


def _nest(order: tuple[str, ...]) -> list[_Node]:
    roots: list[_Node] = []
    open_calls: list[_Node] = []
    for path in order:
        while open_calls and not _is_below(path, open_calls[-1].module):
            open_calls.pop()
        node = _Node(path, [])
        (open_calls[-1].inner if open_calls else roots).append(node)
        open_calls.append(node)
    return roots


def _is_below(path: str, ancestor: str) -> bool:
    return path != ancestor and (not ancestor or path.startswith(ancestor + "."))


# Projections of one input, not of each other's output.
_SIDE_BY_SIDE = frozenset({"q_proj", "k_proj", "v_proj", "query", "key", "value", "gate_proj", "up_proj"})


class _Inference:
    """Walks the calls in forward order and knows whether gradients flow through what was computed so far."""

    def __init__(self, model: Model, facts: CallFacts) -> None:
        self._modules = {module.path: module for module in model.modules}
        self._trainable = {part.name for part in model.partitions if part.trainable}
        self._facts = facts
        self._flowing = False

    def call(self, node: _Node, around: bool = False) -> Call:
        """`around` says whether a gradient flows into the call around this one."""
        module = self._modules[node.module]
        name = node.module.rpartition(".")[2]
        words = f"{short_name(module.class_name)} {name}".lower()
        takes_indices = "embed" in words or words.strip() in ("wte", "wpe")
        before = self._flowing
        self._flowing = around if name in _SIDE_BY_SIDE else before
        flows_in = self._flowing
        inputs = int(flows_in and not takes_indices)
        inner = tuple(self.call(child, flows_in) for child in node.inner)
        trains = any(name in self._trainable for name in module.partitions)
        outputs = int(
            not is_rotary(module) and (inputs > 0 or trains or any(child.grad_outputs for child in inner))
        )
        self._flowing = before or outputs > 0
        return Call(
            node.module,
            inner,
            self._facts.grad_inputs.get(node.module, inputs),
            self._facts.grad_outputs.get(
                node.module, outputs + len(self._facts.returns.get(node.module, ()))
            ),
            tuple((self._place(name, inner), name) for name in self._reads(module)),
            tuple(self._facts.returns.get(node.module, ())),
        )

    def _reads(self, module: Module) -> tuple[str, ...]:
        """peft's LoRA layers ask the adapter's weight for its dtype before they call it."""
        if module.path in self._facts.reads or not module.class_name.startswith("peft.tuners.lora."):
            return tuple(self._facts.reads.get(module.path, ()))
        adapters = self._modules.get(f"{module.path}.lora_A")
        return tuple(
            name
            for child in (adapters.children if adapters else ())
            for name in self._modules[child].partitions
        )

    def _place(self, name: str, inner: tuple[Call, ...]) -> int:
        """Before which of the inner calls a parameter is read: the first that uses it, else the first."""

        def uses(call: Call) -> bool:
            return name in self._modules[call.module].partitions or any(uses(child) for child in call.inner)

        return next((number for number, call in enumerate(inner) if uses(call)), 0)


class _Backward:
    def __init__(self, model: Model, root: Call, facts: CallFacts) -> None:
        self._modules = {module.path: module for module in model.modules}
        self._trainable = {part.name for part in model.partitions if part.trainable}
        self._facts = facts
        self._uses: Counter[str] = Counter()
        self._count(root)
        # The recomputation of the checkpointed region whose saved tensors are not there yet.
        self._lost: list[Event] | None = None

    def _own(self, call: Call) -> list[str]:
        module = self._modules[call.module]
        own = [name for name in module.partitions if name in self._trainable]
        # torch.addmm hands on the gradient of the bias first; DeepSpeed's own linear function does not.
        return own[::-1] if short_name(module.class_name) == "Conv1D" else own

    def _count(self, call: Call) -> None:
        if call.grad_outputs:
            self._uses.update(self._own(call))
            for inner in call.inner:
                self._count(inner)

    def visit(self, call: Call) -> Iterator[Event]:
        if not call.grad_outputs:
            return
        free = self._lost is None
        outside = free and call.module in self._facts.checkpointed
        inside = free and not outside and call.module in self._facts.checkpointed_bodies
        if outside:
            yield from self._forget(forward_events(call, recompute=True))
        for output in range(call.grad_outputs):
            yield Event(EventKind.PRE_BACKWARD, call.module)
            if output < len(call.returns):
                yield from self._gradient(call, call.returns[-1 - output])
        if inside:
            yield from self._forget(list(_body_events(call, recompute=True)))
        if self._lost is not None and self._saves_tensors(call):
            yield from self._recompute(call.module)
        for inner in reversed(call.inner):
            yield from self.visit(inner)
        for name in self._own(call):
            if name not in call.returns:
                yield from self._gradient(call, name)
        if call.grad_inputs:
            yield Event(EventKind.POST_BACKWARD, call.module)
        if outside or inside:
            self._lost = None

    def _forget(self, region: list[Event]) -> list[Event]:
        """A checkpointed region's backward begins: reentrant, it is computed again now, else when needed."""
        if self._facts.reentrant:
            return region
        self._lost = region
        return []

    def _recompute(self, last: str) -> list[Event]:
        """The first backward that needs a saved tensor brings all of the region back, up to that one: the
        call of `last`, which is not left."""
        region, self._lost = self._lost or [], None
        begun = [n for n, e in enumerate(region) if e.kind is EventKind.PRE_FORWARD and e.module == last]
        return region[: begun[-1] + 1] if begun else []

    def _gradient(self, call: Call, name: str) -> Iterator[Event]:
        """A gradient is complete when the backward of its first use in forward is done."""
        self._uses[name] -= 1
        if self._uses[name] == 0:
            yield Event(EventKind.GRADIENT_READY, call.module, name)

    def _saves_tensors(self, call: Call) -> bool:
        return not call.inner and short_name(self._modules[call.module].class_name) != "Identity"
