"""Problems on real data on which methods are compared: each a recipe and its queries, by seed.

    hard    digits, an MLP that interpolates them: row norms of Y span 5 or more orders of size,
            nearly all of the energy is in a quarter of the rows (the geometry of the paper)
    easy    the same MLP, trained briefly: row norms within two orders of magnitude
    cnn     digits, a small CNN with BatchNorm, measured in eval mode
    cifar   1,000 CIFAR-10 images (16x16), a CNN with BatchNorm
    language  a character model of fairy tales, pretrained and then fine-tuned with AdamW

The queries are test images that training never saw, or next characters of chunks that it never saw;
what is measured is their cross-entropy loss.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import metasketch as ms
from benchmarks.registry_data import cache, cifar10, tales

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


def small_images(seed: int, n: int, k: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """n training images and k others of CIFAR-10, at 16x16 and standardised, in random order."""
    x, y = cifar10(6000)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[: n + k]
    x, y = F.avg_pool2d(x[order], 2), y[order]
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    return (x[:n], y[:n]), (x[n:], y[n:])


def cifar(seed: int = 0, n: int = NUM_EXAMPLES, k: int = 100) -> tuple[ms.Recipe, ms.Queries]:
    """Test accuracy about 0.4 from 1,000 images."""
    train, test = small_images(seed, n, k)
    torch.manual_seed(seed)
    channels, layers = 3, list[nn.Module]()
    for out in (8, 12, 16):
        conv = nn.Conv2d(channels, out, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(out), nn.GELU(), nn.AvgPool2d(2)]
        channels = out
    recipe = ms.Recipe(
        model=nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels, 10)),
        loss=ms.losses.cross_entropy,
        data=train,
        optimizer=ms.SGD(lr=0.02, momentum=0.85, weight_decay=5e-4),
        schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
        batch_size=100,
        epochs=10,
        seed=seed,
    )
    return recipe, ms.Queries(test, ms.losses.cross_entropy)


LENGTH = 32
"""Characters of a chunk."""


class Decoder(nn.Module):
    """A pre-norm transformer of two blocks over characters."""

    def __init__(self, vocabulary: int, width: int = 48, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                (
                    *(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)),
                    *(
                        nn.LayerNorm(width),
                        nn.Linear(width, 4 * width),
                        nn.Linear(4 * width, width),
                    ),
                )
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for norm1, mix, out, norm2, up, down in self.blocks:  # type: ignore[misc]
            q, k, v = mix(norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(attended.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(norm2(x))))
        return self.head(self.norm(x))


def chunk_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the characters of each chunk, (batch,)."""
    logits = model(batch[:, :-1])
    losses = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
    return losses.mean(1)


def next_character(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy of the last character of each chunk, (batch,)."""
    return F.cross_entropy(model(batch[:, :-1])[:, -1], batch[:, -1], reduction="none")


def chunks() -> tuple[Tensor, int]:
    """The tales in chunks of LENGTH + 1 characters, one character shared with the next one, and
    the size of the vocabulary."""
    text = tales()
    characters = sorted(set(text))
    code = {c: i for i, c in enumerate(characters)}
    tokens = torch.tensor([code[c] for c in text])
    return tokens.unfold(0, LENGTH + 1, LENGTH), len(characters)


def pretrained(steps: int = 1500) -> Decoder:
    """The decoder after Adam on the first 60 % of the tales, the same for every seed."""
    every, vocabulary = chunks()
    torch.manual_seed(0)
    model = Decoder(vocabulary)
    kept = cache() / f"decoder-{LENGTH}-{steps}.safetensors"
    if kept.exists():
        model.load_state_dict(load_file(kept))
        return model
    ours = every[: int(0.6 * len(every))]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        chunk_loss(model, ours[torch.randint(len(ours), (64,))]).mean().backward()
        optimizer.step()
        schedule.step()
    save_file(model.state_dict(), kept)
    return model


def language(seed: int = 0, n: int = 512, k: int = 100) -> tuple[ms.Recipe, ms.Queries]:
    """64 steps from a pretrained state, as the paper fine-tunes; queries are one character each."""
    every, _ = chunks()
    left = every[int(0.6 * len(every)) :]
    order = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed))
    left = left[order]
    recipe = ms.Recipe(
        model=pretrained(),
        loss=chunk_loss,
        data=left[:n],
        optimizer=ms.AdamW(lr=3e-4, beta1=0.95, beta2=0.999, weight_decay=1e-5, eps_root=1e-10),
        schedule=ms.one_cycle(peak=0.25, start=1e-6, end=0.1),
        batch_size=16,
        epochs=2,
        seed=seed,
    )
    return recipe, ms.Queries(left[n : n + k], next_character)


PROBLEMS = {"hard": hard, "easy": easy, "cnn": batchnorm, "cifar": cifar, "language": language}
