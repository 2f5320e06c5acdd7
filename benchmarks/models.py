"""Three problems of about a million parameters, each with a bare torch loop to measure against.

The data is random: speed depends on shapes, not on values. The bare loop is the same training
(model, batches, hyperparameters) as torch users write it, without metasketch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metasketch as ms


@dataclass(frozen=True)
class Problem:
    """A training problem, once for metasketch and once for bare torch.

    Attributes:
        model: makes the module.
        data: makes the training data, a tensor or a pair of them.
        batch_size: m.
        steps: T of a sweep that takes some seconds.
        loss: per example, for metasketch.
        mean_loss: its mean over a batch, for the bare loop.
        optimizer: for metasketch.
        torch_optimizer: makes the same one, for the bare loop.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    batch_size: int
    steps: int
    loss: Callable[..., Any]
    mean_loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Any
    torch_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

    def recipe(self, num_steps: int) -> ms.Recipe:
        """The training as a recipe."""
        model, data, batches = self._parts(num_steps)
        return ms.Recipe(
            model=model, loss=self.loss, data=data, optimizer=self.optimizer, batches=batches
        )

    def bare(self, num_steps: int, clock: Callable[[], float]) -> tuple[float, nn.Module]:
        """Train in bare torch; seconds for one step, and the trained model."""
        model, data, batches = self._parts(num_steps)
        model.train()
        optimizer = self.torch_optimizer(model.parameters())
        start = clock()
        for indices in batches:
            if isinstance(data, tuple):
                batch = tuple(x[indices] for x in data)
            else:
                batch = data[indices]
            optimizer.zero_grad()
            self.mean_loss(model, batch).backward()
            optimizer.step()
        return (clock() - start) / num_steps, model

    def _parts(self, num_steps: int) -> tuple[nn.Module, Any, list[Tensor]]:
        """Model, data and order, the same at each call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, data = self.model(), self.data()
            n = len(data[0] if isinstance(data, tuple) else data)
            batches = [torch.randperm(n)[: self.batch_size] for _ in range(num_steps)]
        return model, data, batches


def mlp() -> nn.Module:
    """784-840-400-10, 1.00 M parameters."""
    return nn.Sequential(
        nn.Linear(784, 840), nn.GELU(), nn.Linear(840, 400), nn.GELU(), nn.Linear(400, 10)
    )


def conv(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.GELU(),
    )


class Residual(nn.Module):
    """x + conv(conv(x))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), conv(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def resnet9(width: int = 25, classes: int = 10) -> nn.Module:
    """ResNet-9 with BatchNorm, GELU and average pooling, for 32x32 images; 1.01 M parameters."""
    c = width
    return nn.Sequential(
        conv(3, c),
        conv(c, 2 * c),
        nn.AvgPool2d(2),
        Residual(2 * c),
        conv(2 * c, 4 * c),
        nn.AvgPool2d(2),
        conv(4 * c, 8 * c),
        nn.AvgPool2d(2),
        Residual(8 * c),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * c, classes),
    )


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        m, length, width = x.shape
        split = self.qkv(x).view(m, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(m, length, width))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens to logits; learned positions, and an embedding that is also the output layer."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.tokens(tokens) + self.positions(at))
        return F.linear(self.norm(x), self.tokens.weight)


VOCABULARY, LENGTH = 256, 64


def gpt() -> nn.Module:
    """1.03 M parameters."""
    return GPT(VOCABULARY, width=128, depth=5, heads=4, length=LENGTH)


def mean_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def mean_next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(
            "mlp",
            mlp,
            lambda: (torch.randn(1000, 784), torch.randint(10, (1000,))),
            batch_size=100,
            steps=8,
            loss=ms.losses.cross_entropy,
            mean_loss=mean_cross_entropy,
            optimizer=ms.SGD(lr=0.02, momentum=0.9),
            torch_optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        ),
        Problem(
            "resnet",
            resnet9,
            lambda: (torch.randn(256, 3, 32, 32), torch.randint(10, (256,))),
            batch_size=8,
            steps=4,
            loss=ms.losses.cross_entropy,
            mean_loss=mean_cross_entropy,
            optimizer=ms.SGD(lr=0.02, momentum=0.85, weight_decay=5e-4),
            torch_optimizer=lambda params: torch.optim.SGD(
                params, lr=0.02, momentum=0.85, weight_decay=5e-4
            ),
        ),
        Problem(
            "gpt",
            gpt,
            lambda: torch.randint(VOCABULARY, (256, LENGTH)),
            batch_size=8,
            steps=4,
            loss=ms.losses.causal_lm,
            mean_loss=mean_next_token,
            optimizer=ms.AdamW(lr=1e-3, weight_decay=0.1),
            torch_optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
        ),
    )
}
"""The problems by name."""
