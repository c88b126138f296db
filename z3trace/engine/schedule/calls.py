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

from .interface import Model
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
    forward reads before it calls them; `returns`: own parameters that it returns, as its last outputs.
    `checkpointed`: modules whose calls run under activation checkpointing; `reentrant` is its older kind.
    """

    order: tuple[str, ...] | None = None
    grad_inputs: Mapping[str, int] = field(default_factory=dict)
    grad_outputs: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    returns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpointed: frozenset[str] = frozenset()
    reentrant: bool = False


@dataclass(frozen=True)
class Call:
    """One call in forward, with the calls inside it."""

    module: str
    inner: tuple["Call", ...] = ()
    grad_inputs: int = 1
    grad_outputs: int = 1
    reads: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


def call_tree(model: Model, facts: CallFacts | None = None) -> Call:
    """The call of the whole model. Without `order`, every module but plain containers is called once, in
    registration order."""
    facts = facts or CallFacts()
    order = facts.order or tuple(_called(model))
    return _Inference(model, facts).call(_nest(order)[0])


def forward_events(call: Call, *, recompute: bool = False) -> list[Event]:
    """The events of a call's forward; a `recompute` is activation checkpointing's second one."""
    module = call.module
    events = [Event(EventKind.PRE_FORWARD, module, recompute=recompute)]
    events += [Event(EventKind.PARAMETER_READ, module, name) for name in call.reads if not recompute]
    for inner in call.inner:
        events += forward_events(inner, recompute=recompute)
    events += [Event(EventKind.PARAMETER_RETURNED, module, name) for name in call.returns if not recompute]
    return [*events, Event(EventKind.POST_FORWARD, module, recompute=recompute)]


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


def _called(model: Model) -> Iterator[str]:
    modules = {module.path: module for module in model.modules}

    def shape(path: str) -> tuple[object, ...]:
        """The tree of names below a module: alike for the repeated blocks of a list."""
        children = modules[path].children
        return tuple((child[len(path) :], shape(child)) for child in children)

    def is_list(path: str) -> bool:
        module = modules[path]
        if module.class_name:
            return short_name(module.class_name) in {
                "ModuleList",
                "ModuleDict",
                "ParameterList",
                "ParameterDict",
            }
        names = [child.rpartition(".")[2] for child in module.children]
        numbered = bool(names) and names == [str(number) for number in range(len(names))]
        if not numbered or module.partitions:
            return False
        # A Sequential is called and looks the same, but is seldom made of alike blocks with inner modules.
        shapes = {shape(child) for child in module.children}
        return len(shapes) == 1 and shapes != {()}

    return (module.path for module in model.modules if not is_list(module.path))


class _Inference:
    """Walks the calls in forward order and knows whether gradients flow through what was computed so far."""

    def __init__(self, model: Model, facts: CallFacts) -> None:
        self._modules = {module.path: module for module in model.modules}
        self._trainable = {part.name for part in model.partitions if part.trainable}
        self._facts = facts
        self._flowing = False

    def call(self, node: _Node) -> Call:
        module = self._modules[node.module]
        words = f"{short_name(module.class_name)} {node.module.rpartition('.')[2]}".lower()
        takes_indices = "embed" in words or words.strip() in ("wte", "wpe")
        constant = "rotary" in words and not module.partitions
        inputs = int(self._flowing and not takes_indices)
        before = self._flowing
        inner = tuple(self.call(child) for child in node.inner)
        trains = any(name in self._trainable for name in module.partitions)
        outputs = int(not constant and (inputs > 0 or trains or any(child.grad_outputs for child in inner)))
        self._flowing = before or outputs > 0
        return Call(
            node.module,
            inner,
            self._facts.grad_inputs.get(node.module, inputs),
            self._facts.grad_outputs.get(
                node.module, outputs + len(self._facts.returns.get(node.module, ()))
            ),
            tuple(self._facts.reads.get(node.module, ())),
            tuple(self._facts.returns.get(node.module, ())),
        )


class _Backward:
    def __init__(self, model: Model, root: Call, facts: CallFacts) -> None:
        self._modules = {module.path: module for module in model.modules}
        self._trainable = {part.name for part in model.partitions if part.trainable}
        self._facts = facts
        self._uses: Counter[str] = Counter()
        self._count(root)
        # Calls of the checkpointed region whose saved tensors are not there yet.
        self._lost: Call | None = None

    def _own(self, call: Call) -> list[str]:
        return [name for name in self._modules[call.module].partitions if name in self._trainable]

    def _count(self, call: Call) -> None:
        if call.grad_outputs:
            self._uses.update(self._own(call))
            for inner in call.inner:
                self._count(inner)

    def visit(self, call: Call) -> Iterator[Event]:
        if not call.grad_outputs:
            return
        checkpointed = call.module in self._facts.checkpointed and self._lost is None
        if checkpointed and self._facts.reentrant:
            yield from forward_events(call, recompute=True)
        elif checkpointed:
            self._lost = call
        for output in range(call.grad_outputs):
            yield Event(EventKind.PRE_BACKWARD, call.module)
            if output < len(call.returns):
                yield from self._gradient(call, call.returns[-1 - output])
        if self._lost is not None and self._saves_tensors(call):
            # The first backward that needs a saved tensor brings all of the region back, up to the last one.
            region, self._lost = self._lost, None
            yield from self._recompute(region, call)
        for inner in reversed(call.inner):
            yield from self.visit(inner)
        for name in self._own(call):
            if name not in call.returns:
                yield from self._gradient(call, name)
        if call.grad_inputs:
            yield Event(EventKind.POST_BACKWARD, call.module)
        if checkpointed:
            self._lost = None

    def _gradient(self, call: Call, name: str) -> Iterator[Event]:
        """A gradient is complete when the backward of its first use in forward is done."""
        self._uses[name] -= 1
        if self._uses[name] == 0:
            yield Event(EventKind.GRADIENT_READY, call.module, name)

    def _saves_tensors(self, call: Call) -> bool:
        return not call.inner and short_name(self._modules[call.module].class_name) != "Identity"

    def _recompute(self, region: Call, last: Call) -> Iterator[Event]:
        """The forward of `region` up to the call `last`, which it does not leave."""
        for event in forward_events(region, recompute=True):
            yield event
            if event.kind is EventKind.PRE_FORWARD and event.module == last.module:
                return
