"""What would unlearning a set of examples do? Predict it for every query, and check by retraining.

Somebody asks for their data to be taken out. Here the data are digits, and each request is a set of
images: a few, a twentieth of all, and all images of one class. A prediction is a sum over columns
of the influence matrix. It is first order: good for small sets, and for large ones the check shows
how far to trust it.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import metasketch as ms

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16), torch.tensor(labels)
n = 500

torch.manual_seed(0)
recipe = ms.Recipe(
    model=nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)).double(),
    loss=ms.losses.cross_entropy,
    data=(x[:n], y[:n]),
    optimizer=ms.SGD(lr=0.1, momentum=0.85),
    schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
    batch_size=50,
    epochs=8,
)
run = ms.train(recipe)
queries = ms.Queries((x[n : n + 40], y[n : n + 40]), ms.measures.margin)
influence = ms.attribute(run, queries, method="exact")

draws = torch.Generator().manual_seed(0)
requests = {
    "5 random images": torch.randperm(n, generator=draws)[:5],
    "25 random images": torch.randperm(n, generator=draws)[:25],
    "25 images of a 3": (y[:n] == 3).nonzero()[:25, 0],
    "all images of a 3": (y[:n] == 3).nonzero()[:, 0],
}
print(f"{'removed':20}{'predicted':>11}{'true':>9}{'correlation':>13}    (margins of 40 queries)")
for name, removed in requests.items():
    predicted = torch.tensor(influence.predict_removal(removed))
    w = torch.ones(n).index_fill(0, removed, 0.0)
    true = queries.values(ms.train(recipe, weights=w)) - queries.values(run)
    agreement = torch.corrcoef(torch.stack([predicted, true]))[0, 1]
    print(f"{name:20}{predicted.mean():+11.3f}{true.mean():+9.3f}{agreement:13.3f}")
