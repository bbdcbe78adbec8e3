"""Checkpoint files: safetensors, one per rank or one for all; nothing in them is ever unpickled.

    FOLDER/rank0-of-2.safetensors, FOLDER/rank1-of-2.safetensors      form "exact"
    FOLDER/mean.safetensors                                           form "mean"

Tensors are tensors, texts are in the metadata, and so is the step. A file is written next to its place and then renamed: a
process that is killed meanwhile leaves the file that was there before. Not so a set of files, of which some may be of
another step: `read` refuses to mix them. A checkpoint of `torch.distributed.checkpoint` can be read too, whatever
the number of ranks that wrote it.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..comm.world import World
from ..errors import StateError

Where = str | os.PathLike[str]

SUFFIX = ".safetensors"
_RANK = re.compile(r"rank(\d{1,9})-of-(\d{1,9})\.safetensors")


def name_of(rank: int | None, world: int) -> str:
    """The file of a rank; of all ranks together, if it is None."""
    return f"mean{SUFFIX}" if rank is None else f"rank{rank}-of-{world}{SUFFIX}"


def write(folder: Where, name: str, state: Mapping[str, Any], step: int) -> Path:
    """Write one state, whole or not at all."""
    folder = Path(folder)
    if folder.suffix == SUFFIX or folder.is_file():
        raise StateError(f"{str(folder)!r}: every rank writes its own file, so give the name of a folder")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.contiguous() for key, value in state.items() if isinstance(value, Tensor)}
    texts = {key: value for key, value in state.items() if isinstance(value, str)}
    # A folder for the draft: safetensors creates temporary files next to its output, which a kill would leave behind.
    target, workshop = folder / name, folder / f".{name}.part"
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir()
    draft = workshop / name
    draft.touch()
    mode = draft.stat().st_mode  # what the umask gives; safetensors would make it unreadable for other users
    save_file(tensors, draft, metadata={**texts, "step": str(step)})
    os.chmod(draft, mode)
    with draft.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(draft, target)
    shutil.rmtree(workshop, ignore_errors=True)
    with contextlib.suppress(OSError):  # some file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return target


def write_all(folder: Where, state: Mapping[str, Any], world: World, step: int, *, shared: bool) -> None:
    """Write the states of the ranks of this process, each to its file, or the shared one of all ranks, on rank 0."""
    if not shared:
        for rank in world.local_ranks:
            own = {key: value for key, value in state.items() if key.startswith((f"rank{rank}.", "shared."))}
            write(folder, name_of(rank, world.size), own, step)
    elif world.local_ranks[0] == 0:
        write(folder, name_of(None, world.size), state, step)


class Files(Mapping[str, Any]):
    """The states in some files, as one; tensors are read when they are asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._texts: dict[str, str] = {}
        self._homes: dict[str, Path] = {}
        steps: dict[int, Path] = {}
        for path in paths:
            texts, tensors = _open(path)
            steps.setdefault(_step(path, texts), path)
            self._texts |= {key: text for key, text in texts.items() if key != "step"}
            self._homes |= dict.fromkeys(tensors, path)
        if len(steps) > 1:
            (first, one), (second, other) = list(steps.items())[:2]
            raise StateError(
                f"{one.name} is of step {first} and {other.name} of step {second}: they do not belong together; a save may "
                "have been interrupted"
            )

    def __getitem__(self, key: str) -> Any:
        if key in self._texts:
            return self._texts[key]
        home = self._homes[key]
        try:
            with safe_open(home, framework="pt") as file:
                return file.get_tensor(key)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise StateError(f"{str(home)!r}, {key!r}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        yield from self._texts
        yield from self._homes

    def __len__(self) -> int:
        return len(self._texts) + len(self._homes)


def _open(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), list(file.keys())
    except (SafetensorError, OSError, ValueError, RuntimeError, UnicodeError) as error:
        raise StateError(f"{str(path)!r} cannot be read: {error}") from error


def _step(path: Path, texts: Mapping[str, str]) -> int:
    step = texts.get("step", "")
    if not (step.isdecimal() and step.isascii() and len(step) < 19):
        raise StateError(f"{str(path)!r} is no state of thinwire: it says no step")
    return int(step)


def read(
    where: Where | Sequence[Where], ranks: Sequence[int], world: int, key: str | None = None
) -> Mapping[str, Any]:
    """What these of `world` ranks need of a folder, of a file, or of several files."""
    if not isinstance(where, str | os.PathLike):
        return Files([Path(path) for path in where])
    path = Path(where)
    if not path.is_dir():
        return Files([path])
    if (path / ".metadata").is_file():
        return _from_dcp(path, key)
    return Files(_choose(path, ranks, world))


def _choose(folder: Path, ranks: Sequence[int], world: int) -> list[Path]:
    """The newest set of files that is complete; those for this number of ranks before others.

    Where there is none, the own files: those of the other ranks may be on other machines.
    """
    sets: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob(f"rank*{SUFFIX}")):
        match = _RANK.fullmatch(path.name)
        if match and int(match[1]) < int(match[2]):
            sets.setdefault(int(match[2]), {})[int(match[1])] = path
    order = sorted(sets, key=lambda size: size != world)
    complete = [list(sets[size].values()) for size in order if len(sets[size]) == size]
    if (folder / name_of(None, 0)).is_file():
        complete.append([folder / name_of(None, 0)])
    own = sets.get(world, {})
    if not complete and own.keys() >= set(ranks):
        complete.append(list(own.values()))
    if not complete:
        for size, found in sets.items():
            missing = next(r for r in (ranks if size == world else range(size)) if r not in found)
            raise StateError(f"{str(folder)!r} has no {name_of(missing, size)}, and this job has {world} ranks")
        raise StateError(f"{str(folder)!r} holds no state: there is no rank0-of-{world}{SUFFIX} and no mean{SUFFIX}")
    return max(complete, key=lambda paths: _step(paths[0], _open(paths[0])[0]))


def _from_dcp(folder: Path, key: str | None) -> dict[str, Any]:
    """All states in a checkpoint of `torch.distributed.checkpoint`, of as many ranks as there were."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    marks = [re.fullmatch(r"(.*?)(?:rank\d+|mean|folded)\.(?:thinwire|updates)", name) for name in known]
    prefixes = sorted({mark[1] for mark in marks if mark})
    if key is not None:
        prefixes = [prefix for prefix in prefixes if prefix == f"{key}."]
    if len(prefixes) != 1:
        found = ", ".join(prefix.removesuffix(".") for prefix in prefixes) or "none"
        raise StateError(
            f"{str(folder)!r} should hold one state of thinwire, but has: {found}; `key` says which is meant"
        )
    (prefix,) = prefixes
    state: dict[str, Any] = {}
    for name, entry in known.items():
        if name.startswith(prefix):
            state[name] = ""
            if isinstance(entry, TensorStorageMetadata):
                state[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    load(state, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix): value for name, value in state.items()}
