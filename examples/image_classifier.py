"""A vision transformer of transformers on the digits of scikit-learn, with random shifts."""

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import metasketch as ms

digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
torch.manual_seed(0)
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
config = ViTConfig(image_size=8, patch_size=4, num_channels=1, intermediate_size=64, **size)


def shifted(batch, generator):
    """Replayed exactly: draws come from the generator of the step."""
    by = int(torch.randint(-1, 2, (), generator=generator))
    return {**batch, "pixel_values": batch["pixel_values"].roll(by, dims=-1)}


recipe = ms.Recipe(
    model=ViTForImageClassification(config),
    loss=ms.losses.hf_cross_entropy,
    data={"pixel_values": pixels[:300], "labels": labels[:300]},
    augment=shifted,
    optimizer=ms.AdamW(lr=2e-3, eps_root=1e-8),
    schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0),
    batch_size=30,
    epochs=2,
)
run = ms.train(recipe)
asked = {"pixel_values": pixels[300:304], "labels": labels[300:304]}
influence = ms.attribute(run, ms.Queries(asked, ms.measures.hf_margin), method="exact")
by_class = influence.by_group(digits.target[:300])
print("which digits teach the first query's digit:", by_class[0])
