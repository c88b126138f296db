"""Categories of Kineto events: one spelling for all dialects, and what kind of activity each one is."""

MODERN = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "async": "ac2g",
    "async_gpu": "ac2g",
    "async_cpu_to_gpu": "ac2g",
    "forward_backward": "fwdbwd",
    "user_annotations": "user_annotation",
    "gpu_user_annotations": "gpu_user_annotation",
    "instant": "cpu_instant_event",
}
"""Older or other spellings, case-folded -> the name that current Kineto writes."""

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "mtia_insight", "hpu_op")
"""Work that a device does: what may be launched by a runtime call."""

ON_DEVICE = (*DEVICE_WORK, "gpu_user_annotation", "cuda_sync", "cuda_profiler_range", "collective_comm")
"""Everything that is drawn on a device's lanes."""

RUNTIME = (
    "cuda_runtime",
    "cuda_driver",
    "xpu_runtime",
    "xpu_driver",
    "mtia_runtime",
    "glow_runtime",
    "musa_runtime",
    "privateuse1_runtime",
    "privateuse1_driver",
    "hpu_runtime",
)
"""Calls into a device's runtime or driver."""


def modern(category: str) -> str:
    """The current spelling of a category in any case."""
    folded = category.casefold()
    return MODERN.get(folded, folded)
