"""Saved states that are converted: other numbers of ranks, other codecs; and states on disk."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import thinwire
from tests.engine.test_nonfinite import OWN, same
from tests.engine.test_state import SHAPES, _exchange, _job, _refused, _step
from tests.models import digest, train
from tests.ranks import run
from thinwire.engine import files
from thinwire.errors import StateError

CHAINS = ["topk(density=0.05) via B", "int8", "randomblock via iRS comp eARc dec iAG"]
RESIDUAL = [name for name in OWN if thinwire.parse(name).keeps_residual]


def _world(codec: str, ranks: int, steps: int = 0, **options: Any) -> thinwire.Exchange:
    named = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    nodes = 2 if "via" in codec and ranks % 2 == 0 else 1
    world = thinwire.LocalWorld(ranks, ranks_per_node=ranks // nodes)
    exchange = thinwire.Exchange(named, codec, world, **{"min_elements": 64, "group_bytes": 16000, **options})
    for step in range(steps):
        _step(exchange, step)
    return exchange


def pending(exchange: thinwire.Wire) -> dict[str, Tensor]:
    """What has not been sent yet, in all and divided by the number of ranks: the mean that training will see."""
    assert exchange.executor is not None
    left = [rank_state.unsent() for rank_state in exchange.executor.rank_states]
    return {name: torch.stack([own[name].double() for own in left]).mean(0) for name in left[0]}


def conserved(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To one rounding of the largest value. A tensor that has no residual any more must have had nothing left."""
    for name in found.keys() | expected.keys():
        value = expected.get(name, torch.zeros(()))
        largest = float(value.abs().max())
        difference = float((found.get(name, torch.zeros(())) - value).abs().max())
        assert difference <= torch.finfo(torch.float32).eps * largest, name


# -- other numbers of ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", [*RESIDUAL, "dgc(momentum=0.9)", "micro(momentum=0.9)", "laplace(momentum=0.9)", *CHAINS, "strided"]
)
def test_the_mean_is_conserved(codec: str) -> None:
    exchange = _world(codec, 4, steps=4)
    before, expected = exchange.state_dict(), pending(exchange)
    whole = exchange.state_dict("mean")
    assert same(exchange.state_dict(), before), "taking it changes nothing"
    assert all(key.startswith("mean.") for key in whole)
    assert sum(value.numel() for key, value in whole.items() if ".residual." in key) <= sum(
        int(torch.Size(shape).numel()) for shape in SHAPES.values()
    )
    for ranks in (1, 3, 4, 6):
        if ranks % 2 and "iRS" in codec:
            continue
        for saved in (whole, before):
            if ranks == 4 and saved is before:
                continue
            other = _world(codec, ranks, steps=2)
            other.load_state_dict(saved)
            conserved(pending(other), expected)
            assert other.steps == 4
            means = _step(other, 9)
            assert not other.skipped_last_step
            assert all(torch.equal(means[0][name], mean) for rank in means for name, mean in rank.items())


def test_a_list_of_states() -> None:
    exchange = _world("topk(density=0.05)", 3, steps=3)
    whole = exchange.state_dict()
    parts = [{key: value for key, value in whole.items() if key.startswith(f"rank{rank}.")} for rank in range(3)]
    other = _world("topk(density=0.05)", 2)
    other.load_state_dict(parts[::-1])
    conserved(pending(other), pending(exchange))
    _refused(other, parts[:2], "of 3 ranks, and this job has 2: .* that of rank 2 is missing")
    _refused(other, [], "a dictionary, .* or a list of them")
    _refused(other, "state.pt", "a dictionary, .* or a list of them, not 'state.pt'")
    _refused(other, [parts[0], None], "not NoneType")
    later = _world("topk(density=0.05)", 3, steps=4).state_dict()
    mixed = [*parts[:2], {key: value for key, value in later.items() if key.startswith("rank2.")}]
    _refused(other, mixed, r"rank 0 and rank 2 .* do not fit together: they have progress \(0, 3\) and \(0, 4\)")


