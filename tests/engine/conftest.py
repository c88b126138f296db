"""The modules beside the tests (`worlds`, `models`, `training`) are imported by their bare names."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process only."""
    import torch
    import torch.distributed as dist

    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
