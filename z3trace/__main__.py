"""`python -m z3trace` is the command `z3trace`."""

from z3trace.cli import main

if __name__ == "__main__":
    main()