def test_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    thinwire.log.logger.propagate = True
    states = {codec: _world(codec, 2, steps=3).state_dict() for codec in ("topk(density=0.05)", "topk via B")}
    with caplog.at_level(logging.INFO, "thinwire"):
        _world("topk(density=0.05)", 2).load_state_dict(states["topk(density=0.05)"])
        assert not caplog.messages
        _world("topk(density=0.05)", 3).load_state_dict(states["topk(density=0.05)"])
        assert caplog.messages == [
            "the state is of 2 ranks, this job has 3: every rank goes on with the mean of what they had not sent"
        ]
        _world("adacomp", 2).load_state_dict(states["topk via B"])
        assert "the state is of topk via " in caplog.messages[1]
        assert caplog.messages[1].endswith(": residuals are kept, and adacomp starts to learn from scratch")
        assert len(caplog.messages) == 2


def test_thresholds_stay_where_ranks_change() -> None:
    exchange = _world("micro(density=0.05)", 4, steps=30)
    assert exchange.executor is not None
    learnt = exchange.executor.rank_states[0].groups[0].way.state
    for saved in (exchange.state_dict("mean"), exchange.state_dict()):
        other = _world("micro(density=0.05)", 3)
        other.load_state_dict(saved)
        assert other.executor is not None
        state = other.executor.rank_states[2].groups[0].way.state
        assert (state.thresholds == learnt.thresholds).all()
        assert (state.borders[-1], state.steps) == (state.group.elements, 1), "a part for each rank, quick to follow"
        _step(other, 30)
        assert other.executor.statistics.bytes < 4 * 6000, "no dense first step again"


# -- other codecs and chains -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*OWN, "topk(density=0.05) via B", "strided"])
def test_another_codec_keeps_the_residuals(codec: str) -> None:
    for before in ("randomblock(ratio=8)", "topk(density=0.03) via K"):
        exchange = _world(before, 2, steps=4)
        saved, expected = exchange.state_dict(), pending(exchange)
        other = _world(codec, 2)
        other.load_state_dict(saved)
        conserved(pending(other), expected)
        again = _world(codec, 2)
        again.load_state_dict(other.state_dict())
        conserved(pending(again), expected)
        assert same(_step(other, 5), _step(again, 5))
        assert same(other.state_dict(), again.state_dict())
        elsewhere = _world(codec, 3)
        elsewhere.load_state_dict(saved)
        conserved(pending(elsewhere), expected)


def test_a_codec_that_does_not_go_by_its_default_chain() -> None:
    """`int8` goes in two rounds by default; `via J` is what it does by itself, and has no name in a state."""
    saved = _world("int8 via J", 2, steps=3)
    resumed = _world("int8 via J", 2)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.executor is not None
    assert {group.chain for group in resumed.executor.layout.groups} == {""}
    assert all(same(a, b) for a, b in zip(_step(saved, 3), _step(resumed, 3), strict=True))


def test_numbers_set_by_hand() -> None:
    exchange = _world("topk(density=0.05)", 2, steps=2)
    exchange.set(density=0.01)
    other = _world("laplace", 3)
    other.load_state_dict(exchange.state_dict())
    assert other.session.settings == {"density": 0.01}, "laplace has a density too"
    cast = _world("cast", 3)
    cast.load_state_dict(exchange.state_dict("mean"))
    assert cast.session.settings == {}


def test_a_residual_without_a_place_is_refused() -> None:
    saved = _world("topk(density=0.05)", 2, steps=3, min_elements=0).state_dict()
    _refused(_world("randomblock", 2), saved, "'bias' has a residual in the state, and none here, because it is small")
    _world("topk(density=0.05)", 2).load_state_dict(saved)  # the layout of the state


# -- damaged states ----------------------------------------------------------------------------------------------------


