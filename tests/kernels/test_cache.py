"""The folder of compiled kernels: what it depends on, where it is, and that no compiler leaves it half filled."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire
from tests.support.limits import CEILING
from thinwire.kernels import cache

PACKAGE = Path(thinwire.__file__).parent
FOLDER = "from thinwire.kernels import cache; print(cache.folder())"
COMPILE = """
from thinwire.engine.compiler import compiling, prepare, rehearse
from thinwire.kernels import cache
def work(text):
    with compiling(compiles=lambda name: print(name, flush=True)):
        rehearse(text)
{then}
"""
PREPARE = COMPILE.format(then="prepare('int8', work)")


def _environment(**variables: str) -> dict[str, str]:
    own = {"THINWIRE_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}
    return {**{name: value for name, value in os.environ.items() if name not in own}, **variables}


def _python(script: str, **variables: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", script]
    return subprocess.Popen(
        words,
        env=_environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _lines(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=CEILING)
    assert process.returncode == 0, errors
    return out.split()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, to be edited."""
    shutil.copytree(PACKAGE, tmp_path / "thinwire", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "thinwire"


def _folder_of(copy: Path, **variables: str) -> str:
    (line,) = _lines(
        _python(FOLDER, PYTHONPATH=str(copy.parent), THINWIRE_CACHE_DIR=str(copy.parent / "kept"), **variables)
    )
    return line


def test_an_edit_of_any_file_with_kernels_leads_to_another_folder(copy: Path) -> None:
    before = {_folder_of(copy)}
    for name in ("kernels/cpu/_halves.py", "kernels/cpu/_llvm.py", "planner/pareto.py"):
        with open(copy / name, "a") as file:
            file.write("\n# edited\n")
        after = _folder_of(copy)
        assert after not in before, name
        before.add(after)
    with open(copy / "codecs" / "micro.py", "a") as file:
        file.write("\n# edited\n")
    assert _folder_of(copy) in before
    assert _folder_of(copy, NUMBA_BOUNDSCHECK="1") not in before


def test_no_file_with_kernels_is_forgotten() -> None:
    with_kernels = {path for path in PACKAGE.rglob("*.py") if "\n@kernel\n" in path.read_text()}
    assert len(with_kernels) > 15
    assert with_kernels <= set(cache.sources())


def _wished(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Path:
    for name in ("THINWIRE_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return cache.wished().parent


def test_which_variable_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: dict[str, str] = {}
    for name, value, place in (
        ("HOME", "/h", "/h/.cache/thinwire/kernels"),
        ("XDG_CACHE_HOME", "/x", "/x/thinwire/kernels"),
        ("NUMBA_CACHE_DIR", "/n", "/n/thinwire"),
        ("THINWIRE_CACHE_DIR", "/t", "/t/kernels"),
    ):
        variables[name] = value  # each goes before those above
        assert _wished(monkeypatch, **variables) == Path(place)


def _without_a_home(folder: Path) -> tuple[Path, list[str]]:
    nowhere = folder / "file"
    nowhere.touch()
    process = _python(FOLDER, HOME=str(nowhere), TMPDIR=str(folder))
    out, errors = process.communicate(timeout=CEILING)
    assert process.returncode == 0, errors
    return Path(out.strip()), [line for line in errors.split("\n") if line]


def test_where_nothing_can_be_written_a_temporary_folder_takes_over(tmp_path: Path) -> None:
    place, said = _without_a_home(tmp_path)
    assert place.is_relative_to(tmp_path / f"thinwire-{os.getuid()}")
    assert len(said) == 1
    assert "THINWIRE_CACHE_DIR" in said[0]
    assert _without_a_home(tmp_path)[0] == place  # the next process finds it again


def test_a_temporary_folder_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    open_to_all = tmp_path / f"thinwire-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    place, _ = _without_a_home(tmp_path)
    assert place.is_relative_to(tmp_path)
    assert not place.is_relative_to(open_to_all)


def test_old_folders_go_and_the_last_ones_stay(tmp_path: Path) -> None:
    above = tmp_path / "kernels"
    for age in range(cache.KEPT + 3):
        old = above / f"old-{age}"
        old.mkdir(parents=True)
        os.utime(old, (1e9 - age, 1e9 - age))
    script = "from thinwire.kernels import cache; print(cache.folder()); cache.tidy()"
    (own,) = _lines(_python(script, THINWIRE_CACHE_DIR=str(tmp_path)))
    left = {path.name for path in above.iterdir()}
    assert left == {Path(own).name, *(f"old-{age}" for age in range(cache.KEPT))}


@pytest.fixture(scope="module")
def all_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The kernels that a compiler compiles for `int8` into an empty cache."""
    return _lines(_python(PREPARE, THINWIRE_CACHE_DIR=str(tmp_path_factory.mktemp("cache"))))


def _until(process: subprocess.Popen[str], count: int) -> Iterator[str]:
    assert process.stdout is not None
    for _ in range(count):
        yield process.stdout.readline().strip()


def test_a_killed_compiler_leaves_a_cache_that_the_next_one_completes(tmp_path: Path, all_names: list[str]) -> None:
    assert len(all_names) > 4
    variables = {"THINWIRE_CACHE_DIR": str(tmp_path)}
    killed = _python(PREPARE, **variables)
    begun = list(_until(killed, len(all_names) - 1))
    killed.kill()
    killed.communicate(timeout=CEILING)
    assert begun == all_names[:-1]
    rest = _lines(_python(PREPARE, **variables))
    assert set(rest) < set(all_names)  # some of it was there, and nothing stands in the way
    assert all_names[-1] in rest
    assert _lines(_python(PREPARE, **variables)) == []
    assert not list(tmp_path.rglob("*.tmp.*"))


def test_damaged_files_are_compiled_again(tmp_path: Path, all_names: list[str]) -> None:
    variables = {"THINWIRE_CACHE_DIR": str(tmp_path)}
    _lines(_python(PREPARE, **variables))
    for place, file in enumerate(sorted(tmp_path.rglob("*.nb[ic]"))):
        file.write_bytes(file.read_bytes()[: 40 * (place % 3)])
    again = COMPILE.format(then="work('int8')")
    assert set(_lines(_python(again, **variables))) == set(all_names)
    assert _lines(_python(again, **variables)) == []


def test_two_compilers_do_not_compile_twice(tmp_path: Path, all_names: list[str]) -> None:
    both = [_python(PREPARE, THINWIRE_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    found = [_lines(process) for process in both]
    assert sorted(found, key=len) == [[], all_names]


def test_a_compiler_ends_with_its_parent(tmp_path: Path) -> None:
    script = """
import sys
from thinwire.engine.compiler import CompilerProcess
print(CompilerProcess(["adacomp", "micro"])._process.pid, flush=True)
sys.stdin.read()
"""
    parent = _python(script, THINWIRE_CACHE_DIR=str(tmp_path))
    (pid,) = _until(parent, 1)
    child = os.pidfd_open(int(pid))
    poll = select.poll()
    poll.register(child, select.POLLIN)
    assert not poll.poll(0)
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=CEILING)
    assert poll.poll(1000 * CEILING)
    os.close(child)
