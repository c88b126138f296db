"""Attribution by Python stacks: a trace taken with `with_stack=True` holds a range for each module's call."""

from collections import Counter

import numpy as np

from z3trace.analyzers.attribution.base import Attribution, Owner, Placement
from z3trace.analyzers.collectives import Collectives
from z3trace.analyzers.host import host_spans, nearest_ancestor
from z3trace.analyzers.trace import Trace

PREFIX = "nn.Module: "


def attribute(
    framework: str, trace: Trace, collectives: Collectives, placement: Placement
) -> Attribution | None:
    """Issuing module (like `Linear_3`) and layer (the outermost class called several times: `Block_1`).

    None when the trace holds no modules or none encloses a collective.
    """
    rows = host_spans(trace, lambda name: name.startswith(PREFIX))
    if not len(rows):
        return None
    is_module = np.zeros(len(trace), np.bool_)
    is_module[rows] = True
    instances: dict[str, set[str]] = {}
    for row in rows.tolist():
        name = trace.name_of(row).removeprefix(PREFIX)
        instances.setdefault(name.rpartition("_")[0], set()).add(name)
    number = Counter({kind: len(names) for kind, names in instances.items()})
    owners = []
    for k in range(len(collectives)):
        chain: list[str] = []
        current = int(collectives.issue_row[k])
        while current >= 0:
            current = int(nearest_ancestor(trace, np.array([current]), is_module)[0])
            if current >= 0:
                chain.append(trace.name_of(current).removeprefix(PREFIX))
        layer = next((name for name in reversed(chain) if number[name.rpartition("_")[0]] > 1), None)
        if chain:
            layer = layer or "root"
        owners.append(Owner(issued_in=chain[0] if chain else None, layer=layer))
    if not any(owner.issued_in for owner in owners):
        return None
    note = "gathers are placed by the module calls of the Python stacks: class and number, in order of first call"
    return Attribution(framework, tuple(owners), (note,))
