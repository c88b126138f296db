"""What all analyses of a large trace cost beside loading it, and that the cost grows linearly with the events.

    python benchmarks/analyze.py TRACE... [--megabytes 50 100 200] [--repeat 3]

Each TRACE is replicated (see load.py). Loading and analysing take turns in one process; CPU seconds are
medians of the repeats.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from load import replicate

from z3trace.analyzers.load import load
from z3trace.analyzers.pipeline import analyze_trace
from z3trace.analyzers.trace import Trace


def analyze(trace: Trace) -> None:
    """Every table of the report."""
    analysis = analyze_trace(trace, trace.rank or 0)
    analysis.whole_trace_rows()
    analysis.step_rows()
    analysis.collective_rows()
    analysis.layer_rows()
    analysis.gather_rows(analysis.collectives.start)
    analysis.idle_rows()


def measure(path: Path, repeat: int) -> tuple[int, float, float]:
    """(events, median CPU s of loading, of analysing)."""
    loading, analysing, events = [], [], 0
    for _ in range(repeat):
        begun = time.process_time()
        trace = load(path)
        loaded = time.process_time()
        analyze(trace)
        loading.append(loaded - begun)
        analysing.append(time.process_time() - loaded)
        events = len(trace)
    return events, statistics.median(loading), statistics.median(analysing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[50, 100, 200])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(f"{'trace':40} {'MB':>5} {'events':>9} {'load':>7} {'analyse':>8} {'ratio':>6} {'µs/event':>9}")
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "trace.json"
        for source in options.traces:
            for megabytes in options.megabytes:
                replicate(source, large, megabytes)
                events, loading, analysing = measure(large, options.repeat)
                name = f"{source.parent.name}/{source.name}"[-40:]
                print(
                    f"{name:40} {megabytes:5.0f} {events:9,} {loading:6.2f}s {analysing:7.2f}s "
                    f"{analysing / loading:6.2f} {analysing / events * 1e6:9.2f}"
                )


if __name__ == "__main__":
    main()
