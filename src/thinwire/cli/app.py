"""The `thinwire` command with all its sub-commands."""

import os
from typing import Annotated

import typer

from ..version import __version__
from . import bench, demo, lab
from .compile import compile_
from .console import DEBUG
from .doctor import doctor
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
    help="""Train PyTorch models fast over slow networks.

    Examples:

    thinwire doctor

    thinwire demo --rate 1gbit

    Exit codes: 0 success, 1 an error with an explanation, 2 an unknown option or command, 70 a bug in thinwire,
    130 Ctrl-C. `lab run` and `profile` return the exit code of the job.""",
)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.command()(demo.demo)
app.command(context_settings={"allow_interspersed_args": False})(profile)
app.command()(plan)
app.command()(simulate)
app.command()(report)
app.command()(top)
app.command()(doctor)
app.command("compile")(compile_)
app.command()(selftest)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error; goes before the command.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"
