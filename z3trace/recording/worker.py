"""One rank of a recording: `python -m z3trace.recording.worker SETTINGS [-m] TARGET ARGS…`.

A fresh interpreter, so that the script finds nothing imported that it would not find under plain Python,
except this package.
"""

import os
import signal
import sys
import threading

from z3trace.recording.active import begin
from z3trace.recording.messages import say
from z3trace.recording.program import Outcome, Program
from z3trace.recording.recorder import Recorder
from z3trace.recording.settings import Rank, RecordSettings
from z3trace.recording.summary import announce


def main(argv: list[str]) -> int:
    """Run the program, record it, and return the script's exit code."""
    settings = RecordSettings.from_json(argv[0])
    program = Program.from_argv(argv[1:])
    rank = Rank.from_environment()
    recorder = Recorder(settings, rank)
    begin(recorder, labels=settings.labels, step_from=settings.step_from)
    outcome = program.run_as_main()
    # The launcher's SIGTERM must not cut the saving short; it is delivered afterwards.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    recorder.close(outcome)
    if not settings.supervised and rank.rank == 0:
        announce(settings, [recorder.report])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _leave_in_time(settings.exit_grace, outcome, rank)
    return outcome.exit_code


def _leave_in_time(grace: float, outcome: Outcome, rank: Rank) -> None:
    """End the process when it hangs at exit: threads that never end, a process group nobody destroyed."""
    if grace <= 0:
        return

    def leave() -> None:
        others = set(threading.enumerate()) - {threading.main_thread()}
        waiting = sorted(thread.name for thread in others if not thread.daemon)
        why = f", waiting for {', '.join(waiting)}" if waiting else ""
        say(f"rank {rank.rank} ended: it hung for {grace:g} s after the script was over{why} (--exit-grace)")
        os._exit(outcome.exit_code)

    timer = threading.Timer(grace, leave)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
