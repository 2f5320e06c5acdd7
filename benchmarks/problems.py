"""Problems on real data on which methods are compared: each a recipe and its queries, by seed.

    hard    digits, an MLP that interpolates them: the row norms of Y span 5 orders of magnitude,
            nearly all of the energy is in a quarter of the rows (the geometry of the paper)
    easy    the same MLP, trained briefly: row norms within two orders of magnitude
    cnn     digits, a small CNN with BatchNorm, measured in eval mode

The queries are test images that training never saw; what is measured is their cross-entropy loss.
"""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import metasketch as ms

NUM_EXAMPLES, NUM_QUERIES = 1000, 400


def digits(seed: int, n: int, k: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """n training images and k others of scikit-learn's digits, standardised, in random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[: n + k]
    x, y = torch.tensor(images, dtype=torch.float32)[order], torch.tensor(labels)[order]
    x = (x - x.mean()) / x.std()
    return (x[:n], y[:n]), (x[n:], y[n:])


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))


def cnn(width: int) -> nn.Module:
    """Normalisation before the nonlinearity, GELU and average pooling: smooth in its data."""

    def block(channels: int, out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(out), nn.GELU(), nn.AvgPool2d(2)]

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *block(1, width),
        *block(width, 2 * width),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def _classifier(
    net: Callable[[], nn.Module], lr: float, epochs: int, seed: int, n: int, k: int
) -> tuple[ms.Recipe, ms.Queries]:
    train, test = digits(seed, n, k)
    torch.manual_seed(seed)
    recipe = ms.Recipe(
        model=net(),
        loss=ms.losses.cross_entropy,
        data=train,
        optimizer=ms.SGD(lr=lr, momentum=0.85),
        schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
        batch_size=100,
        epochs=epochs,
        seed=seed,
    )
    return recipe, ms.Queries(test, ms.losses.cross_entropy)


def hard(
    seed: int = 0, n: int = NUM_EXAMPLES, k: int = NUM_QUERIES
) -> tuple[ms.Recipe, ms.Queries]:
    """Training accuracy 0.99 to 1.00."""
    return _classifier(lambda: mlp(48), 0.05, 50, seed, n, k)


def easy(
    seed: int = 0, n: int = NUM_EXAMPLES, k: int = NUM_QUERIES
) -> tuple[ms.Recipe, ms.Queries]:
    return _classifier(lambda: mlp(48), 0.02, 8, seed, n, k)


def batchnorm(
    seed: int = 0, n: int = NUM_EXAMPLES, k: int = NUM_QUERIES
) -> tuple[ms.Recipe, ms.Queries]:
    return _classifier(lambda: cnn(8), 0.02, 10, seed, n, k)


PROBLEMS = {"hard": hard, "easy": easy, "cnn": batchnorm}
