"""What all commands share: where they speak, how they fail, where they write."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ThinwireError

# Standard output belongs to results. What a command says on its way goes to the other one. Rich leaves colours out where
# NO_COLOR is set, and everything but text where it does not write to a terminal.
console = Console(stderr=True, highlight=False)
output = Console(highlight=False)

DEBUG = "THINWIRE_DEBUG"
"""Set by `thinwire --debug`, and so handed down to the processes that a command starts."""

UNEXPECTED = 70
"""Exit code of a mistake in thinwire itself, as sysexits.h has it."""


def say_error(message: str) -> None:
    console.print(f"[red]error:[/red] {escape(message)}", soft_wrap=True)


def failure(message: str) -> typer.Exit:
    say_error(message)
    return typer.Exit(1)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Errors of thinwire without a traceback, unless `--debug` asks for it; Ctrl-C as the shell expects it."""
    try:
        yield
    except (ThinwireError, OSError) as error:
        if os.environ.get(DEBUG):
            raise
        raise failure(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def can_be_written(path: Path | None) -> Path | None:
    """Before a command works for minutes: is there a place for its file?"""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"{str(path)!r} is a directory, not a file")
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no directory {str(path.parent)!r} to write {path.name!r} to")
    return path


def can_be_drawn(path: Path | None) -> Path | None:
    """Before a command works for minutes: can its plot be drawn?"""
    from ..lab.plots import hindrance

    if path is not None and (problem := hindrance(path)) is not None:
        raise typer.BadParameter(problem)
    return can_be_written(path)


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=can_be_written, help="Write the results to this file."),
]
