"""How far ranks should look ahead of what they have not sent: python examples/detached.py --json detached.json

Eight workers train a small network through random blocks, 1/64 of every tensor a step. Gradients are taken at x - lambda * e,
where e is what a worker has not sent: lambda 0 is plain error feedback, 1 is SAEF, between them is detached error feedback.
Printed is the training loss at the end, at the settled model. To expect: at a learning rate of 0.03 and above plain error
feedback fails, 0.3 is best or nearly so, "auto" is close to it.
"""

import argparse
import copy
import json
import logging
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import thinwire

WORKERS, BATCH, SAMPLES = 8, 16, 65_536


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Random inputs, and labels that a random network of the same shape gives them."""
    torch.manual_seed(1000 + seed)
    teacher = network()
    for parameter in teacher.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=(2.0 / parameter.shape[1]) ** 0.5)
    inputs = torch.randn(SAMPLES, 32)
    with torch.no_grad():
        return inputs, teacher(inputs).argmax(1)


def train(strength: float | str | None, lr: float, ratio: float, steps: int, seed: int) -> dict[str, object]:
    """`strength` None is SGD without compression."""
    inputs, labels = data(seed)
    torch.manual_seed(seed)
    models = [network() for _ in range(WORKERS)]
    inner = [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4) for model in models]
    optimizer = thinwire.LocalUpdates(
        inner,
        models,
        thinwire.RandomBlock(ratio if strength is not None else 1.0, seed=seed),
        feedback=thinwire.Detached(strength if strength is not None else 0.0),
        process_group=thinwire.LocalWorld(WORKERS),
        min_elements=0,
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2, steps * 3 // 4], gamma=0.1)
    begun = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(SAMPLES, (WORKERS, BATCH))
        optimizer.zero_grad()
        losses = [functional.cross_entropy(m(inputs[c]), labels[c]) for m, c in zip(models, chosen, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()
        schedule.step()
    row: dict[str, object] = {"lam": "sgd" if strength is None else strength, "lr": lr, "seed": seed}
    row |= {"ratio": 1.0 if strength is None else ratio, "workers": WORKERS, "steps": steps}
    with torch.no_grad():
        for where, name in (("settled", "loss"), ("shared", "loss_shared")):
            with optimizer.at(where):
                # In float64 the loss of a run that has diverged is a number as well.
                model = copy.deepcopy(models[0]).double()
                row[name] = functional.cross_entropy(model(inputs.double()), labels).item()
    return row | {"best_lam": optimizer.stats()["best_strength"], "seconds": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strengths", default="sgd,0,0.2,0.3,0.4,1,auto", help="numbers from 0 to 1, auto, sgd")
    parser.add_argument("--lrs", default="0.01,0.03,0.1")
    parser.add_argument("--ratio", type=float, default=64.0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()

    torch.set_num_threads(1)
    lrs = [float(lr) for lr in options.lrs.split(",")]
    rows = []
    logging.basicConfig(level=logging.WARNING)  # what is announced of each of these runs would cut the table up
    print("training loss at the settled model")
    print("lambda  " + "".join(f"  lr {lr:<7g}" for lr in lrs) + f"  best lambda seen at lr {lrs[-1]:g}")
    for text in options.strengths.split(","):
        strength = None if text == "sgd" else "auto" if text == "auto" else float(text)
        print(f"{text:8}", end="", flush=True)
        for lr in lrs:
            runs = [train(strength, lr, options.ratio, options.steps, seed) for seed in range(options.seeds)]
            rows += runs
            loss = sum(float(str(run["loss"])) for run in runs) / len(runs)
            print(f"  {loss:<10.3f}" if loss < 1000 else "  diverged  ", end="", flush=True)
        seen = rows[-1]["best_lam"]
        print(f"  {seen:.2f}" if strength is not None and isinstance(seen, float) else "")
    if options.json:
        options.json.write_text(json.dumps({"command": "examples/detached.py", "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
