"""The one error that a user sees as a line instead of a traceback."""


class UserError(Exception):
    """Something the user can put right: the message says what, where and what to do, in one line.

    The command prints it on stderr and ends with `exit_code`; in Python it is an ordinary exception.
    """

    exit_code = 2
