"""The checks of `thinwire doctor`."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .. import kernels
from ..errors import ThinwireError
from ..kernels import cache

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EXTRAS = {
    "matplotlib": "draws --plot",
    "accelerate": "adapter",
    "lightning": "adapter",
    "transformers": "adapter for its Trainer",
}


@dataclass(frozen=True)
class Finding:
    """`fix` is a command, or empty if all is well or nothing can be done."""

    check: str
    good: bool
    needed: bool
    text: str
    fix: str = ""


def run() -> Iterator[Finding]:
    """Run all checks; an unexpected exception in a check is a finding too."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _packages, _torch, _kernels, _network, _gpu, _extras, _browser,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(check.__name__.strip("_"), False, True, f"{type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    linux = sys.platform == "linux"
    yield Finding(
        "system", linux, True, f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
    yield Finding("cores", True, False, f"{cores}: with more emulated nodes than cores, times measure the scheduler")


def _packages() -> Iterator[Finding]:
    for name in ("numpy", "numba", "msgspec", "safetensors"):
        try:
            __import__(name)
            yield Finding(name, True, True, metadata.version(name))
        except ImportError as error:
            yield Finding(name, False, True, str(error), f"pip install {name}")


def _torch() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    new = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    fix = "" if new else "pip install 'torch>=2.13'"
    yield Finding("torch", new, True, torch.__version__ + ("" if new else ", older than 2.13"), fix)
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("gloo", False, True, "this torch was built without it", "pip install 'torch>=2.13'")
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(3))
        finally:
            dist.destroy_process_group()
    others = [name for name in ("nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    yield Finding("gloo", True, True, "works" + (f"; also available: {', '.join(others)}" if others else ""))


def _kernels() -> Iterator[Finding]:
    """Compile or load one kernel and run it."""
    import numpy as np

    try:
        basic = kernels.basic
    except ImportError as error:
        yield Finding("kernels", False, True, str(error), "pip install numba")
        return
    residual = np.ones(5000, np.float32)
    right = basic.accumulate(residual, residual.copy()) and bool((residual == 2.0).all())
    yield Finding("kernels", right, True, "compiled by Numba, give the right sum" if right else "give a wrong sum")
    place, wished = cache.folder(), cache.wished()
    kept = place == wished
    text = f"{place}" + ("" if kept else f", because {wished} is not writable")
    yield Finding("kernel cache", kept, False, text, "" if kept else f"export {cache.VARIABLE}=/var/tmp/thinwire")


def _network() -> Iterator[Finding]:
    """Create a cluster of two nodes to test namespaces and links."""
    tools = True
    for name, package in {
        "ip": "iproute2",
        "tc": "iproute2",
        "unshare": "util-linux",
        "nsenter": "util-linux",
    }.items():
        path = shutil.which(name)
        tools = tools and path is not None
        yield Finding(name, path is not None, False, path or "not found", "" if path else f"apt-get install {package}")
    from .cluster import Cluster, log

    log.setLevel("ERROR")  # its warnings are the findings
    try:
        with Cluster(2, rate="100mbit") as cluster:
            mode, shaped, why = cluster.mode, cluster.shaped, cluster.why
    except (ThinwireError, OSError) as error:
        mode, shaped, why = "loopback", False, str(error)
    spaces = mode != "loopback"
    text = {"root": "works, as root", "rootless": "works, without root"}.get(mode, why)
    yield Finding("namespaces", spaces, False, text, "" if spaces else _way_to_namespaces(tools))
    if spaces:
        yield Finding("shaped links", shaped, False, "works" if shaped else why, "" if shaped else "modprobe sch_tbf")


def _way_to_namespaces(tools: bool) -> str:
    """How to allow namespaces without root, according to the kernel's settings."""
    if not tools:
        return "apt-get install iproute2 util-linux"
    for name, forbids, allows in (
        ("user.max_user_namespaces", "0", "10000"),
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        path = Path("/proc/sys", *name.split("."))
        if path.exists() and path.read_text().strip() == forbids:
            return f"sysctl {name}={allows}   (as root)"
    return "docker run --cap-add NET_ADMIN --cap-add SYS_ADMIN ...   (in a container), or root"


def _gpu() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    text = (
        f"{count} found; `attach` on CUDA is experimental, `thinwire selftest` checks it"
        if count
        else "none; not needed"
    )
    yield Finding("GPU", True, False, text)
    try:
        yield Finding("Triton", True, False, f"{metadata.version('triton')}; not used yet")
    except metadata.PackageNotFoundError:
        yield Finding("Triton", True, False, "not installed; not needed")


def _extras() -> Iterator[Finding]:
    for name, use in EXTRAS.items():
        try:
            yield Finding(name, True, False, f"{metadata.version(name)}; {use}")
        except metadata.PackageNotFoundError:
            yield Finding(name, False, False, f"not installed; {use}", f"pip install {name}")


def _browser() -> Iterator[Finding]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    text = path or "not found; needed only by the tests of report pages"
    yield Finding("chromium", path is not None, False, text, "" if path else "apt-get install chromium")
