"""Batches: what they are made of, what replays, what is refused."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import metasketch as ms
from metasketch import reference
from metasketch.data import batch_digest, slice_batch
from tests import problems

F64 = torch.float64
N, D = 8, 4
Transform = Callable[[Tensor], Tensor]


def points(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, D, generator=g, dtype=F64), torch.randn(n, generator=g, dtype=F64)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 1)).double()


def squared(model: nn.Module, batch: Any) -> Tensor:
    x, y = (
        batch["x"] if isinstance(batch, dict) else batch[0],
        (batch["y"] if isinstance(batch, dict) else batch[1]),
    )
    return (model(x).squeeze(1) - y).square()


def recipe(data: Any, **changes: Any) -> ms.Recipe:
    options = {"loss": squared, "batch_size": 4, "epochs": 3, "seed": 2, **changes}
    return ms.Recipe(net(), data=data, optimizer=ms.SGD(lr=0.1, momentum=0.5), **options)


def rows(run: ms.Run) -> Tensor:
    bar = torch.linspace(-1, 1, run.num_params, dtype=F64)
    named = run.step.model.layout.unpack(bar[None])
    return run.replay(named)


class Items(Dataset):
    """Points under a transform that runs when they are read."""

    def __init__(self, transform: Transform = lambda x: x) -> None:
        self.x, self.y = points()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.x[i]), self.y[i]


class Rows:
    """Map-style without being a Dataset; reading past the end raises."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y = points()
        return {"x": x[i].numpy(), "y": float(y[i])}


SAME: dict[str, Callable[[], Any]] = {
    "arrays": lambda: tuple(t.numpy() for t in points()),
    "dict": lambda: dict(zip("xy", points(), strict=True)),
    "dict-of-arrays": lambda: {k: t.numpy() for k, t in zip("xy", points(), strict=True)},
    "tensor-dataset": lambda: TensorDataset(*points()),
    "dataset": Items,
    "list": lambda: list(zip(*points(), strict=True)),
    "map-style": Rows,
}


@pytest.mark.parametrize("kind", SAME)
def test_every_kind_of_data_trains_the_same(kind: str) -> None:
    expected, run = ms.train(recipe(points())), ms.train(recipe(SAME[kind]()))
    assert run.num_examples == N
    for name, value in expected.state_dict().items():
        assert torch.equal(run.state_dict()[name], value)


@pytest.mark.parametrize("kind", [*SAME, "tensors"])
def test_collate_gets_the_items(kind: str) -> None:
    """Also where the data are tensors, or a TensorDataset: an item is one row of each."""

    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        pairs = [tuple(i.values()) if isinstance(i, dict) else i for i in items]
        columns = [
            torch.as_tensor(np.stack(list(map(np.asarray, c)))) for c in zip(*pairs, strict=True)
        ]
        return columns[0], columns[1]

    data = points() if kind == "tensors" else SAME[kind]()
    run, expected = ms.train(recipe(data, collate=collate)), ms.train(recipe(points()))
    assert run.num_examples == N
    assert torch.equal(run.final.params, expected.final.params)


def test_read_only_arrays_are_fine() -> None:
    arrays = tuple(t.numpy().copy() for t in points())
    for array in arrays:
        array.flags.writeable = False
    expected = ms.train(recipe(points())).final.params
    assert torch.equal(ms.train(recipe(arrays)).final.params, expected)


def noisy(x: Tensor) -> Tensor:
    """Draws from every global generator, as transforms of torchvision and others do."""
    noise = torch.randn(D, dtype=F64) + random.gauss(0, 1) + torch.from_numpy(np.random.randn(D))
    return x + 0.1 * noise


@pytest.mark.parametrize("memory", ["2 states", "100 states"])
def test_random_transforms_replay(memory: str) -> None:
    described = recipe(Items(noisy), microbatch=3)
    run = ms.train(described, memory=memory, implementation="loop")
    bar = {n: torch.ones(1, *v.shape, dtype=F64) for n, v in run.state_dict().items()}
    assert problems.relative(run.replay(bar), reference.replay(described, bar)) < 1e-10
    plain = ms.train(recipe(Items(), microbatch=3))
    assert not torch.equal(plain.final.params, run.final.params)


def test_transforms_differ_between_epochs_and_examples_but_not_between_orders() -> None:
    examples = recipe(Items(noisy)).examples
    one = torch.tensor([3, 5])
    first, later = examples.fetch(one, epoch=0)[0], examples.fetch(one, epoch=1)[0]
    assert not torch.equal(first, later)
    assert torch.equal(examples.fetch(one.flip(0), epoch=0)[0], first.flip(0))
    x = points()[0]
    assert not torch.equal((first - x[one])[0], (first - x[one])[1])


