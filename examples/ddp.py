"""The ten lines of the README: torchrun --standalone --nproc-per-node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(512, 512))
wire = thinwire.attach(ddp)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    ddp(torch.randn(32, 512)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(wire.explain())
dist.destroy_process_group()
