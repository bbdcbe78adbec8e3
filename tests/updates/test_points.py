"""Where a model is evaluated: `at`, in memory and on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.models import mlp
from tests.ranks import outcomes, run
from thinwire.errors import ExchangeError

from .jobs import backward, errors, make, make_here, parameters, settled, shared, train, train_here

CODECS = ["randomblock(ratio=8)", "topk(density=0.1)"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("period", "steps"), [(1, 5), (3, 5)])
def test_parameters_are_those_of_the_point_inside_and_as_before_afterwards(
    codec: str, period: int, steps: int
) -> None:
    models, opt = make(3, codec, period=period)
    train(models, opt, range(steps))
    before, y = [parameters(model) for model in models], settled(opt)
    assert not torch.equal(before[0], before[1])
    with torch.no_grad():
        with opt.at("shared"):
            for model in models:
                assert torch.equal(parameters(model), shared(opt))
        with opt.at("settled"):
            for model in models:
                assert torch.equal(parameters(model), parameters(models[0]))
                assert torch.allclose(parameters(model).double(), y, rtol=0, atol=1e-6)
    for model, values in zip(models, before, strict=True):
        assert torch.equal(parameters(model), values)
    train(models, opt, range(steps, steps + 3))
    again, fresh = make(3, codec, period=period)
    train(again, fresh, range(steps + 3))
    assert torch.equal(shared(opt), shared(fresh)), "an evaluation leaves no trace"
    assert torch.equal(errors(opt, 2), errors(fresh, 2))


def test_a_step_inside_is_refused_and_an_error_inside_restores() -> None:
    models, opt = make(2)
    train(models, opt, range(2))
    before = parameters(models[0])
    with opt.at("shared"), pytest.raises(ExchangeError, match=r"step\(\) inside of at\('shared'\)"):
        opt.step()
    with pytest.raises(ExchangeError, match="inside of"), opt.at("shared"), opt.at("settled"):
        pass
    with pytest.raises(KeyError), opt.at("settled"):
        raise KeyError("the user's own")
    with pytest.raises(ValueError, match="'shared'"), opt.at("average"):  # type: ignore[arg-type]
        pass
    assert torch.equal(parameters(models[0]), before)
    train(models, opt, range(2, 4))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(32, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_floating_buffers_are_averaged_inside_and_integers_left_alone() -> None:
    models, opt = make(3, model=Normed)
    train(models, opt, range(4))
    means = [model.body[1].running_mean.clone() for model in models]
    assert not torch.equal(means[0], means[1])
    for where in ("shared", "settled"):
        with opt.at(where):  # type: ignore[arg-type]
            for model in models:
                assert torch.allclose(model.body[1].running_mean, torch.stack(means).mean(0))
                assert model.body[1].num_batches_tracked.dtype == torch.int64
                assert int(model.body[1].num_batches_tracked) == 4
    with opt.at("shared", buffers=False):
        assert torch.equal(models[1].body[1].running_mean, means[1])
    for model, mean in zip(models, means, strict=True):
        assert torch.equal(model.body[1].running_mean, mean)
    folded = opt.state_dict("folded")
    assert torch.allclose(folded["folded.buffer.body.1.running_mean"], torch.stack(means).mean(0))


def _evaluate(codec: str) -> tuple[str, str, bool]:
    model, opt = make_here(codec)
    train_here(model, opt, range(6))
    before = parameters(model)
    with opt.at("shared"):
        x = parameters(model)
    with opt.at("settled"):
        y = parameters(model)
    assert torch.equal(parameters(model), before)
    total = errors(opt)
    dist.all_reduce(total)
    assert torch.allclose(y, x - total / dist.get_world_size(), atol=1e-6)
    return x.numpy().tobytes().hex(), y.numpy().tobytes().hex(), torch.equal(before, x)


@pytest.mark.parametrize("codec", CODECS)
def test_points_of_real_ranks_are_equal(codec: str) -> None:
    results = run(3, _evaluate, codec)
    assert len({x for x, _, _ in results}) == len({y for _, y, _ in results}) == 1
    assert not any(same for _, _, same in results)


def _alone(codec: str) -> str:
    model, opt = make_here(codec)
    train_here(model, opt, range(2))
    try:
        if dist.get_rank() == 0:
            with opt.at("settled"):
                pass
        else:
            train_here(model, opt, range(2, 3))
    except ExchangeError as error:
        with pytest.raises(ExchangeError, match="have failed"):
            train_here(model, opt, range(3, 4))
        return str(error)
    return "nothing"


@pytest.mark.parametrize("codec", CODECS)
def test_a_rank_that_evaluates_alone_is_an_error_on_all_ranks(codec: str) -> None:
    ended = outcomes(3, _alone, codec)
    texts = [what for kind, what in ended if kind == "ok"]
    assert len(texts) == 3, ended
    assert "only 1 of 3 ranks entered" in texts[0]
    for text in texts[1:]:
        assert "1 of 3 ranks entered opt.at(...)" in text


def _differently() -> str:
    model, opt = make_here()
    train_here(model, opt, range(2))
    evaluation = opt.at("settled")
    with pytest.raises(ExchangeError, match="the ranks disagree: purpose") as caught:
        opt.state_dict("folded") if dist.get_rank() == 0 else evaluation.__enter__()
    return str(caught.value)


def test_ranks_that_meet_for_different_things_are_told() -> None:
    for text in run(2, _differently):
        assert "state_dict('folded')" in text
        assert "at('settled')" in text


def test_one_model_shared_by_two_names_has_one_state() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
            self.out.weight = self.into.weight
            self.head = nn.Linear(32, 10)
            self.head.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.out(self.into(x).relu()))

    models, opt = make(2, model=Tied, options={"lr": 0.05})
    frozen = models[1].head.bias.clone()
    train(models, opt, range(4))
    names = [slot.name for slot in opt._replicas[0].slots]
    assert names == ["into.weight", "into.bias", "out.bias", "head.weight"]
    assert torch.equal(models[0].head.bias, models[1].head.bias)
    assert not torch.equal(models[1].head.bias, frozen) or torch.equal(models[0].head.bias, frozen)
    models[0].head.bias.requires_grad_(True)
    with pytest.raises(thinwire.ThinwireError, match="frozen or absent"):
        train(models, opt, range(4, 5))
    assert mlp() is not None


def _skip_alone() -> tuple[Tensor, Tensor, Tensor, int]:
    """One local step that only rank 1 takes, with a codec that keeps no residual."""
    model, opt = make_here("dense", period=3)
    backward([model], 0, dist.get_rank())
    if dist.get_rank() == 0:
        next(iter(model.parameters())).grad[0, 0] = float("nan")
    opt.step()
    with opt.at("settled"):
        y = parameters(model)
    return y, parameters(model), shared(opt), opt.local_skipped


def test_the_settled_model_counts_the_local_steps_of_all_ranks_though_some_skip_theirs() -> None:
    (y, p, x, skipped), (y_other, p_other, _, taken) = run(2, _skip_alone)
    assert (skipped, taken) == (1, 0)
    assert torch.equal(p, x)
    assert not torch.equal(p_other, x)
    assert torch.equal(y, y_other)
    assert torch.allclose(y, (p + p_other) / 2, rtol=0, atol=1e-6)
