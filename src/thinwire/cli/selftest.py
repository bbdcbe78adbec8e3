"""`thinwire selftest`."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.markup import escape

from .console import JsonFile, errors, failure, output

if TYPE_CHECKING:
    from ..lab.selftest import Outcome


def selftest(
    ranks: Annotated[int, typer.Option(help="Ranks to start; ignored under torchrun.", min=1)] = 2,
    backend: Annotated[
        str | None,
        typer.Option(help="torch.distributed backend; default: gloo, plus NCCL if CUDA is available."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Test thinwire on this machine, backend and network, in about a minute: laws, order, errors, roll-back, resume.

    Starts two ranks on this machine, or uses the ranks started by torchrun.

    Examples:

    thinwire selftest

    torchrun --nnodes 2 --nproc-per-node 2 ... -m thinwire selftest
    """
    with errors():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            _as_rank(backend, json_file)
        raise typer.Exit(_start(ranks, backend, json_file))


def _start(ranks: int, backend: str | None, json_file: Path | None) -> int:
    """Start ranks on this machine; returns the exit code."""
    from ..lab.launch import Job, Rank

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "thinwire", "selftest"]
    command += ["--backend", backend] if backend else []
    command += ["--json", str(json_file.absolute())] if json_file else []
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job = Job(
        [
            Rank(rank, command, {**os.environ, **shared, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ],
        on_line=lambda rank, line: output.print(escape(line), soft_wrap=True),
    )
    try:
        return job.wait().code
    finally:
        job.stop()


def _as_rank(backend: str | None, json_file: Path | None) -> NoReturn:
    """Run the checks as one of the ranks; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from ..lab import selftest as checks
    from ..lab.hard_exit import hard_exit
    from ..lab.results import write

    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=120))
    except (ValueError, RuntimeError) as error:
        raise failure(f"process group initialization failed on backend {backend!r}: {error}") from None
    first = dist.get_rank() == 0
    if first:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        about = f"{dist.get_world_size()} ranks, {backend}, torch {torch.__version__}, CUDA devices here: {devices}"
        output.print(about, soft_wrap=True)

    def tell(outcome: Outcome) -> None:
        if first:
            verdict = "ok  " if outcome.good else "FAIL"
            text = f"{verdict} {outcome.name:22} {outcome.seconds:5.1f} s  {outcome.text}"
            output.print(escape(text), soft_wrap=True, style=None if outcome.good else "red")

    outcomes = checks.run(tell)
    bad = [outcome.name for outcome in outcomes if not outcome.good]
    if first:
        seconds = sum(outcome.seconds for outcome in outcomes)
        verdict = f"FAILED: {', '.join(bad)}" if bad else f"passed: {len(outcomes)} checks in {seconds:.0f} s"
        output.print(escape(verdict), soft_wrap=True, style="red" if bad else "green")
        rows = [{"check": o.name, "good": o.good, "text": o.text, "seconds": round(o.seconds, 3)} for o in outcomes]
        summary = {"ranks": dist.get_world_size(), "backend": backend, "passed": not bad}
        write(json_file, "selftest", rows, summary)
    hard_exit(1 if bad else 0)
