"""What all tests share: their kinds and groups, Hypothesis' profiles, and the watchdog of last resort."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.leaks import nothing_is_left  # noqa: F401  (an autouse fixture)
from tests.support import kinds, profiles

pytest_plugins = ["tests.support.watchdog"]

settings.load_profile(profiles.SMALL)  # `--hypothesis-profile large` is loaded later, and before any test is imported


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in kinds.MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)  # the workers share the cores


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kinds.mark(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("namespaces"):
        from tests.lab import conftest as lab

        if why := lab.why_none(*mark.args):
            pytest.skip(why)
