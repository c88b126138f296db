"""An instrumented ZeRO-3 engine."""
