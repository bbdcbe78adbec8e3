"""The command line: thin over the rooms below. `main` is the entry point of the `thinwire` command."""

from __future__ import annotations


def main() -> None:
    from .app import app

    app()
