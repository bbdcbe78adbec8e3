"""Did-you-mean suggestions."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: `did you mean 'gpt'? known: gpt, vgg`."""
    names = list(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(names)}"
