"""BatchNorm as part of the state, against a plain torch loop and the whole-graph oracle."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import reference
from tests import problems

F64 = torch.float64
EPOCHS, LR = 3, 0.1


class Net(nn.Module):
    """A linear map, a norm under test, and a head."""

    def __init__(self, norm: nn.Module, dims: int, calls: int = 1) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(4, 3), norm, nn.Linear(3, problems.CLASSES)
        self.dims, self.calls = dims, calls

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)  # (m, L, 3): channels last
        if self.dims:
            h = h.transpose(1, 2).reshape(len(x), 3, *(4, 1, 1)[: self.dims])
        else:
            h = h.mean(1)
        for _ in range(self.calls):
            h = torch.tanh(self.norm(h)) + 0.1 * h
        return self.leave(h.flatten(2).mean(2) if self.dims else h)


class Frozen(Net):
    """A norm that stays in eval mode."""

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self


class Renamed(nn.BatchNorm1d):
    """A subclass that computes what its parent does."""


def switched_off() -> nn.BatchNorm1d:
    """Statistics that torch reads in eval mode and never writes."""
    norm = nn.BatchNorm1d(3)
    with torch.no_grad():
        norm.running_mean.uniform_(-0.2, 0.2)
        norm.running_var.uniform_(0.5, 1.5)
    norm.track_running_stats = False
    return norm


NETS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: Net(nn.BatchNorm1d(3), 0),
    "1d-sequence": lambda: Net(nn.BatchNorm1d(3, momentum=0.4), 1),
    "2d": lambda: Net(nn.BatchNorm2d(3, eps=1e-3), 2),
    "3d": lambda: Net(nn.BatchNorm3d(3), 3),
    "not-affine": lambda: Net(nn.BatchNorm2d(3, affine=False), 2),
    "cumulative": lambda: Net(nn.BatchNorm2d(3, momentum=None), 2),
    "not-tracked": lambda: Net(nn.BatchNorm1d(3, track_running_stats=False), 1),
    "switched-off": lambda: Net(switched_off(), 0),
    "twice": lambda: Net(nn.BatchNorm1d(3), 1, calls=2),
    "cumulative-twice": lambda: Net(nn.BatchNorm1d(3, momentum=None), 1, calls=2),
    "frozen": lambda: Frozen(nn.BatchNorm1d(3), 0),
    "subclass": lambda: Net(Renamed(3), 1),
}


def recipe(name: str, **changes: Any) -> ms.Recipe:
    torch.manual_seed(11)
    net = NETS[name]().double()
    g = torch.Generator().manual_seed(2)
    x = torch.randn(problems.NUM_EXAMPLES, 4, 4, generator=g, dtype=F64)
    y = torch.randint(problems.CLASSES, (problems.NUM_EXAMPLES,), generator=g)
    options = {"batch_size": 5, "epochs": EPOCHS, "seed": 4, **changes}
    return ms.Recipe(net, ms.losses.cross_entropy, (x, y), ms.SGD(lr=LR, momentum=0.9), **options)


def torch_loop(recipe: ms.Recipe, w: Tensor) -> nn.Module:
    """What a person would write, with gradient accumulation over microbatches."""
    net = copy.deepcopy(recipe.model).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    x, y = recipe.data
    for batch in recipe.order.batches:
        optimizer.zero_grad()
        for part in batch.split(recipe.microbatch or len(batch)):
            losses = ms.losses.cross_entropy(net, (x[part], y[part]))
            ((w[part] * losses).sum() / len(batch)).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("microbatch", [None, 2], ids=["whole", "microbatches"])
@pytest.mark.parametrize("name", NETS)
def test_training_equals_a_plain_loop(name: str, microbatch: int | None) -> None:
    batch_size = 5 if microbatch is None else 4  # a microbatch of one has no variance
    order = [torch.arange(i, i + batch_size) % 10 for i in (0, 3, 5, 8, 1)]
    described = recipe(name, batches=order, batch_size=None, epochs=None, microbatch=microbatch)
    w = problems.random_weights()
    model, expected = ms.train(described, weights=w).model(), torch_loop(described, w)
    ours, theirs = model.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-12)
    x = described.data[0]
    torch.testing.assert_close(model(x), expected.eval()(x), rtol=0, atol=1e-12)
    assert type(model.norm) is type(expected.norm)


@pytest.mark.parametrize("microbatch", [None, 5], ids=["whole", "microbatches"])
@pytest.mark.parametrize("name", NETS)
def test_rows_of_eval_mode_queries_equal_the_whole_graph(name: str, microbatch: int | None) -> None:
    described = recipe(name, batch_size=10, microbatch=microbatch)
    run = ms.train(described, implementation="loop")
    x, y = described.data
    queries = ms.Queries((x[:3] + 0.1, y[:3]), ms.losses.cross_entropy)
    bar = queries.gradients(run)
    tracked = name not in ("not-tracked", "switched-off")
    assert ("norm.running_var" in bar) == tracked
    rows = run.replay(bar)
    assert problems.relative(rows, reference.replay(described, bar)) < 1e-10


def test_queries_see_the_statistics() -> None:
    """The statistics' share of a row is not small: a sweep without it would be wrong."""
    run = ms.train(recipe("2d"), implementation="loop")
    x, y = run.recipe.data
    bar = ms.Queries((x[:3], y[:3]), ms.losses.cross_entropy).gradients(run)
    without = {name: value for name, value in bar.items() if "running" not in name}
    assert problems.relative(run.replay(without), run.replay(bar)) > 1e-2


def test_one_update_of_the_statistics_a_microbatch() -> None:
    order = {"batches": [[0, 1, 2, 3]], "batch_size": None, "epochs": None}
    model = ms.train(recipe("1d", **order, microbatch=2)).model()
    assert int(model.norm.num_batches_tracked) == 2


def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    with pytest.raises(ms.LossError, match="more than 1 value per channel"):
        ms.train(recipe("1d", batches=[[0]], batch_size=None, epochs=None))
