"""Per-group influence: which source of data helps, and what would leaving it out do?

Ten people label images of digits. One of them mixes up 4 and 9, and one labels half of the images
at random. The influence of a person is the sum of the scores of the images that they labelled.
Training again without each of them checks the sums.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import metasketch as ms

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
rng = np.random.default_rng(0)
order = rng.permutation(len(labels))
x, y = torch.tensor(images[order] / 16), torch.tensor(labels[order])
n = 600
people = ["anna", "bo", "chen", "dora", "emil", "fay", "gus", "hana", "mixes", "random"]
labelled_by = rng.choice(people, n)
given = y[:n].clone()
mixes = torch.tensor(labelled_by == "mixes")
given[mixes & (y[:n] == 4)], given[mixes & (y[:n] == 9)] = 9, 4
careless = torch.tensor((labelled_by == "random") & (rng.random(n) < 0.5))
given[careless] = torch.tensor(rng.integers(0, 10, int(careless.sum())))

torch.manual_seed(0)
recipe = ms.Recipe(
    model=nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)).double(),
    loss=ms.losses.cross_entropy,
    data=(x[:n], given),
    optimizer=ms.SGD(lr=0.1, momentum=0.85),
    schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
    batch_size=50,
    epochs=10,
)
run = ms.train(recipe)
queries = ms.Queries((x[n : n + 100], y[n : n + 100]), ms.losses.cross_entropy)
influence = ms.attribute(run, queries, method="exact")
predicted = -influence.by_group(labelled_by).mean(0)  # removal is minus the sum of the scores
removals = ms.evaluate.removals(run, queries, groups=labelled_by)
true = removals.delta.mean(1)

print(f"{'without':9}{'images':>7}{'predicted':>11}{'true':>9}    (mean loss of 100 queries)")
for name, guess, truth in zip(removals.labels, predicted, true, strict=True):
    print(f"{name:9}{(labelled_by == name).sum():7}{guess:+11.3f}{truth:+9.3f}")
score = ms.evaluate.lds(influence, removals).mean()
print(f"rank correlation of predicted and true changes, mean over queries: {score:.2f}")
