"""Explain one wrong prediction: which training images caused it, and does it flip without them?

The query is the difference of two logits: that of the class that the model says, less that of the
right one. It is positive as long as the prediction is wrong. Images without which it would fall are
the ones to look at; they are then taken out, and the model is trained again.
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
with torch.no_grad():
    logits = run.model()(x[n:])
said = logits.argmax(1)
lead = logits.gather(1, said[:, None])[:, 0] - logits.gather(1, y[n:, None])[:, 0]
wrong = (said != y[n:]).nonzero()[:, 0]
q = int(wrong[lead[wrong].argsort()[len(wrong) // 4]])  # neither the clearest nor the closest
print(f"{len(wrong)} of {len(said)} test images are classified wrongly")
print(f"test image {q} is of class {int(y[n + q])}, and the model says {int(said[q])}")


def lead_of_the_wrong_class(model, batch):
    image, right, wrong = batch
    logits = model(image)
    return logits.gather(1, wrong[:, None])[:, 0] - logits.gather(1, right[:, None])[:, 0]


asked = (x[n + q : n + q + 1], y[n + q : n + q + 1], said[q : q + 1])
queries = ms.Queries(asked, lead_of_the_wrong_class, better="lower")
influence = ms.attribute(run, queries, method="exact")
print(f"the wrong class leads by {influence.outputs[0]:.3f}; removing an image changes that by")
for i, score in influence.top(0, n=5, kind="harmful"):
    print(f"  {-score:+.3f}  training image {i}, of class {int(y[i])}")

total, removed = float(influence.outputs[0]), []
for i, score in influence.top(0, n=n, kind="harmful"):
    removed.append(i)
    total -= score
    if total < 0:
        break
w = torch.ones(n).index_fill(0, torch.tensor(removed), 0.0)
after = queries.values(ms.train(recipe, weights=w))[0]
print(f"without the {len(removed)} most harmful the lead is predicted to be {total:+.3f}")
print(f"trained again without them, it is {after:+.3f}")
