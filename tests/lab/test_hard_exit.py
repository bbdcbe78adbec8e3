import subprocess
import sys

from tests.support.limits import CEILING

RANK = """
import atexit, tempfile, torch.distributed as dist
from thinwire.lab.hard_exit import hard_exit
atexit.register(print, "the interpreter was taken down")
with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    print("said", end="")
    hard_exit(3)
"""


def test_a_rank_leaves_with_its_code_and_all_it_said() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, timeout=CEILING)
    assert (done.returncode, done.stdout) == (3, "said")
