"""A table of pandas with rare classes: class weights, and influence back in the table."""

import numpy as np
import pandas as pd
import torch
from torch import nn

import metasketch as ms

rng = np.random.default_rng(0)
table = pd.DataFrame({"age": rng.normal(50, 15, 240), "dose": rng.normal(10, 3, 240)})
table["site"] = rng.choice(["north", "south", "west"], 240)
table["ill"] = (table.age / 50 + table.dose / 10 + rng.normal(0, 0.3, 240) > 2.6).astype(int)

features = table[["age", "dose"]].apply(lambda column: (column - column.mean()) / column.std())
x = torch.tensor(features.to_numpy(), dtype=torch.float32)
y = torch.tensor(table.ill.to_numpy())
class_weights = torch.tensor(len(y) / np.bincount(y) / 2, dtype=torch.float32)


def loss(model, batch):
    """nn.CrossEntropyLoss(weight=...): a weighted mean, as sums and what they are divided by."""
    weight = class_weights[batch[1]]
    return weight * ms.losses.cross_entropy(model, batch), weight


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
recipe = ms.Recipe(net, loss, (x[:200], y[:200]), ms.SGD(lr=0.3), batch_size=40, epochs=5)
run = ms.train(recipe)
influence = ms.attribute(run, ms.Queries((x[200:], y[200:]), ms.measures.margin), method="exact")
scored = table[:200].assign(influence=influence.dense().mean(axis=0))
print(scored.sort_values("influence").head(3))
print(scored.groupby("site").influence.sum())
