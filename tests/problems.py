"""Tiny smooth problems in float64: models × optimisers × features of a training run."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metasketch as ms

NUM_EXAMPLES, NUM_QUERIES, CLASSES = 10, 3, 3


class MLP(nn.Module):
    """Two hidden layers of equal size, which can share their weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter, self.hidden, self.again = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.dropout, self.leave = nn.Dropout(dropout), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        h = self.dropout(torch.tanh(self.hidden(h)))
        return self.leave(torch.tanh(self.again(h)))

    def tie(self) -> None:
        self.again.weight = self.hidden.weight
        self.enter.bias.requires_grad_(False)


class CNN(nn.Module):
    """Convolutions with BatchNorm, GELU and average pooling."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.third = nn.Conv2d(3, 3, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=0.3)
        self.dropout, self.leave = nn.Dropout(dropout), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.norm1(self.first(x)))
        h = F.avg_pool2d(F.gelu(self.norm2(self.second(h))), 2)
        return self.leave(self.dropout(self.third(h)).mean((2, 3)))

    def tie(self) -> None:
        self.third.weight = self.second.weight
        self.first.weight.requires_grad_(False)


class GPT(nn.Module):
    """One pre-norm block of causal attention with an MLP; classifies by its last position."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(7, 4), nn.Parameter(torch.randn(4, 4) * 0.3)
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(4, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return self.head(x)[:, -1]

    def tie(self) -> None:
        self.head.weight = self.embed.weight
        self.place.requires_grad_(False)


class LSTM(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm, self.again = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.dropout, self.leave = nn.Dropout(dropout), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(x)[0][:, -1]
        h = self.dropout(torch.tanh(self.again(h)))
        return self.leave(torch.tanh(self.third(h)))

    def tie(self) -> None:
        self.third.weight = self.again.weight
        self.leave.bias.requires_grad_(False)


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": MLP, "cnn": CNN, "gpt": GPT, "lstm": LSTM}

OPTIMIZERS: dict[str, ms.SGD | ms.Adam | ms.Muon] = {
    "sgd": ms.SGD(lr=0.2),
    "nesterov": ms.SGD(lr=0.1, momentum=0.85, nesterov=True, weight_decay=0.02),
    "adam": ms.Adam(lr=0.02, eps_root=1e-3),
    "adamw": ms.AdamW(
        lr=0.02, eps_root=1e-3, weight_decay=0.1, groups=(ms.Group("*.bias", weight_decay=0.0),)
    ),
    "muon": ms.Muon(
        lr=0.02,
        weight_decay=0.1,
        adamw=ms.AdamW(lr=0.02, eps_root=1e-3, groups=(ms.Group("*.bias", weight_decay=0.0),)),
        adamw_names="embed.*",
        groups=(ms.Group("leave.*", lr=0.05, weight_decay=0.0),),
    ),
}


def inputs(model: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of the right shape, and labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    if model == "gpt":
        return torch.randint(7, (n, 4), generator=g), y
    shape = {"mlp": (5,), "cnn": (1, 4, 4), "lstm": (4, 5)}[model]
    return torch.randn(n, *shape, generator=g, dtype=torch.float64), y


def token_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """(sums, counts) with counts that differ between examples."""
    counts = 1 + batch[1]
    return counts * ms.losses.cross_entropy(model, batch), counts


def weighted_loss(model: nn.Module, batch: Any, weights: Tensor, step: int) -> Tensor:
    """A scalar that is not linear in the weights, and changes with the step."""
    losses = ms.losses.cross_entropy(model, batch)
    return (1 + 0.1 * step) * (weights * losses).sum() / (1 + weights.square().sum())


def augment(batch: Any, generator: torch.Generator) -> Any:
    x, y = batch
    if x.is_floating_point():
        return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype), y
    other = torch.randint(7, x.shape, generator=generator)
    return torch.where(torch.rand(x.shape, generator=generator) < 0.3, other, x), y


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip_norm": 0.4},
    "dropout": {},
    "augment": {"augment": augment},
    "microbatch": {"microbatch": 2},
    "frozen-tied": {},
    "sums-counts": {"loss": token_loss, "microbatch": 3},
    "scalar": {"loss": weighted_loss},
}


def recipe(model: str, optimizer: Any, feature: str, **changes: Any) -> ms.Recipe:
    """A run of six steps on ten examples, with a short last batch; the optimiser may be a name."""
    torch.manual_seed(len(model) + 7)
    net = MODELS[model](dropout=0.2 if feature == "dropout" else 0.0).double()
    if feature == "frozen-tied":
        net.tie()  # type: ignore[operator]
    options: dict[str, Any] = {
        "loss": ms.losses.cross_entropy,
        "optimizer": OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        "schedule": ms.one_cycle(peak=0.3, start=0.2, end=0.1),
        "batch_size": 4,
        "epochs": 2,
        "seed": 3,
        **FEATURES[feature],
        **changes,
    }
    return ms.Recipe(model=net, data=inputs(model, NUM_EXAMPLES, seed=1), **options)


def queries(model: str) -> ms.Queries:
    return ms.Queries(inputs(model, NUM_QUERIES, seed=2), ms.losses.cross_entropy)


def asked(num_examples: int, num_queries: int) -> tuple[ms.Run, ms.Queries]:
    """A finished run of an MLP with AdamW, and as many queries."""
    data = inputs("mlp", num_examples, seed=1)
    run = ms.train(with_options(recipe("mlp", "adamw", "plain"), data=data), implementation="loop")
    return run, ms.Queries(inputs("mlp", num_queries, seed=2), ms.losses.cross_entropy)


def with_options(recipe: ms.Recipe, **changes: Any) -> ms.Recipe:
    """The same recipe with some of its arguments changed."""
    return dataclasses.replace(recipe, **changes)


def grid() -> list[tuple[str, str, str]]:
    """(model, optimizer, feature): every pair of values of any two of them occurs."""
    names = ["sgd", "nesterov", "adam", "adamw"]
    pairs = [
        (model, names[(i + j + j // 4) % 4], feature)
        for i, model in enumerate(MODELS)
        for j, feature in enumerate(FEATURES)
    ]
    # Muon is costly, and unlike the others: with each model, and each feature that it could break.
    with_muon = {"mlp": "clip", "cnn": "microbatch", "gpt": "frozen-tied", "lstm": "sums-counts"}
    return pairs + [(model, "muon", feature) for model, feature in with_muon.items()]


def random_weights(n: int = NUM_EXAMPLES) -> Tensor:
    """Weights in [0.5, 1.5], with two zeros."""
    g = torch.Generator().manual_seed(5)
    w = 0.5 + torch.rand(n, generator=g, dtype=torch.float64)
    w[torch.tensor([1, n - 2])] = 0.0
    return w


def relative(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖, the largest over rows."""
    gaps = torch.linalg.vector_norm(a - b, dim=-1)
    sizes = torch.linalg.vector_norm(b, dim=-1)
    assert math.isfinite(float(sizes.sum()))
    assert float(sizes.min()) > 0
    return float((gaps / sizes).max())
