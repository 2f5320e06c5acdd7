"""From a script with torch's optimiser, groups and scheduler to the influence of its data."""

import torch
from torch import nn

import metasketch as ms

torch.manual_seed(0)
x = torch.randn(200, 8)
y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 2))

# The usual lines of a training script ...
decayed = [p for p in net.parameters() if p.dim() > 1]
others = [p for p in net.parameters() if p.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

# ... are the recipe: nothing is trained in place, and nothing is described twice.
recipe = ms.Recipe(
    model=net,
    loss=ms.losses.cross_entropy,
    data=(x[:160], y[:160]),
    optimizer=optimizer,
    schedule=scheduler,
    batch_size=16,
    epochs=4,
)
run = ms.train(recipe)
queries = ms.Queries((x[160:165], y[160:165]), ms.measures.margin)
influence = ms.attribute(run, queries, method="exact")
print("most helpful examples for query 0:", influence.top(0, n=3, kind="helpful"))
