"""Characters with a small GPT: torchrun --standalone --nproc-per-node 2 examples/gpt.py --data shakespeare.txt --journal run

Any text will do; without one it learns the texts of Python's own help. `thinwire top run` shows it while it trains,
`thinwire report run` makes a page of it.
"""

import argparse
import math
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

WIDTH, HEADS, LAYERS, LENGTH = 128, 4, 2, 64


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.letters(x) + self.places.weight
        return self.head(self.layers(y, mask=self.mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(pydoc_data.topics.__file__))
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="pieces of text of each rank in a step")
    parser.add_argument("--journal", default=None, help="a folder for what thinwire writes down of every step")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = options.data.read_text(encoding="utf-8", errors="replace")
    alphabet = sorted(set(text))
    number = {letter: place for place, letter in enumerate(alphabet)}
    ids = torch.tensor([number[letter] for letter in text])
    torch.manual_seed(0)
    ddp = DistributedDataParallel(GPT(len(alphabet)))
    wire = thinwire.attach(ddp, options.codec)
    if options.journal is not None:
        wire.log_to(options.journal)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        starts = torch.randint(len(ids) - LENGTH - 1, (options.batch,), generator=generator)
        pieces = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        scores = ddp(pieces[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        wire.note(loss=loss.item())
        optimizer.step()
        if rank == 0 and (step + 1) % max(1, options.steps // 10) == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats, perplexity {math.exp(loss.item()):.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
