"""`thinwire doctor`."""

from dataclasses import asdict

import typer
from rich.markup import escape

from ..lab import doctor as checks
from ..lab.results import write
from .console import JsonFile, console, errors, output


def doctor(json_file: JsonFile = None) -> None:
    """Check this machine: what works, what is missing, and the command that installs it.

    Exit code 0 unless something that thinwire needs is broken.

    Example: thinwire doctor --json doctor.json
    """
    with errors():
        with console.status("checking this machine"):
            findings = list(checks.run())
        for finding in findings:
            word, style = (
                ("ok", "green") if finding.good else ("BROKEN", "red") if finding.needed else ("missing", "yellow")
            )
            output.print(f"[{style}]{word:8}[/{style}]{finding.check:13} {escape(finding.text)}", soft_wrap=True)
            if finding.fix:
                output.print(f"{'':8}{'':13} [bold]{escape(finding.fix)}[/bold]", soft_wrap=True)
        broken = [finding.check for finding in findings if finding.needed and not finding.good]
        verdict = f"thinwire cannot work here: {', '.join(broken)}" if broken else "thinwire works here"
        output.print(verdict, style="red" if broken else "green")
        write(json_file, "doctor", [asdict(finding) for finding in findings], {"broken": broken})
    if broken:
        raise typer.Exit(1)
