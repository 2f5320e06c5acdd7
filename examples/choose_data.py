"""Choose training data for a target task: keep what helps it, and check on images it never saw.

The pool holds all digits, some of them badly labelled. The task is to tell 3, 5, 8 and 9 apart.
Influence on a small validation set of the task ranks the pool. A model is then trained on the best
half of it, on a random half, on what is labelled as one of the four, and on what of that is
helpful; it is tested on further images of the task.
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
pool = y[:n].clone()
noisy = rng.choice(n, 120, replace=False)
pool[noisy] = torch.tensor(rng.integers(0, 10, 120))

classes = torch.tensor([3, 5, 8, 9])
task = torch.isin(y, classes).nonzero()[:, 0]
task = task[task >= n]
validation, test = task[:100], task[100:400]

torch.manual_seed(0)
recipe = ms.Recipe(
    model=nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)).double(),
    loss=ms.losses.cross_entropy,
    data=(x[:n], pool),
    optimizer=ms.SGD(lr=0.1, momentum=0.85),
    schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
    batch_size=50,
    epochs=10,
)
run = ms.train(recipe)
queries = ms.Queries((x[validation], y[validation]), ms.losses.cross_entropy)
influence = ms.attribute(run, queries, method="exact")
harm = torch.tensor(influence.harmfulness())
ranked = harm.argsort()  # from the most helpful on

choices = {
    "all of the pool": ranked,
    "best half": ranked[: n // 2],
    "random half": torch.tensor(rng.permutation(n)[: n // 2]),
    "labelled 3, 5, 8, 9": torch.isin(pool, classes).nonzero()[:, 0],
    "and of these helpful": (torch.isin(pool, classes) & (harm < 0)).nonzero()[:, 0],
}
held_out = ms.Queries((x[test], y[test]), ms.losses.cross_entropy)
print(f"tested on {len(test)} further images of the task")
print(f"{'trained on':20}{'images':>7}{'test loss':>11}{'accuracy':>10}")
for name, kept in choices.items():
    # A recipe of the chosen examples alone: their own batches, and as many epochs.
    chosen = ms.train(
        ms.Recipe(
            model=recipe.model,
            loss=recipe.loss,
            data=(x[kept], pool[kept]),
            optimizer=recipe.optimizer,
            schedule=recipe.schedule,
            batch_size=50,
            epochs=10,
        )
    )
    with torch.no_grad():
        right = (chosen.model()(x[test]).argmax(1) == y[test]).double().mean()
    print(f"{name:20}{len(kept):7}{held_out.values(chosen).mean():11.3f}{right:10.3f}")
