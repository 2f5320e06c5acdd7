"""A model that interpolates its data: which method predicts what removals do?

    python examples/interpolating_digits.py            # minutes
    python examples/interpolating_digits.py --quick    # seconds, smaller

An MLP learns 1,000 digits by heart. 200 test images are the queries, each asked for its loss. The
budget is a fifth of the queries: 40 sweeps back through training, each with one forward. What the
methods predict for random removals of 1 % is compared with retraining without those examples: the
rank correlation, averaged over queries, is the linear datamodelling score (LDS).

The rows of the exact influence matrix differ by five orders of magnitude. MAGE reconstructs the few
large ones, and with them the matrix; SPELL serves every query alike, and predicts removals best.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import metasketch as ms

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()
n, k, epochs, subsets = (300, 80, 30, 40) if arguments.quick else (1000, 200, 50, 300)
budget = k // 5

# The data, in random order: n images to train on, k others to ask about.
torch.set_num_threads(1)  # such small matrices gain nothing from more
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(arguments.seed))
x = torch.tensor(images, dtype=torch.float32)[order]
y = torch.tensor(labels)[order]
x = (x - x.mean()) / x.std()

# A training run as a differentiable program of one weight for each example.
torch.manual_seed(arguments.seed)
recipe = ms.Recipe(
    model=nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10)),
    loss=ms.losses.cross_entropy,
    data=(x[:n], y[:n]),
    optimizer=ms.SGD(lr=0.05, momentum=0.85),
    schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
    batch_size=min(100, n // 3),
    epochs=epochs,
    seed=arguments.seed,
)
run = ms.train(recipe)
with torch.no_grad():
    right = (run.model()(x[:n]).argmax(1) == y[:n]).float().mean()
print(f"training accuracy {right:.3f}")

# The truth, in two senses: every row by a sweep of its own, and retraining without subsets.
queries = ms.Queries((x[n : n + k], y[n : n + k]), ms.losses.cross_entropy)
exact = ms.attribute(run, queries, "exact")
removals = ms.evaluate.removals(run, queries, fraction=0.01, num_subsets=subsets)
geometry = ms.evaluate.geometry(exact, queries.gradient_norms(run))
print(
    f"row norms span {geometry.orders_of_magnitude:.1f} orders of magnitude; "
    f"{geometry.top_quartile_share:.1%} of the energy is in a quarter of the rows"
)

print(f"\n{'B = ' + str(budget):24}{'LDS':>8}{'90 % interval':>20}{'relative error':>16}")


def show(name: str, influence: ms.Influence) -> None:
    score = ms.evaluate.lds_interval(influence, removals)
    error = ms.evaluate.relative_error(influence, exact)
    interval = f"{score.low:.3f} to {score.high:.3f}"
    print(f"{name:24}{score.mean:8.3f}{interval:>20}{error:16.3f}")


for method in ("spell", "mage", "pca", "random", "first"):
    show(method, ms.attribute(run, queries, method, budget))
show("oracle: spherical SVD", ms.evaluate.oracle(exact, budget, "spherical"))
show("oracle: SVD", ms.evaluate.oracle(exact, budget, "svd"))
show(f"exact, {k} sweeps", exact)
