"""Python imports this before any script when its directory stands in PYTHONPATH: that is how `thinwire profile` reaches the
ranks of a job whose script and launcher know nothing of thinwire.

It costs nothing until the script imports DDP. A `sitecustomize` of the user's own is imported as if this one were not here.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_MODULE = "torch.nn.parallel.distributed"


def _await(kind):  # type: ignore[no-untyped-def]
    """Load thinwire with the first DDP module that is built: torch is still being imported now."""
    original = kind.__init__

    def build(self, *args, **options):  # type: ignore[no-untyped-def]
        kind.__init__ = original
        original(self, *args, **options)
        importlib.import_module("thinwire.autoattach.orders").follow(kind)
        importlib.import_module("thinwire.autoattach.hooks").tell(self)

    kind.__init__ = build


class _Finder(importlib.abc.MetaPathFinder):
    """Lets thinwire know as soon as DDP is there."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            execute = spec.loader.exec_module

            def and_then(module):  # type: ignore[no-untyped-def]
                execute(module)
                _await(module.DistributedDataParallel)  # type: ignore[no-untyped-call]

            spec.loader.exec_module = and_then  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
_mine = sys.modules.pop(__name__, None)
try:
    importlib.import_module("sitecustomize")
except ImportError:
    if _mine is not None:
        sys.modules[__name__] = _mine
