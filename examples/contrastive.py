"""In-batch negatives: a loss that is no sum over examples, so it takes the weights itself."""

import torch
import torch.nn.functional as F
from torch import nn

import metasketch as ms


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(16, 8), nn.Linear(24, 8)

    def forward(self, text, image):
        """Similarities of every text with every image of the batch."""
        return F.normalize(self.text(text), dim=1) @ F.normalize(self.image(image), dim=1).T


def info_nce(model, batch, weights):
    """A removed pair no longer asks for its partner, and stays a negative for the others."""
    similarities = model(*batch) / 0.2
    losses = F.cross_entropy(similarities, torch.arange(len(weights)), reduction="none")
    return (weights * losses).sum() / len(weights)


torch.manual_seed(0)
meaning = torch.randn(120, 8)
text = meaning @ torch.randn(8, 16) + 0.1 * torch.randn(120, 16)
image = meaning @ torch.randn(8, 24) + 0.1 * torch.randn(120, 24)
optimizer = ms.SGD(lr=0.5, momentum=0.9)
recipe = ms.Recipe(
    Towers(), info_nce, (text[:100], image[:100]), optimizer, batch_size=20, epochs=4
)
run = ms.train(recipe)
queries = ms.Queries((text[100:103], image[100:103]), lambda model, batch: model(*batch).diagonal(),
                     better="higher")  # fmt: skip
influence = ms.attribute(run, queries, method="exact")
print("pairs that brought query 0 together:", influence.top(0, n=3, kind="helpful"))
