"""A trace as a pandas DataFrame.

One row for each event, in file order (the index is the row number used everywhere else):

- `ph`, `cat`, `name`, `pid`, `tid`: categorical; `cat` in the modern spelling
- `ts`, `dur`: Int64 ns, missing where absent
- `lane`: int32, index in `Trace.lanes`, -1 for none
- every integer column that the trace has (`correlation`, `stream`, `external_id`, `bytes`, …): Int64
- every coded column that the trace has (`collective`, `group_name`, `input_dims`, …): categorical
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from z3trace.analyzers.load.fields import CODED_COLUMNS, INT_COLUMNS, NULL, TOP

if TYPE_CHECKING:
    import pandas as pd

    from z3trace.analyzers.trace import Trace


def to_frame(trace: "Trace") -> "pd.DataFrame":
    """The frame described above; a fresh one, free to be changed."""
    import pandas as pd

    def integers(values: Any) -> Any:
        return pd.arrays.IntegerArray(np.array(values), np.asarray(values == NULL))

    def categorical(column: str) -> Any:
        values = trace.values(column)
        present = [i for i, value in enumerate(values) if value is not None]
        table = np.full(len(values) + 1, -1, np.int32)
        table[present] = np.arange(len(present))
        return pd.Categorical.from_codes(
            table[trace.codes(column)], categories=pd.Index([values[i] for i in present], dtype=object)
        )

    data: dict[str, Any] = {column: categorical(column) for column in TOP}
    data["ts"], data["dur"] = integers(trace.ts), integers(trace.dur)
    data["lane"] = trace.lane.copy()
    data |= {column: integers(trace.ints(column)) for column in INT_COLUMNS if trace.has(column)}
    data |= {column: categorical(column) for column in CODED_COLUMNS[len(TOP) :] if trace.has(column)}
    frame: pd.DataFrame = pd.DataFrame(data)
    return frame