def test_a_random_collate_replays() -> None:
    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*items, strict=True))
        return x * (torch.rand(x.shape) < 0.8), y

    described = recipe(Items(), collate=collate)
    run = ms.train(described, memory="2 states", implementation="loop")
    bar = {n: torch.ones(1, *v.shape, dtype=F64) for n, v in run.state_dict().items()}
    assert problems.relative(run.replay(bar), reference.replay(described, bar)) < 1e-10


def test_augment_may_work_in_place() -> None:
    """The batch is its own copy: the data stay, and sweeps see what training saw."""

    def augment(batch: Any, generator: torch.Generator) -> Any:
        batch[0].mul_(torch.rand(batch[0].shape, generator=generator, dtype=F64))
        return batch

    data = points()
    described = recipe(data, augment=augment)
    run = ms.train(described, memory="2 states", implementation="loop")
    bar = {n: torch.ones(1, *v.shape, dtype=F64) for n, v in run.state_dict().items()}
    assert problems.relative(run.replay(bar), reference.replay(described, bar)) < 1e-10
    assert all(torch.equal(a, b) for a, b in zip(data, points(), strict=True))


# What does not replay.

_private = torch.Generator().manual_seed(0)


def from_a_private_generator(x: Tensor) -> Tensor:
    return x + torch.randn(D, generator=_private, dtype=F64)


