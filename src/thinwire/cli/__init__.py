"""The command line. `main` is the entry point of the `thinwire` command.

Commands import torch, Numba and the packages built on them when they run, so that help and completion need neither.
"""

import os
import sys
from typing import NoReturn


def main() -> None:
    from .console import DEBUG, UNEXPECTED, say_error

    try:
        from .app import app

        app()
    except Exception as error:  # commands report the errors they know
        if os.environ.get(DEBUG):
            raise
        if isinstance(error, ImportError):
            _diagnose(error)
        say_error(
            f"{type(error).__name__}: {error}; this is a bug in thinwire, `thinwire --debug ...` prints the traceback"
        )
        sys.exit(UNEXPECTED)


def _diagnose(error: ImportError) -> NoReturn:
    """A package that a command needs is missing or broken: run the checks of `thinwire doctor`."""
    import typer

    from .console import say_error
    from .doctor import doctor

    say_error(f"a package cannot be loaded: {error}. `thinwire doctor` finds:")
    try:
        doctor()
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
    sys.exit(1)
