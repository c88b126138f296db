"""When gradients are reduced: DeepSpeed's buckets, sized in elements."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .interface import Collective, Reduce
from .settings import ZeroSettings
from .structure import Structure


@dataclass
class _Bucket:
    dtype: str
    names: list[str] = field(default_factory=list)
    elements: int = 0
    group: str = ""


class Reducer:
    """Collects gradients; a bucket is reduced when the next gradient does not fit, and at the end.

    A gradient larger than a bucket goes alone. There is one bucket, under torch autocast one for each dtype
    in which gradients are communicated. Parameters of different process groups never share a bucket's reduction.
    """

    def __init__(
        self, structure: Structure, settings: ZeroSettings, autocast_dtypes: Mapping[str, str]
    ) -> None:
        self._structure = structure
        self._settings = settings
        self._autocast_dtypes = autocast_dtypes
        self._buckets: dict[str, _Bucket] = {}

    def add(self, name: str) -> list[Reduce]:
        partition = self._structure.partitions[name]
        dtype = self._autocast_dtypes.get(name, "")
        bucket = self._buckets.setdefault(dtype, _Bucket(dtype))
        if name in bucket.names:
            # A leaf called twice; DeepSpeed fails here. The bucket holds the gradient itself, which grows.
            return []
        full = bucket.elements + partition.numel > self._settings.reduce_bucket_size
        actions = self._reduce(bucket) if full or bucket.group != partition.group else []
        bucket.names.append(name)
        bucket.elements += partition.numel
        bucket.group = partition.group
        return actions

    def flush(self) -> list[Reduce]:
        return [action for dtype in sorted(self._buckets) for action in self._reduce(self._buckets[dtype])]

    def _reduce(self, bucket: _Bucket) -> list[Reduce]:
        if not bucket.names:
            return []
        fits = bucket.elements <= self._settings.reduce_bucket_size
        if fits and self._settings.contiguous_gradients and not self._settings.reduce_scatter:
            action = Reduce(tuple(bucket.names), collective=Collective.ALL_REDUCE, dtype=bucket.dtype)
        else:
            action = Reduce(self._structure.ordered(bucket.names), dtype=bucket.dtype)
        bucket.names, bucket.elements = [], 0
        return [action]
