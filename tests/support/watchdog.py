"""The watchdog of last resort: a test that even `timeout_method = signal` cannot end is one failure.

Python delivers no signal to a main thread that is stuck in C. So each worker of pytest-xdist has an alarm that needs
neither the main thread nor the interpreter lock: some time after the test's timeout, faulthandler writes the stacks
of all threads into a file and ends the worker. xdist reports the test as failed and starts another worker, and the
failure quotes the file. Without workers (plain `pytest`) nothing is watched: whoever started it can press Ctrl-C.
"""

from __future__ import annotations

import faulthandler
import tempfile
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("watchdog_grace", "seconds after a test's timeout until its worker is ended", default="60")


class _Controller:
    """Tells each worker where to write, and reads it when a worker has ended."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="watchdog")

    def _file(self, node: Any) -> Path:
        return Path(self.folder.name) / node.gateway.id

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["watchdog"] = str(self._file(node))

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        file = self._file(report.node)  # type: ignore[attr-defined]
        if file.exists() and (stacks := file.read_text()):
            report.longrepr = f"{report.longrepr}\nThe watchdog has ended it, stuck in:\n{stacks}"

    def pytest_unconfigure(self) -> None:
        self.folder.cleanup()


class _Worker:
    """Sets the alarm for each phase of each test."""

    def __init__(self, file: Path, config: pytest.Config) -> None:
        self.file = file.open("w")
        self.grace = float(config.getini("watchdog_grace"))
        self.timeout = float(config.getini("timeout") or 0)

    def _watch(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("timeout")
        timeout = float(mark.args[0]) if mark and mark.args else self.timeout
        if timeout:
            faulthandler.dump_traceback_later(timeout + self.grace, exit=True, file=self.file)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._watch(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._watch(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._watch(item)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.pluginmanager.register(_Worker(Path(worker["watchdog"]), config))
    elif config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Controller())
