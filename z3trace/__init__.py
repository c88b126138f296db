"""z3trace: see why ZeRO-3 training is slow.

The command is `z3trace`; the parts are `z3trace.engine` (an instrumented ZeRO-3 engine),
`z3trace.analyzers` (trace -> tables -> findings) and `z3trace.recording`.
"""

__version__ = "0.1.0"
