"""Counts the collectives of a training from outside: the calls of torch.distributed, by step and phase.

Import before the training library, which may keep references to what is counted.
"""

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

COUNTS: dict[int, Counter] = {}
_place = [0, "forward"]
_inside = []


def _count(function, kind):
    original = getattr(dist, function, None)
    if original is None:
        return

    def counted(*args, **kwargs):
        if not _inside:  # one may be written in terms of another
            COUNTS.setdefault(_place[0], Counter())[f"{_place[1]} {kind}"] += 1
        _inside.append(kind)
        try:
            return original(*args, **kwargs)
        finally:
            _inside.pop()

    setattr(dist, function, counted)


for name in ("all_gather_into_tensor", "all_gather_single", "all_gather"):
    _count(name, "all_gather")
for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
    _count(name, "reduce_scatter")


@contextmanager
def phase(name):
    before, _place[1] = _place[1], name
    yield
    _place[1] = before


def next_step():
    _place[0] += 1


def write(path):
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps({step: dict(counts) for step, counts in COUNTS.items()}))
