"""Find mislabelled training data: which examples harm the test loss, and what if they go?

600 digits are trained on, 60 of them with a wrong label. One sweep back through training gives the
effect of every one of them on the mean loss of 300 test images: the mean is one combination of the
queries, so it costs one replay, not 300. The prediction is then checked by training once more.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import metasketch as ms

torch.set_num_threads(1)  # such small matrices gain nothing from more
images, labels = load_digits(return_X_y=True)
rng = np.random.default_rng(0)
order = rng.permutation(len(labels))
x = torch.tensor(images[order] / 16)  # float64, so that every machine prints the same
y = torch.tensor(labels[order])
n, planted = 600, 60

wrong = rng.choice(n, planted, replace=False)
spoiled = y.clone()
spoiled[wrong] = (y[wrong] + torch.tensor(rng.integers(1, 10, planted))) % 10

torch.manual_seed(0)
recipe = ms.Recipe(
    model=nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)).double(),
    loss=ms.losses.cross_entropy,
    data=(x[:n], spoiled[:n]),
    optimizer=ms.SGD(lr=0.1, momentum=0.85),
    schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
    batch_size=50,
    epochs=10,
)
queries = ms.Queries((x[n : n + 300], y[n : n + 300]), ms.losses.cross_entropy)
run = ms.train(recipe)

mean_gradient = {name: v.mean(0, keepdim=True) for name, v in queries.gradients(run).items()}
mean_loss = ms.Influence.from_dense(run.replay(mean_gradient))  # (1, 600)
worst = [i for i, _ in mean_loss.top(0, n=planted, kind="harmful")]
found = len(set(worst) & set(wrong.tolist()))
print(f"of the {planted} most harmful examples {found} are mislabelled; {planted} were planted")

w = torch.ones(n).index_fill(0, torch.tensor(worst), 0.0)
without = ms.train(recipe, weights=w)
change = (queries.values(without) - queries.values(run)).mean()
print(f"mean test loss with all examples     {queries.values(run).mean():.3f}")
print(f"predicted change without those {planted}    {mean_loss.predict_removal(worst)[0]:+.3f}")
print(f"true change, after training again    {change:+.3f}")
