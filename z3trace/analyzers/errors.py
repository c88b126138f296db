"""Errors of the analyzers that a user sees as one line."""

from z3trace.errors import UserError


class TraceError(UserError):
    """The input cannot be read as a trace: wrong path, wrong format, no events, contradicting ranks."""


class NotATraceError(TraceError):
    """A sound JSON file, but of something else: left out without a word when it lies beside traces."""
