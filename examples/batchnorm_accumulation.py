"""BatchNorm under gradient accumulation: each microbatch updates the running statistics once."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import metasketch as ms

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target)

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.GELU(), nn.AvgPool2d(2),
    nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.GELU(), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
recipe = ms.Recipe(
    model=net,
    loss=ms.losses.cross_entropy,
    data=(x[:240], y[:240]),
    optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.85, nesterov=True),
    schedule=ms.one_cycle(peak=0.4, start=0.1, end=0.0),
    batch_size=60,
    microbatch=20,  # three forward and backward passes a step
    epochs=2,
)
run = ms.train(recipe)
print("batches that the first norm has seen:", int(run.model()[1].num_batches_tracked))
queries = ms.Queries((x[240:242], y[240:242]), ms.measures.margin)
influence = ms.attribute(run, queries, method="exact")
removed = [i for i, _ in influence.top(0, n=10, kind="helpful")]
w = torch.ones(240).index_fill(0, torch.tensor(removed), 0.0)
change = queries.values(ms.train(recipe, weights=w)) - queries.values(run)
print("change of the margin of query 0 without its ten most helpful examples:")
print(f"predicted {influence.predict_removal(removed)[0]:+.4f}, retrained {change[0]:+.4f}")
