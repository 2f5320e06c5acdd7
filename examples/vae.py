"""A variational autoencoder: two terms, replayed noise, a divergence annealed by the step."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import metasketch as ms


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 64))

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else 0.0
        return self.decode(mean + noise * (0.5 * log_var).exp()), mean, log_var


def negative_elbo(model, x, step=100):
    output, mean, log_var = model(x)
    reconstruction = (output - x).square().sum(1)
    divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
    return reconstruction + min(1.0, step / 20) * 0.1 * divergence


torch.manual_seed(0)
x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
recipe = ms.Recipe(
    VAE(), negative_elbo, x[:300], ms.Adam(lr=3e-3, eps_root=1e-8), batch_size=30, epochs=4
)
run = ms.train(recipe)
influence = ms.attribute(run, ms.Queries(x[300:304], negative_elbo), method="exact")
print("images that taught to draw query 0:", influence.top(0, n=3, kind="helpful"))