def _changed(state: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Let what the codec remembers of group 0 on rank 0 be something else."""
    import base64

    meta = json.loads(state["rank0.thinwire"])
    if field in meta["numbers"][0]:
        meta["numbers"][0][field] = value
    else:
        data = value.numpy().tobytes()
        assert len(data) == len(base64.b64decode(meta["arrays"][0][field]["data"])), field
        meta["arrays"][0][field]["data"] = base64.b64encode(data).decode()
    return state | {"rank0.thinwire": json.dumps(meta)}


def test_what_codecs_remember_is_checked() -> None:
    nan = float("nan")
    elements = 2010
    cases: list[tuple[str, str, Any, str]] = [
        ("micro", "borders", torch.tensor([0, 10**9, elements]), "borders must ascend from 0 to 2010"),
        ("micro", "borders", torch.tensor([0, -1, elements]), "borders must ascend"),
        ("micro", "borders", torch.tensor([5, 10, elements]), "borders must ascend"),
        ("micro", "borders", torch.tensor([0, 10, elements + 1]), "borders must ascend"),
        ("micro", "thresholds", torch.tensor([nan], dtype=torch.float64), "thresholds must hold numbers from 0 to"),
        ("micro", "weights", torch.full((1024,), -1.0, dtype=torch.float64), "weights must hold numbers from 0 to"),
        ("micro", "usual", -1.0, "usual must be a number from 0 to 1e\\+100, not -1.0"),
        ("micro", "steps", -1, "steps must be a whole number from 0"),
        ("laplace", "warm", torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64), "no search leaves"),
        ("laplace", "warm", torch.tensor([nan, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64), "warm must hold numbers"),
        ("sidco", "stages", 10**9, "stages must be a whole number from 1 to 1100, not 1000000000"),
        ("sidco", "steps", -1, "steps must be a whole number from 0 to 4, not -1"),
        ("lowrank", "basis", torch.full((200,), nan), "basis must hold numbers"),
    ]
    for codec, field, value, message in cases:
        saved = _exchange(codec, steps=3).state_dict()
        _refused(_exchange(codec, steps=1), _changed(saved, field, value), message)
    for codec, field, value in (("micro", "steps", 0), ("micro", "borders", torch.tensor([0, 10, elements]))):
        saved = _exchange(codec, steps=3).state_dict()
        _refused(_exchange(codec, steps=1), _changed(saved, field, value), "have learnt different things")


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_go_round(tmp_path: Path) -> None:
    for codec in (*OWN, "topk(density=0.05) via B"):
        exchange = _world(codec, 2, steps=3)
        folder = tmp_path / codec
        exchange.save(folder)
        exchange.save(folder / "mean", form="mean")
        assert sorted(path.name for path in folder.iterdir()) == [
            "mean", "rank0-of-2.safetensors", "rank1-of-2.safetensors"
        ]  # fmt: skip
        assert [path.name for path in (folder / "mean").iterdir()] == ["mean.safetensors"]
        other = _world(codec, 2)
        other.load(folder)
        assert same(other.state_dict(), exchange.state_dict())
        other.load([folder / "rank1-of-2.safetensors", folder / "rank0-of-2.safetensors"])
        assert same(other.state_dict(), exchange.state_dict())
        for source in (folder, folder / "mean", folder / "mean" / "mean.safetensors"):
            more = _world(codec, 4)
            more.load(source)
            conserved(pending(more), pending(exchange))


def test_which_files_of_a_folder(tmp_path: Path) -> None:
    codec = "topk(density=0.05)"
    exchange = _world(codec, 2, steps=3)
    exchange.save(tmp_path)
    other = _world(codec, 3)
    other.load(tmp_path)
    _step(other, 3)
    other.save(tmp_path)
    back = _world(codec, 2)
    back.load(tmp_path)  # the newer ones, though there are some for as many ranks
    assert back.steps == 4
    conserved(pending(back), pending(other))
    back.save(tmp_path, form="mean")  # as new as the others, which are for as many ranks
    third = _world(codec, 3)
    third.load(tmp_path)
    assert same(third.state_dict(), other.state_dict())
    (tmp_path / "rank1-of-3.safetensors").unlink()
    (tmp_path / "mean.safetensors").unlink()
    third.load(tmp_path)  # the set of three is not complete
    assert third.steps == 3

    def refused(text: str) -> None:
        with pytest.raises(StateError, match=text):
            _world(codec, 3).load(tmp_path)

    (tmp_path / "rank0-of-2.safetensors").unlink()
    refused("has no rank1-of-3.safetensors, and this job has 3 ranks")
    for path in tmp_path.glob("*"):
        path.unlink()
    refused("holds no state: there is no rank0-of-3.safetensors and no mean.safetensors")
    for rank, steps in ((0, 3), (1, 2), (2, 3)):
        part = _world(codec, 3, steps=steps).state_dict()
        own = {key: value for key, value in part.items() if key.startswith(f"rank{rank}")}
        files.write(tmp_path, f"rank{rank}-of-3.safetensors", own, steps)
    refused(r"rank0-of-3.safetensors is of step 3 and rank1-of-3.safetensors of step 2: .* interrupted")
    for junk in (b"", b"\x08" * 7, b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"):
        (tmp_path / "rank0-of-3.safetensors").write_bytes(junk)
        refused("rank0-of-3.safetensors' (cannot be read|is no state of thinwire)")
    with pytest.raises(StateError, match="give the name of a folder"):
        exchange.save(tmp_path / "state.safetensors")
    with pytest.raises(StateError, match="cannot be read"):
        exchange.load(tmp_path / "nothing")


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    exchange = _world("micro(density=0.05)", 2, steps=3)
    exchange.save(tmp_path)
    before = exchange.state_dict()
    path = tmp_path / "rank1-of-2.safetensors"
    whole = path.read_bytes()
    dice = torch.Generator().manual_seed(1)
    refused = 0
    for _ in range(200):
        at = int(torch.randint(len(whole), (), generator=dice)) if refused % 3 else 8 + refused % 3000
        cut = bytearray(whole)
        cut[at] ^= int(torch.randint(1, 256, (), generator=dice))
        path.write_bytes(bytes(cut) if refused % 7 else whole[:at])
        try:
            exchange.load(tmp_path)
        except StateError:
            refused += 1
            assert same(exchange.state_dict(), before)
        else:
            before = exchange.state_dict()
    assert refused > 60


_KILLED = """
import sys, torch, thinwire
exchange = thinwire.Exchange({"w": torch.zeros(1 << 22)}, "randomblock(ratio=2)", thinwire.LocalWorld(1))
step = 0
while True:
    exchange.reduce_([{"w": torch.full((1 << 22,), 1.0 + step)}])
    exchange.save(sys.argv[1])
    step += 1
    print(step, flush=True)
"""


def test_a_kill_in_the_middle_leaves_a_whole_file(tmp_path: Path) -> None:
    """Killed while it writes 16 MB again and again: what is there can always be loaded, and is of the last step or before."""
    for number in range(3):
        job = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert job.stdout is not None
        for _ in range(2 + number):
            said = int(job.stdout.readline())
        draft = tmp_path / ".rank0-of-1.safetensors.part"
        while not draft.exists() and job.poll() is None:
            pass
        job.send_signal(signal.SIGKILL)
        job.wait()
        job.stdout.close()
        exchange = thinwire.Exchange({"w": torch.zeros(1 << 22)}, "randomblock(ratio=2)", thinwire.LocalWorld(1))
        exchange.load(tmp_path)
        assert exchange.steps >= said
        exchange.reduce_([{"w": torch.ones(1 << 22)}])
        exchange.save(tmp_path)
        (path,) = tmp_path.iterdir()  # what was left is gone
        (tmp_path / "other").touch()
        assert path.stat().st_mode == (tmp_path / "other").stat().st_mode, "who may read it is for the umask to say"
        (tmp_path / "other").unlink()


# -- real ranks --------------------------------------------------------------------------------------------------------


def _all_pending(wire: thinwire.Wire) -> dict[str, Tensor]:
    everyone: list[Any] = [None] * dist.get_world_size()
    assert wire.executor is not None
    dist.all_gather_object(everyone, wire.executor.rank_states[0].unsent())
    return {name: torch.stack([own[name].double() for own in everyone]).mean(0) for name in everyone[0]}


def _resized(codec: str, folder: str, steps: range, form: Any) -> tuple[str, dict[str, Tensor], list[float]]:
    """Train from the last checkpoint on, and leave another."""
    ddp, optimizer, wire = _job(codec, 0)
    here = Path(folder) / f"step{steps.start}"
    if steps.start:
        common = torch.load(here / "model.pt", weights_only=True)
        ddp.module.load_state_dict(common["model"])
        optimizer.load_state_dict(common["optimizer"])
        wire.load(here)
        conserved(_all_pending(wire), common["pending"])
    losses = train(ddp, optimizer, steps)
    there, left = Path(folder) / f"step{steps.stop}", _all_pending(wire)
    wire.save(there, form=form)
    if dist.get_rank() == 0:
        parts = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "pending": left}
        torch.save(parts, there / "model.pt")
    return digest(ddp), left, losses


@pytest.mark.parametrize(("codec", "form"), [("micro(density=0.05)", "exact"), ("laplace(density=0.05)", "mean")])
def test_four_ranks_three_four(codec: str, form: str, tmp_path: Path) -> None:
    losses = []
    for ranks, steps in ((4, range(0, 8)), (3, range(8, 14)), (4, range(14, 40))):
        results = run(ranks, _resized, codec, str(tmp_path), steps, form)
        assert len({result[0] for result in results}) == 1
        losses += results[0][2]
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8]), "training goes on"


def _through_dcp(codec: str, folder: str, steps: range) -> None:
    ddp, optimizer, wire = _job(codec, 0)
    here = Path(folder) / f"step{steps.start}"
    if steps.start:
        dcp.load({"model": ddp.module}, checkpoint_id=here)
        wire.load(here)
        conserved(_all_pending(wire), torch.load(Path(folder) / "pending.pt"))
    train(ddp, optimizer, steps)
    there = Path(folder) / f"step{steps.stop}"
    dcp.save({"model": ddp.module, "wire": wire}, checkpoint_id=there)
    left, whole = _all_pending(wire), wire.state_dict("mean")
    if dist.get_rank() == 0:
        torch.save(left, Path(folder) / "pending.pt")
    dcp.save({"wire": whole}, checkpoint_id=there / "mean")
    _, _, fresh = _job(codec, 1)
    blank = fresh.state_dict("mean")
    dcp.load({"wire": blank}, checkpoint_id=there / "mean")
    fresh.load_state_dict(blank)
    conserved(_all_pending(fresh), left)
    two = {"a": wire.state_dict(), "b": wire.state_dict()}
    dcp.save(two, checkpoint_id=there / "two")
    with pytest.raises(StateError, match="one state of thinwire, but has: a, b; `key` says which"):
        wire.load(there / "two")
    before = wire.state_dict()
    wire.load(there / "two", key="b")
    assert same(wire.state_dict(), before)


def test_distributed_checkpoint_of_other_ranks(tmp_path: Path) -> None:
    run(3, _through_dcp, "topk(density=0.05)", str(tmp_path), range(0, 5))
    run(2, _through_dcp, "topk(density=0.05)", str(tmp_path), range(5, 8))


def _load_differently(folder: str) -> None:
    """Ranks that would go on from different states: an error on all of them, and nothing has changed."""
    ddp, optimizer, wire = _job("topk(density=0.05)", 0)
    rank, mine = dist.get_rank(), Path(folder) / f"of-{dist.get_rank()}"
    for step in range(3, 5):
        train(ddp, optimizer, range(step))
        if step == 3 + rank:
            wire.save(mine)
    before = wire.state_dict()
    with pytest.raises(StateError, match=r"the ranks disagree: state: rank 0 has .*\[2, 1\].*, rank 1 has .*\[2, 5\]"):
        wire.load(mine)
    with pytest.raises(StateError, match=r"'nowhere' cannot be read|rank 1 refuses: 'nowhere' cannot be read"):
        wire.load("nowhere" if rank else mine)
    assert same(wire.state_dict(), before)
    train(ddp, optimizer, range(2))


def test_ranks_that_would_load_different_states(tmp_path: Path) -> None:
    run(2, _load_differently, str(tmp_path))


def _mean_by_one() -> None:
    """A step more on one rank: everybody hears of it."""
    ddp, optimizer, wire = _job("topk(density=0.05)", 0)
    train(ddp, optimizer, range(3))
    if dist.get_rank() == 1:
        wire.session.progress.dense_steps += 1
    with pytest.raises(thinwire.ThinwireError, match="the ranks disagree: step: rank 0 has 3, rank 1 has 4"):
        wire.state_dict("mean")


def test_a_mean_of_different_steps_is_refused() -> None:
    run(2, _mean_by_one)
