"""All commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__
from . import bench, demo, lab
from .plan import plan
from .profile import profile
from .report import report
from .selftest import selftest
from .simulate import simulate
from .top import top

app = typer.Typer(
    name="thinwire",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train PyTorch models fast over slow networks.",
)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.command()(demo.demo)
app.command(context_settings={"allow_interspersed_args": False})(profile)
app.command()(plan)
app.command()(simulate)
app.command()(report)
app.command()(top)
app.command()(selftest)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    pass
