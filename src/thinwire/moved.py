"""Import paths of earlier releases, which keep working with a DeprecationWarning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "thinwire.adapters": "thinwire.integrations",
    "thinwire.adapters.accelerate": "thinwire.integrations.accelerate",
    "thinwire.adapters.lightning": "thinwire.integrations.lightning",
    "thinwire.adapters.trainer": "thinwire.integrations.trainer",
    "thinwire.schemes": "thinwire.chains",
    "thinwire.schemes.tree": "thinwire.chains.tree",
}
"""Old path to new path: every path that README, docs or examples have named, and its package."""


class MovedFinder(MetaPathFinder, Loader):
    """Answers an import of an old path with the module that is there now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(f"{old} has moved to {MOVED[old]}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])


def install() -> None:
    """Before all other finders: a package that has moved would let them load its modules a second time."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
