"""Every collective that gloo offers, called once under the profiler: run as `gloo_calls.py RANK WORLD STORE OUT`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.profiler import ProfilerActivity, profile, record_function


def calls(rank, world):
    """(name, call) of each, on tensors of 4, 8 and 12 float32 elements."""
    group = dist.group.WORLD
    small = [torch.ones(4 * (k + 1)) for k in range(3)]
    large = [torch.ones(4 * (k + 1) * world) for k in range(3)]

    def pieces():
        return [torch.ones(4) for _ in range(world)]

    def coalesced(call, *lists):
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensors in zip(*lists, strict=True):
                call(*tensors)
        manager.wait()

    def message():
        if rank == 0:
            dist.send(small[0], 1)
        elif rank == 1:
            dist.recv(small[0], 0)

    return {
        "coalesced all_gather": lambda: coalesced(dist.all_gather_into_tensor, large, small),
        "coalesced reduce_scatter": lambda: coalesced(dist.reduce_scatter_tensor, small, large),
        "coalesced all_reduce": lambda: coalesced(dist.all_reduce, small),
        "all_gather": lambda: dist.all_gather_into_tensor(large[0], small[0]),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(small[0], large[0]),
        "list all_gather": lambda: dist.all_gather(pieces(), small[0]),
        "list reduce_scatter": lambda: dist.reduce_scatter(torch.empty(4), pieces()),
        "functional all_gather": lambda: functional.all_gather_tensor(small[0], 0, group).sum(),
        "functional coalesced all_gather": lambda: [
            t.sum() for t in functional.all_gather_into_tensor_coalesced(small, group)
        ],
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(
            large[0], "sum", 0, group
        ).sum(),
        "functional coalesced reduce_scatter": lambda: [
            t.sum() for t in functional.reduce_scatter_tensor_coalesced(large, "sum", [0, 0, 0], group)
        ],
        "functional all_reduce": lambda: functional.all_reduce(small[0], "sum", group).sum(),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(4 * world), large[0]),
        "list all_to_all": lambda: dist.all_to_all(pieces(), pieces()),
        "broadcast": lambda: dist.broadcast(small[1], 0),
        "barrier": dist.barrier,
        "monitored barrier": dist.monitored_barrier,
        "message": message,
        "reduce": lambda: dist.reduce(small[0], 0),
        "gather": lambda: dist.gather(small[0], pieces() if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(small[0], pieces() if rank == 0 else None, 0),
        "all_reduce": lambda: dist.all_reduce(large[2]),
    }


def main(rank, world, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for call in calls(rank, world).values():
        call()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for name, call in calls(rank, world).items():
            with record_function(f"call {name}"):
                call()
    profiler.export_chrome_trace(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
