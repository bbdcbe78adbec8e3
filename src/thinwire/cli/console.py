"""Shared by all commands: output streams, tables, progress bars, errors, result files."""

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import ThinwireError
from ..lab.job_stream import Watcher

# Results go to standard output, messages to standard error. Rich omits colours if NO_COLOR is set, and writes plain text
# if the stream is not a terminal.
console = Console(stderr=True, highlight=False)
output = Console(highlight=False)

DEBUG = "THINWIRE_DEBUG"
"""Set by `thinwire --debug`; processes started by a command inherit it."""

UNEXPECTED = 70
"""Exit code of a bug in thinwire itself (EX_SOFTWARE in sysexits.h)."""


def say_error(message: str) -> None:
    console.print(f"[red]error:[/red] {escape(message)}", soft_wrap=True)


def failure(message: str) -> typer.Exit:
    say_error(message)
    return typer.Exit(1)


def number(value: float | None, form: str, unit: float = 1.0) -> str:
    """A table cell; empty if the value is unknown."""
    return "" if value is None else form.format(value / unit)


def show(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[str] = (),
    width: int | None = None,
) -> None:
    """Print a table whose columns are right-aligned except those in `left`; into a file or pipe with this width."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    show_table(table, width)


def show_table(table: Table, width: int | None) -> None:
    """Print a table; into a file or pipe with `width` columns instead of an unreadable 80."""
    (output if output.is_terminal else Console(highlight=False, width=width)).print(table)


@contextlib.contextmanager
def progress(description: str, total: float) -> Iterator[Watcher]:
    """A progress bar on standard error, with messages printed above it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(description, total=total)
        yield Watcher(
            tell=lambda text: bar.console.print(escape(text), soft_wrap=True),
            advance=lambda count: bar.advance(task, count),
        )


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Report thinwire's errors without a traceback (unless `--debug` is given); exit with 130 on Ctrl-C."""
    try:
        yield
    except (ThinwireError, OSError) as error:
        if os.environ.get(DEBUG):
            raise
        raise failure(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def can_be_written(path: Path | None) -> Path | None:
    """Reject an output path that cannot be written before the command does its work."""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"{str(path)!r} is a directory, not a file")
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no directory {str(path.parent)!r} to write {path.name!r} to")
    return path


def can_be_drawn(path: Path | None) -> Path | None:
    """Reject a plot file that cannot be drawn before the command does its work."""
    from ..lab.plots import hindrance

    if path is not None and (problem := hindrance(path)) is not None:
        raise typer.BadParameter(problem)
    return can_be_written(path)


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=can_be_written, help="Write the results to this file."),
]
