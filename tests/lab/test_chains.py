"""What chains save between nodes, as the nodes' interfaces count it."""

from __future__ import annotations

import json
import sys

from thinwire.lab import Cluster

from .conftest import needs_namespaces

STEPS, ELEMENTS = 4, 1_000_000

# The rank says what its node has sent in some steps of each method, and what the formulas say of it.
WORK = f"""
import json, sys, time
import torch, torch.distributed as dist
import thinwire
from thinwire.lab.hard_exit import hard_exit
from thinwire.lab.step_worker import sent
torch.set_num_threads(1)
dist.init_process_group("gloo")
found = {{}}
for text in json.loads(sys.argv[1]):
    gradient = torch.randn({ELEMENTS}, generator=torch.Generator().manual_seed(dist.get_rank()))
    exchange = thinwire.Exchange({{"weight": gradient}}, text)
    exchange.reduce_({{"weight": gradient.clone()}})
    dist.barrier(); time.sleep(0.2); before = sent("eth0")[0]; dist.barrier()
    for _ in range({STEPS}):
        exchange.reduce_({{"weight": gradient.clone()}})
    dist.barrier(); time.sleep(0.2)
    traffic = exchange.executor.rank_states[0].groups[0].way.traffic  # of the last step: the first one has larger messages
    found[text] = [(sent("eth0")[0] - before) / {STEPS}, traffic.get("flat", 0) + traffic.get("inter", 0)]
    exchange.close()
if dist.get_rank() == 0:
    print("FOUND", json.dumps(found), flush=True)
hard_exit()
"""


@needs_namespaces
def test_bytes_between_nodes() -> None:
    texts = ["topk(density=0.01) via J", "topk(density=0.01) via B", "dense", "dense via A", "int8", "int8 via D"]
    lines: list[str] = []
    with Cluster(nodes=2, ranks_per_node=2, rate="none") as cluster:
        result = cluster.run(
            [sys.executable, "-c", WORK, json.dumps(texts)], on_line=lambda rank, line: lines.append(line)
        )
    assert result.code == 0, lines[-20:]
    (answer,) = [line for line in lines if line.startswith("FOUND")]
    found = json.loads(answer.removeprefix("FOUND"))
    print(found)
    counted = {text: numbers[0] for text, numbers in found.items()}
    assert counted["topk(density=0.01) via B"] <= 0.40 * counted["topk(density=0.01) via J"]
    assert counted["dense via A"] <= 0.70 * counted["dense"]
    assert counted["int8 via D"] <= 0.30 * counted["dense"]
    # Between nodes each of the two ranks sends its own part: twice the traffic of one, and the headers of packets.
    for text in ("topk(density=0.01) via B", "dense via A", "int8 via D"):
        assert 1.0 <= counted[text] / (2 * found[text][1]) <= 1.1, text
