"""`thinwire compile`."""

from dataclasses import asdict
from typing import Annotated

import typer

from ..lab.results import write
from .console import JsonFile, console, errors, output


def compile_(
    codec: Annotated[
        list[str] | None, typer.Option(help="Only for this codec, with its chain if it has one; may be repeated.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compile kernels beforehand: for all codecs, for auto and for local updates.

    Every machine does so by itself when it first needs them. An image or a shared folder can have them already:
    THINWIRE_CACHE_DIR says where they are kept.

    Example: thinwire compile --codec "micro(density=0.01)"
    """
    with errors():
        from ..engine.strategy import Strategy
        from ..kernels import cache
        from ..lab import compiler

        for text in codec or ():
            Strategy.of(text)  # its error is a sentence; that of a compiler is not
        texts = codec or compiler.everything()
        rows = []
        with console.status("compiling kernels"):
            for done in compiler.compile_for(texts):
                output.print(f"{done.codec}: {done.kernels} kernels, {done.seconds:.1f} s", soft_wrap=True)
                rows.append(asdict(done))
        output.print(
            f"{'all of it is' if rows else 'nothing to do: all of it is'} in {cache.folder()}", soft_wrap=True
        )
        write(json_file, "compile", rows, {"folder": str(cache.folder())})
