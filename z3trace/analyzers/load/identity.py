"""What a trace says about the machine it comes from."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from z3trace.analyzers.load import categories

if TYPE_CHECKING:
    from z3trace.analyzers.trace import Trace

_AMD = re.compile(r"\bAMD\b|Instinct|Radeon", re.IGNORECASE)
_INTEL = re.compile(r"\bIntel\b|Data Center GPU Max", re.IGNORECASE)


def device_kind(trace: "Trace") -> str:
    """The kind of device whose work the trace holds: "cuda", "rocm", "xpu", "mtia" or "cpu"."""
    cats = {value for value in trace.values("cat") if isinstance(value, str)}
    if any(cat.startswith("mtia") for cat in cats):
        return "mtia"
    if any(cat.startswith("xpu") for cat in cats):
        return "xpu"
    works = cats & {*categories.DEVICE_WORK, *categories.RUNTIME}
    if not works:
        return "cpu"
    metadata = trace.metadata
    if "hip_runtime_version" in metadata or "roctracer_version" in metadata:
        return "rocm"
    properties = metadata.get("deviceProperties")
    names = [
        str(device.get("name", ""))
        for device in (properties if isinstance(properties, list) else [])
        if isinstance(device, Mapping)
    ]
    if any(_AMD.search(name) for name in names):
        return "rocm"
    if any(_INTEL.search(name) for name in names):
        return "xpu"
    if trace.named(lambda name: name.startswith("hip") and name[3:4].isupper()).any():
        return "rocm"
    return "cuda"
