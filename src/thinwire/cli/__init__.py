"""The command line: thin over the rooms below. `main` is the entry point of the `thinwire` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from .app import app
    from .console import DEBUG, UNEXPECTED, say_error

    try:
        app()
    except Exception as error:  # a mistake of ours: no command lets one out that it knows
        if os.environ.get(DEBUG):
            raise
        say_error(
            f"{type(error).__name__}: {error}; this should not happen, `thinwire --debug ...` shows where it did"
        )
        sys.exit(UNEXPECTED)