class Counting(Items):
    """Changes what it gives after so many reads."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.reads = after, 0

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        x, y = super().__getitem__(i)
        return x + (0.5 if self.reads > self.after else 0.0), y


@pytest.mark.parametrize("data", [Items(from_a_private_generator), Counting(after=1)])
def test_items_that_change_between_reads_are_refused_at_once(data: Items) -> None:
    described = recipe(data)
    first = int(described.order.batches[0][0])
    with pytest.raises(ms.DataError, match=rf"example {first} .*differs between two reads"):
        ms.train(described)


@pytest.mark.parametrize("sweep", ["replay", "forward"])
def test_items_that_change_later_are_refused_by_the_sweep(sweep: str) -> None:
    data = Counting(after=10**6)
    run = ms.train(recipe(data), implementation="loop")
    data.after = 0
    with pytest.raises(ms.MismatchError, match=r"the batch of step \d+ is not what training saw"):
        rows(run) if sweep == "replay" else run.forward(torch.ones(1, N, dtype=F64))


def augment_from_a_private_generator(batch: Any, generator: torch.Generator) -> Any:
    return batch[0] + torch.randn(batch[0].shape, generator=_private, dtype=F64), batch[1]


def test_an_augment_with_a_generator_of_its_own_is_refused_at_once() -> None:
    with pytest.raises(ms.DataError, match=r"step 0 differs between two reads.*augment must draw"):
        ms.train(recipe(points(), augment=augment_from_a_private_generator))


def test_an_augment_that_changes_later_is_refused_by_the_sweep() -> None:
    scale = [1.0]
    run = ms.train(
        recipe(points(), augment=lambda batch, generator: (batch[0] * scale[0], batch[1]))
    )
    scale[0] = 2.0
    with pytest.raises(ms.MismatchError, match=r"step \d+ is not what training saw.*augment"):
        rows(run)


def test_a_collate_that_changes_is_refused() -> None:
    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*items, strict=True))
        return x + (len(items) > 1) * torch.randn(x.shape, generator=_private, dtype=F64), y

    with pytest.raises(ms.DataError, match=r"step 0 differs between two reads.*collate must draw"):
        ms.train(recipe(Items(), collate=collate))


def through_torch(x: Tensor) -> None:
    x[0, 0] += 1


def through_numpy(x: Tensor) -> None:
    x.numpy()[0, 0] += 1


@pytest.mark.parametrize("change", [through_torch, through_numpy])
@pytest.mark.parametrize("kind", ["tensors", "arrays", "tensor-dataset", "collate"])
def test_data_changed_after_training_are_refused(kind: str, change: Callable[..., None]) -> None:
    x, y = points()
    data: Any = {"arrays": (x.numpy(), y.numpy()), "tensor-dataset": TensorDataset(x, y)}.get(
        kind, (x, y)
    )
    stack = torch.utils.data.default_collate
    run = ms.train(recipe(data, collate=stack if kind == "collate" else None))
    rows(run)
    if kind == "arrays" and change is through_torch:
        pytest.skip("a tensor beside the array has a count of its own")
    change(x)
    for sweep in (lambda: rows(run), lambda: run.forward(torch.ones(1, N, dtype=F64))):
        with pytest.raises(ms.DataError, match="changed in place"):
            sweep()
    with pytest.raises(ms.DataError, match="changed in place"):
        ms.train(run.recipe)


# What cannot be read.


def failing(x: Tensor) -> Tensor:
    raise OSError("no such picture")


@pytest.mark.parametrize("late", [False, True])
def test_an_item_that_cannot_be_read_is_named(late: bool) -> None:
    def transform(x: Tensor) -> Tensor:
        return failing(x) if not late or torch.equal(x, points()[0][bad]) else x

    order = [[2, 1], [0, 4], [7, 3]]
    bad = 7 if late else 2
    described = recipe(Items(transform), batches=order, batch_size=None, epochs=None)
    with pytest.raises(ms.DataError, match=f"example {bad} .*OSError: no such picture") as caught:
        ms.train(described)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_collate_that_fails_is_told_with_its_examples() -> None:
    items = [(torch.zeros(D + i % 2, dtype=F64), torch.zeros((), dtype=F64)) for i in range(N)]
    described = recipe(items, batches=[[4, 5]], batch_size=None, epochs=None)
    with pytest.raises(ms.DataError, match=r"collating examples \[4, 5\] .*RuntimeError: stack"):
        ms.train(described)


def test_an_augment_that_fails_is_told_with_its_step() -> None:
    def augment(batch: Any, generator: torch.Generator) -> Any:
        raise IndexError("too far")

    with pytest.raises(ms.DataError, match="augment failed .*step 0: IndexError: too far"):
        ms.train(recipe(points(), augment=augment))


def test_an_augment_must_return_the_batch() -> None:
    with pytest.raises(ms.DataError, match="augment returned None"):
        ms.train(recipe(points(), augment=lambda batch, generator: None))


class Endless:
    def __iter__(self) -> Iterator[int]:
        return iter([1])


x8, y8 = points()
BAD_DATA: dict[str, tuple[Any, str]] = {
    "an empty tensor": (torch.zeros(0, D), "empty"),
    "an empty list": ([], "empty"),
    "an empty tuple": ((), "empty"),
    "lengths": ((x8, y8[:5]), r"different lengths \[5, 8\]"),
    "lengths in a dict": ({"x": x8[:3], "y": y8}, r"different lengths \[3, 8\]"),
    "a scalar": ((x8, torch.tensor(1.0)), "no dimension"),
    "a tuple with a list": ((x8, y8.tolist()), "a tuple that holds a list"),
    "a dict with a list": ({"x": x8, "y": y8.tolist()}, "a dict that holds a list"),
    "objects": (np.array([None, "a"], dtype=object), "cannot become a tensor.*object"),
    "a stream": (Endless(), "a Endless: give a tensor.*map-style"),
    "a number": (3, "data is a int"),
    "nothing": (None, "data is a NoneType"),
}


@pytest.mark.parametrize("what", BAD_DATA)
def test_data_that_cannot_be_used(what: str) -> None:
    data, words = BAD_DATA[what]
    with pytest.raises(ms.DataError, match=words):
        recipe(data)


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "too large": ([[0, 1], [2, 8]], r"batches\[1\] names example 8.*8 examples, 0 to 7"),
    "negative": ([[0, -1]], r"batches\[0\] names example -1"),
    "floats": ([torch.tensor([0.0, 1.0])], r"batches\[0\] must be .*integer.*float32"),
    "booleans": ([torch.arange(N) < 3], r"batches\[0\] must be .*integer.*bool"),
    "an empty one": ([[0], []], r"batches\[1\] must be a non-empty vector"),
    "a matrix": ([torch.zeros(2, 2, dtype=torch.int64)], r"batches\[0\].*shape \(2, 2\)"),
    "a number": ([3], r"batches\[0\] .*shape \(\)"),
    "words": ([["a"]], r"batches\[0\] is not a vector of indices"),
    "none": ([], "batches is empty"),
    "not a list": (7, "batches is a int"),
    "a generator": (iter([[0]]), "batches is a list_iterator"),
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_orders_that_cannot_be_used(what: str) -> None:
    batches, words = BAD_BATCHES[what]
    with pytest.raises(ms.DataError, match=words):
        recipe(points(), batches=batches, batch_size=None, epochs=None)


def test_an_order_covers_every_example_once_an_epoch() -> None:
    described = recipe(points(), batch_size=3, epochs=2)
    steps = [b.tolist() for b in described.order.batches]
    assert [len(b) for b in steps] == [3, 3, 2] * 2
    for epoch in (steps[:3], steps[3:]):
        assert sorted(i for step in epoch for i in step) == list(range(N))
    assert steps[:3] != steps[3:]
    dropped = recipe(points(), batch_size=3, epochs=2, drop_last=True)
    assert [len(b) for b in dropped.order.batches] == [3, 3] * 2
    other = recipe(points(), batch_size=3, epochs=2, seed=3)
    assert [b.tolist() for b in other.order.batches] != steps


# Microbatches.


def test_microbatches_cut_everything_that_counts_examples() -> None:
    batch = {"x": torch.arange(6), "pair": (torch.arange(12).view(6, 2), list("abcdef")), "k": 2}
    part = slice_batch(batch, 2, 4, 6)
    assert part["x"].tolist() == [2, 3]
    assert part["pair"][0].tolist() == [[4, 5], [6, 7]]
    assert part["pair"][1] == ["c", "d"]
    assert part["k"] == 2


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (torch.zeros(5), r"a tensor of shape \(5,\)"),
        (torch.tensor(1.0), r"a tensor of shape \(\)"),
        (["a", "b"], "a list"),
        (object(), "a object"),
    ],
    ids=["tensor", "scalar", "list", "object"],
)
def test_microbatches_refuse_what_cannot_be_cut(extra: Any, words: str) -> None:
    with pytest.raises(ms.DataError, match=f"a batch of 4 examples holds {words}"):
        slice_batch({"x": torch.zeros(4), "extra": extra}, 0, 2, 4)


def test_microbatches_may_be_collated_one_by_one() -> None:
    """Two texts are padded to their own longest, as a DataLoader under accumulation pads them."""
    lengths: list[int] = []

    def collate(items: list[Any]) -> ms.Microbatches:
        pairs = [items[i : i + 2] for i in range(0, len(items), 2)]
        return ms.Microbatches(torch.nn.utils.rnn.pad_sequence(p, True) for p in pairs)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        lengths.append(batch.shape[1])
        return (model(batch.mean(1, keepdim=True)) ** 2).sum(1)

    texts = [torch.ones(n) for n in (2, 4, 3, 1, 5)]
    described = ms.Recipe(
        nn.Linear(1, 1), loss, texts, ms.SGD(lr=0.1), collate, batches=[range(5), [3, 0]],
        microbatch=2,
    )  # fmt: skip
    ms.train(described)
    assert lengths[-4:] == [4, 3, 5, 2]


def test_microbatches_of_another_size_are_refused() -> None:
    described = ms.Recipe(
        nn.Linear(1, 1), lambda model, x: model(x)[:, 0], [torch.ones(1)] * 5, ms.SGD(lr=0.1),
        lambda items: ms.Microbatches([torch.stack(items)]), batches=[range(5)], microbatch=2,
    )  # fmt: skip
    with pytest.raises(ms.DataError, match="made 1 microbatches of a step of 5 examples"):
        ms.train(described)


def test_facts_of_queries_leave_the_generators_alone() -> None:
    queries = ms.Queries([torch.zeros(1)] * 2, lambda model, x: model(x)[:, 0], collate=torch.stack)
    before = torch.get_rng_state()
    queries.facts()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "changed", [{"t": torch.ones(2)}, {"t": np.ones(2)}, {"t": ["a", "c"]}, {"t": [0, 2.0]}]
)
def test_a_digest_sees_tensors_arrays_and_text(changed: dict[str, Any]) -> None:
    (value,) = changed.values()
    same = {"t": value.copy() if isinstance(value, np.ndarray | list) else value.clone()}
    assert batch_digest(changed) == batch_digest(same)
    value[1] = "b" if value[1] == "c" else 7
    assert batch_digest(changed) != batch_digest(same)


def test_generators_are_put_back_while_items_are_read_ahead() -> None:
    """A step fails while the next batch is still being read: that read must not outlive it."""

    def slowly(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return noisy(x)

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        return squared(model, batch) * (float("nan") if step == 1 else 1.0)

    described = recipe(Items(slowly), loss=loss)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ms.NumericalError):
        ms.train(described)
    time.sleep(0.2)
    assert torch.equal(torch.get_rng_state(), before)
