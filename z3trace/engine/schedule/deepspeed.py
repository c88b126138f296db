"""The `deepspeed` policy: what DeepSpeed 0.19's stage 3 does, collective by collective."""

from collections.abc import Collection, Mapping

from .coordinator import Coordinator
from .interface import Action, Actions, MicroBatch, Model, Phase, Reason
from .reducer import Reducer
from .settings import ZeroSettings
from .structure import Structure


class DeepSpeedSchedule:
    """A `Schedule` that repeats DeepSpeed's decisions exactly; one partition is one parameter.

    `leaves` and `leaves_after` are paths of modules made leaves by calls in the user's script: before
    `deepspeed.initialize` (like the settings' `leaf_module`) or after it (calls below still count as module
    calls, their gradients are reduced one by one). Under torch autocast, `autocast_dtypes` gives the dtype in
    which each parameter is fetched and its gradient reduced. The decisions depend on the events and settings
    alone, so all ranks decide the same.
    Raises ScheduleError where DeepSpeed stops with "tracing error".
    """

    def __init__(
        self,
        model: Model,
        settings: ZeroSettings | None = None,
        *,
        leaves: Collection[str] = (),
        leaves_after: Collection[str] = (),
        autocast_dtypes: Mapping[str, str] | None = None,
    ) -> None:
        settings = settings or ZeroSettings()
        self.structure = Structure(model, settings, leaves, leaves_after)
        self._coordinator = Coordinator(self.structure, settings, autocast_dtypes or {})
        self._reducer = Reducer(self.structure, settings, autocast_dtypes or {})
        self._in_leaf = {name for names in self.structure.gradient_leaves.values() for name in names}
        self._waiting_for_leaf: dict[str, None] = {}
        self._called: set[str] = set()

    @property
    def mode(self) -> str:
        """Where the recorded order of modules stands: `record`, `complete` or `invalid`."""
        return self._coordinator.recorder.mode.value

    def forward_begins(self, micro_batch: MicroBatch) -> Actions:
        return self._coordinator.begin_pass()

    def pre_forward(self, module: str, *, recompute: bool = False) -> Actions:
        if module not in self.structure.hooked:
            return []
        self._called.add(module)
        return self._coordinator.enter_forward(module, recompute=recompute)

    def parameter_read(self, module: str, partition: str) -> Actions:
        while module not in self.structure.hooked:
            module = module.rpartition(".")[0]
        return self._coordinator.read(module, partition)

    def parameter_returned(self, module: str, partition: str) -> Actions:
        if module not in self.structure.hooked:
            return []
        return self._coordinator.returned(module, partition)

    def post_forward(self, module: str, *, recompute: bool = False, differentiable: bool = True) -> Actions:
        if module not in self.structure.hooked:
            return []
        return self._coordinator.leave_forward(module)

    def forward_ends(self) -> Actions:
        return []

    def pre_backward(self, module: str, *, call: int | None = None) -> Actions:
        if module not in self.structure.hooked:
            return []
        return self._coordinator.enter_backward(module)

    def gradient_ready(self, partition: str) -> Actions:
        if partition in self._in_leaf:
            self._waiting_for_leaf[partition] = None
            return []
        return self._reducer.add(partition)

    def post_backward(self, module: str) -> Actions:
        actions: list[Action] = []
        for name in self.structure.gradient_leaves.get(module, ()):
            # A parameter without a gradient (an expert that no token chose) is reduced as zeros.
            self._waiting_for_leaf.pop(name, None)
            actions += self._reducer.add(name)
        # A module called several times before its backward is left once only: the hooks share a counter
        # that each call starts anew.
        if module in self._called:
            self._called.remove(module)
            actions += self._coordinator.leave_backward(module)
        return actions

    def backward_ends(self) -> Actions:
        actions: list[Action] = []
        for name in self._waiting_for_leaf:
            actions += self._reducer.add(name)
        self._waiting_for_leaf.clear()
        return actions + list(self._reducer.flush()) + self._coordinator.end_backward()

    def step_begins(self) -> Actions:
        return self._coordinator.residency.shard_all()

    def step_ends(self, *, skipped: bool = False) -> Actions:
        if skipped:
            return []
        self._coordinator.residency.shards_changed()
        persistent = self.structure.persistent
        groups = dict.fromkeys(self.structure.partitions[name].group for name in persistent)
        return [
            action
            for group in groups
            for action in self._coordinator.residency.gather_alone(
                tuple(name for name in persistent if self.structure.partitions[name].group == group),
                "",
                Phase.OPTIMIZER,
                Reason.POST_STEP,
            )
        ]
