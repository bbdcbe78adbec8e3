"""What all commands share: where they speak, how they fail."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ThinwireError

# Standard output belongs to results. What a command says on its way goes to the other one.
console = Console(stderr=True, highlight=False)
output = Console(highlight=False)


def failure(message: str) -> typer.Exit:
    console.print(f"[red]error:[/red] {escape(message)}", soft_wrap=True)
    return typer.Exit(1)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Errors of thinwire without a traceback, unless THINWIRE_DEBUG is set; Ctrl-C as the shell expects it."""
    try:
        yield
    except (ThinwireError, OSError) as error:
        if os.environ.get("THINWIRE_DEBUG"):
            raise
        raise failure(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
