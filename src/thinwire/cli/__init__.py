"""The command line: thin over the rooms below. `main` is the entry point of the `thinwire` command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> None:
    from .console import DEBUG, UNEXPECTED, say_error

    try:
        from .app import app
    except ImportError as error:
        if os.environ.get(DEBUG):
            raise
        _without_packages(error)
    try:
        app()
    except Exception as error:  # a mistake of ours: no command lets one out that it knows
        if os.environ.get(DEBUG):
            raise
        say_error(
            f"{type(error).__name__}: {error}; this should not happen, `thinwire --debug ...` shows where it did"
        )
        sys.exit(UNEXPECTED)


def _without_packages(error: ImportError) -> NoReturn:
    """No command can be loaded, whatever was asked for: say what is broken."""
    import typer

    from .console import say_error
    from .doctor import doctor

    say_error(f"a package cannot be loaded: {error}. This is what `thinwire doctor` finds:")
    try:
        doctor()
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
    sys.exit(1)
