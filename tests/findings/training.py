"""Traces of a sharded training with a fault of one's choice, by a small simulation.

A host lane that enqueues, device streams that run in order and wait for each other, collectives that end when
the last rank has joined plus alpha + bytes / bandwidth. Times in ns.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

US = 1_000
MS = 1_000_000
COMPUTE, GATHER, REDUCE, COPY = 7, 24, 28, 20
MAIN, AUTOGRAD = 100, 101


@dataclass(frozen=True)
class Plan:
    """A healthy FSDP2 training on 8 devices, and what can be wrong with it."""

    framework: str = "fsdp2"
    layers: int = 6
    layer_elements: int = 8_000_000  # bf16
    root_elements: int = 4_000_000
    compute: int = 1_500 * US  # a layer's forward; backward takes twice that
    alpha: int = 20 * US
    gb_per_s: float = 100.0  # bus bandwidth
    world: int = 8
    steps: int = 3
    micro_batches: int = 1
    parts: int = 1  # gathers for a layer
    tiny_parts: int = 0  # more gathers of a layer, of 1 KiB
    hook: int = 60 * US  # host time before a gather
    ahead: int = 2  # forward gathers that run ahead of compute; 0: none
    backward_prefetch: bool = True
    regather: bool = True  # in backward
    last_freed: bool = False  # the last unit is freed when forward ends, and gathered only then
    recompute: bool = False  # checkpointing outside the unit
    comm_stream: int = GATHER
    one_communicator: bool = False  # reductions share the gathers' queue
    post_step: tuple[int, ...] = ()  # elements of each persistent parameter
    sync_layers: bool = False
    dataloader: int = 100 * US
    malloc: int = 0  # a cudaMalloc of this length in every other layer
    copies: int = 1
    odd_elements: bool = False
    odd_slowdown: float = 1.0
    generate: int = 0  # forwards without backward instead of training
    invalid: bool = False  # every persistent parameter fetched by itself in the passes, no prefetch
    slow: float = 1.0  # this rank's compute
    expert_parts: bool = False  # the parts of a layer are experts
    reduces: int = 1  # reduce-scatters for a layer
    cpu_optimizer: int = 0  # the optimizer runs on the host for so long
    missing_gather: bool = False  # one gather of the last step is of another size
    allocated: int = 0  # bytes that the profiler's memory events show
    metadata: dict = field(default_factory=dict)


@dataclass
class Op:
    start: int
    end: int


class Rank:
    """One rank's run of a plan. `peer`: a rank that comes last to every collective it shares."""

    def __init__(self, plan: Plan, rank: int = 0, peer: "Rank | None" = None) -> None:
        self.plan, self.rank, self.peer = plan, rank, peer
        self.now = 1_000 * MS
        self.free: dict[int, int] = {}
        self.events: list[dict] = []
        self.joined: list[int] = []
        self.correlation = 0
        self.tid = MAIN
        self.sequence = 0
        self.step = 0
        for step in range(plan.steps):
            self._step(step)
        if plan.allocated:
            self.events.append({"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 7,
                                "tid": MAIN, "ts": (self.now - MS) / 1000,
                                "args": {"Total Allocated": plan.allocated, "Total Reserved": 2 * plan.allocated,
                                         "Bytes": 512, "Device Id": 0, "Device Type": 1}})  # fmt: skip

    # Host and device.

    def host(self, name, duration, *, cat="cpu_op", inside=None, **args):
        start = self.now
        self.now += duration // 2
        result = inside() if inside else None
        self.now += duration - duration // 2
        self._event(name, start, self.now, cat, 7, self.tid, args)
        return result

    def launch(self, name, duration, stream, after=(), *, cat="kernel", call="cudaLaunchKernel", **args):
        self.correlation += 1
        self._event(call, self.now, self.now + 4 * US, "cuda_runtime", 7, self.tid,
                    {"correlation": self.correlation})  # fmt: skip
        self.now += 5 * US
        start = max([self.now, self.free.get(stream, 0), *(op.end for op in after if op)])
        op = Op(start, start + duration)
        return self._run(name, op, stream, cat, args)

    def _run(self, name, op, stream, cat, args):
        self.free[stream] = op.end
        self._event(name, op.start, op.end, cat, 0, stream,
                    {"device": 0, "stream": stream, "correlation": self.correlation, **args})  # fmt: skip
        return op

    def _event(self, name, start, end, cat, pid, tid, args):
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start / 1000,
                            "dur": (end - start) / 1000, "args": args})  # fmt: skip

    def wait(self, call, until):
        start = self.now
        self.now = max(self.now + 5 * US, until)
        self._event(
            call, start, self.now, "cuda_runtime", 7, self.tid, {"correlation": 10**7 + len(self.events)}
        )

    def collective(self, kind, elements, stream, after=()):
        """Issue a collective of so many elements in all; its op."""
        plan, world = self.plan, self.plan.world
        shard = elements // world
        slowdown = 1.0
        if plan.odd_elements and elements > 10 * world and kind != "all_reduce":
            shard += 1
            if elements in self._sizes():
                slowdown = plan.odd_slowdown
            else:
                shard -= 1
        total = shard * world
        bus = total * 2 * (world - 1) / world
        duration = plan.alpha + int(bus / plan.gb_per_s * slowdown)
        operator, collective, kernel = {
            "all_gather": ("c10d::_allgather_base_", "_allgather_base", "ncclDevKernel_AllGather_RING_LL"),
            "reduce_scatter": ("c10d::_reduce_scatter_base_", "_reduce_scatter_base",
                               "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
            "all_reduce": ("c10d::allreduce_", "allreduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        }[kind]  # fmt: skip
        large, small = (total, shard) if kind != "all_reduce" else (elements, elements)
        sent, received = (small, large) if kind == "all_gather" else (large, small)
        args = {"Collective name": collective, "In msg nelems": sent, "Out msg nelems": received,
                "Group size": world, "dtype": "BFloat16", "Process Group Name": "0"}  # fmt: skip

        def run():
            self._event("record_param_comms", self.now, self.now + 12 * US, "cpu_op", 7, self.tid, args)
            self.correlation += 1
            self._event("cudaLaunchKernelExC", self.now + 2 * US, self.now + 8 * US, "cuda_runtime", 7, self.tid,
                        {"correlation": self.correlation})  # fmt: skip
            self.now += 10 * US
            queue = [self.free.get(stream, 0)]
            if plan.one_communicator:
                queue += [self.free.get(s, 0) for s in (GATHER, REDUCE)]
            start = max([self.now, *queue, *(op.end for op in after if op)])
            number = len(self.joined)
            self.joined.append(start)
            last = max(start, self.peer.joined[number]) if self.peer else start
            return self._run(kernel, Op(start, last + duration), stream, "kernel", args)

        return self.host(operator, 14 * US, inside=run)

    # The training.

    def _step(self, number):
        begin, plan, self.step = self.now, self.plan, number
        self.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", plan.dataloader,
                  cat="user_annotation")  # fmt: skip
        for _ in range(max(1, plan.generate) - 1 if plan.generate else 0):
            self._forward()
        for _ in range(plan.micro_batches):
            last = self._forward()
            if not plan.generate:
                self._backward(last)
        self.tid = MAIN
        if not plan.generate:
            self._optimizer()
        self.wait("cudaStreamSynchronize", max(self.free.values()))
        self._event(f"ProfilerStep#{number}", begin, self.now, "user_annotation", 7, MAIN, {})

    def _sizes(self):
        """Elements of each gather of a layer."""
        weights = [1 + k % 3 for k in range(self.plan.parts)]
        parts = [self.plan.layer_elements * w // sum(weights) // 4096 * 4096 for w in weights]
        return parts + [512] * self.plan.tiny_parts

    def _hook(self, verb, unit, inside):
        if self.plan.framework == "fsdp2":
            suffix = f" ({unit})" if unit else ""
            return self.host(f"FSDP::{verb}{suffix}", self.plan.hook, cat="user_annotation", inside=inside)
        if self.plan.framework == "fsdp1":
            return self.host(f"FullyShardedDataParallel._{verb}", self.plan.hook, cat="user_annotation",
                             inside=inside)  # fmt: skip
        self.host("PreBackwardFunctionForModule", 4 * US)
        self.now += self.plan.hook
        return inside()

    def _gather(self, unit, elements, after=(), verb="pre_forward", hook=None):
        def issue():
            if self.plan.framework == "fsdp2":
                suffix = f" ({unit})" if unit else ""
                return self.host(
                    f"FSDP::all_gather{suffix}", 6 * US, cat="user_annotation", inside=collective
                )
            return collective()

        def collective():
            return self.collective("all_gather", elements, self.plan.comm_stream, after)

        return self._hook(verb, unit if hook is None else hook, issue)

    def _unit(self, layer):
        return "" if layer < 0 else f"layers.{layer}"

    def _gathers_of(self, layer, after=(), verb="pre_forward", hook=None):
        sizes = [self.plan.root_elements] if layer < 0 else self._sizes()
        if self.plan.invalid and layer >= 0:
            sizes = [s for n in self.plan.post_step for s in (n,)] + sizes
        several = len(sizes) > 1
        part = "mlp.experts." if self.plan.expert_parts else "part"
        if self.plan.missing_gather and self.step == self.plan.steps - 1 and layer == 2:
            sizes = [size // 2 for size in sizes]
        return [
            self._gather(f"{self._unit(layer)}.{part}{k}" if several and layer >= 0 else self._unit(layer), size,
                         after, verb, hook)
            for k, size in enumerate(sizes)
        ]  # fmt: skip

    def _compute(self, name, duration, after=()):
        """A forward operator, which the backward node of its number refers to."""
        self.sequence += 1
        return self.host(
            name, 8 * US, inside=lambda: self.launch("gemm", int(duration * self.plan.slow), COMPUTE, after),
            **{"Sequence number": self.sequence, "Fwd thread id": 0},
        )  # fmt: skip

    def _copy_out(self, elements, after):
        op = None
        for _ in range(self.plan.copies):
            op = self.host("fsdp::split_with_sizes_copy", 8 * US, inside=lambda: self.launch(
                "split_with_sizes_copy_out_kernel", int(elements * 2 / 900), COMPUTE, after))  # fmt: skip
        return op

    def _forward(self):
        plan = self.plan
        done = None
        units = list(range(-1, plan.layers))
        finished: list[Op | None] = []
        for number, layer in enumerate(units):
            # A gather may run while the `ahead` units before it compute.
            held = (
                finished[number - 1 - max(0, plan.ahead - 1)]
                if number - 1 - max(0, plan.ahead - 1) >= 0
                else None
            )
            if plan.ahead == 0 or plan.invalid:
                held = finished[-1] if finished else None
                if held and layer > 0:
                    held = Op(held.end, held.end)
            gathers = self._gathers_of(layer, (held,) if held else ())
            if plan.malloc and layer % 2 == 0:
                self.wait("cudaMalloc", max(self.now, max(self.free.values())) + plan.malloc)
            elements = plan.root_elements if layer < 0 else sum(self._sizes())
            if plan.framework == "fsdp2":
                self._copy_out(elements, gathers)
            done = self._compute("aten::mm", plan.compute if layer >= 0 else plan.compute // 20, gathers)
            if plan.sync_layers and layer >= 0:
                self.host("aten::item", 4 * US, inside=lambda until=done.end: self.wait("cudaStreamSynchronize",
                                                                                        until))  # fmt: skip
            if plan.framework == "fsdp2" and layer >= 0:
                self.host(f"FSDP::post_forward ({self._unit(layer)})", 4 * US, cat="user_annotation")
            finished.append(done)
        return done

    def _node(self, name, number, inside):
        args = {"Sequence number": number, "Fwd thread id": 1}
        return self.host(f"autograd::engine::evaluate_function: {name}", 6 * US, **args,
                         inside=lambda: self.host(name, 4 * US, inside=inside, **args))  # fmt: skip

    def _backward(self, last):
        plan, numbers = self.plan, self.sequence
        self.tid = AUTOGRAD
        order = list(range(plan.layers - 1, -1, -1))
        ready: dict[int, list] = {}
        finished = last

        def fetch(layer, after=(), hook=None):
            if plan.regather and layer not in ready:
                ready[layer] = self._gathers_of(layer, after, "pre_backward", hook)

        def one(position, layer):
            nonlocal finished
            if plan.recompute:
                again = self._gathers_of(layer, (finished,), "pre_forward")
                finished = self._compute("aten::mm", plan.compute, again)
            # Without prefetch a gather waits for the compute before it; a unit freed late for forward's end.
            late = not plan.backward_prefetch or (plan.last_freed and position == 0)
            fetch(layer, (finished,) if late else ())
            if plan.backward_prefetch and position + 1 < len(order):
                fetch(order[position + 1], hook=self._unit(layer))
            if plan.framework == "fsdp2" and not plan.regather:
                self.host(f"FSDP::pre_backward ({self._unit(layer)})", 4 * US, cat="user_annotation")
            finished = self._compute("aten::mm", 2 * plan.compute, ready.get(layer, ()))
            for _ in range(plan.reduces):
                self._reduce(layer, sum(self._sizes()) // plan.reduces // 64 * 64, finished)

        for position, layer in enumerate(order):
            self._node("MmBackward0", numbers - position, lambda p=position, n=layer: one(p, n))
        self._node("EmbeddingBackward0", numbers - plan.layers,
                   lambda: self._reduce(-1, plan.root_elements, finished))  # fmt: skip
        self.tid = MAIN

    def _reduce(self, layer, elements, after):
        stream = COMPUTE if self.plan.comm_stream == COMPUTE else REDUCE
        unit = self._unit(layer)

        def issue():
            return self.collective("reduce_scatter", elements, stream, (after,))

        if self.plan.framework == "fsdp2":
            suffix = f" ({unit})" if unit else ""
            self.host(f"FSDP::post_backward_reduce{suffix}", 10 * US, cat="user_annotation", inside=issue)
        else:
            issue()

    def _optimizer(self):
        busy = max(self.free.values())

        def update():
            self.free[COMPUTE] = max(self.free.get(COMPUTE, 0), busy)
            if self.plan.cpu_optimizer:
                self.wait("cudaStreamSynchronize", busy)
                self.host("DeepSpeedCPUAdam", self.plan.cpu_optimizer)
            self.launch("adam", 300 * US, COMPUTE)

        self.host("Optimizer.step#AdamW.step", 30 * US, cat="user_annotation", inside=update)
        for elements in self.plan.post_step:
            self.collective("all_gather", elements, self.plan.comm_stream, (Op(0, self.free[COMPUTE]),))

    def write(self, path: Path) -> Path:
        groups = [{"pg_name": "0", "pg_size": self.plan.world, "ranks": list(range(self.plan.world))}]
        devices = [{"id": n, "name": "NVIDIA A100-SXM4-80GB"} for n in range(8)]
        document = {
            "schemaVersion": 1, "deviceProperties": devices,
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.plan.world,
                                "pg_count": 1, "pg_config": groups},
            **self.plan.metadata, "traceEvents": self.events,
        }  # fmt: skip
        path.write_text(json.dumps(document))
        return path


def write_run(folder: Path, plan: Plan, late: Plan | None = None) -> Path:
    """Two ranks' traces; with `late` the second rank follows that plan and is last everywhere."""
    folder.mkdir(exist_ok=True)
    second = Rank(late or plan, 1)
    first = Rank(plan, 0, second if late else None)
    first.write(folder / "rank0.json")
    second.write(folder / "rank1.json")
    return folder


def duration(plan: Plan) -> float:
    """The mean length of the later steps, ns."""
    marks = [e for e in Rank(plan).events if e["name"].startswith("ProfilerStep#")][1:]
    return sum(e["dur"] for e in marks) / len(marks) * 1000


__all__ = ["COMPUTE", "MS", "US", "Plan", "Rank", "duration", "replace", "write_run"]
