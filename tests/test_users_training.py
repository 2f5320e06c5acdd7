"""Trainings that users really have, each against finite differences of retraining, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metasketch as ms
from tests import hugging_face as hf
from tests import problems, test_batchnorm
from tests.test_finite_differences import difference

F64 = torch.float64

pytestmark = pytest.mark.filterwarnings(
    # transformers to itself, where peft looks at a property of a model
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def check(recipe: ms.Recipe, queries: ms.Queries, h: float = 1e-3) -> None:
    """Rows at weights of which two are zero, against retraining."""
    w = problems.random_weights(recipe.num_examples)
    run = ms.train(recipe, weights=w)
    rows = run.replay(queries.gradients(run))
    expected = difference(lambda v: queries.values(ms.train(recipe, weights=v)), w, h)
    assert problems.relative(rows, expected) < 1e-6


def language_model(model: nn.Module, **changes: Any) -> ms.Recipe:
    """Padded texts, of which only the completion counts; two padded microbatches a step."""
    options: dict[str, Any] = {
        "optimizer": ms.AdamW(lr=0.02, eps_root=1e-3, weight_decay=0.1),
        "schedule": ms.cosine(warmup=2),
        "clip_norm": 1.0,
        "microbatch": 2,
        **changes,
    }
    options.setdefault("loss", ms.losses.hf_causal_lm)
    options.setdefault("data", hf.texts(6))
    return ms.Recipe(model, collate=hf.padded, batch_size=4, epochs=2, **options)


@pytest.mark.parametrize("measure", [ms.measures.hf_completion_nll, ms.measures.hf_next_token_nll])
def test_a_llama_on_padded_completions(measure: Any) -> None:
    torch.manual_seed(0)
    recipe = language_model(hf.in_float64(hf.llama()))
    check(recipe, ms.Queries(hf.texts(9)[6:], measure, collate=hf.padded), h=3e-4)


def test_lora_on_a_llama() -> None:
    torch.manual_seed(0)
    model = hf.in_float64(hf.with_lora(hf.llama()))
    recipe = language_model(model)
    assert all("lora" in name for name in recipe.functional.layout.names)
    queries = ms.Queries(hf.texts(9)[6:], ms.measures.hf_completion_nll, collate=hf.padded)
    check(recipe, queries, h=3e-4)


def test_lora_with_dropout_under_muon() -> None:
    torch.manual_seed(0)
    model = hf.in_float64(hf.with_lora(hf.llama(), lora_dropout=0.2))
    recipe = language_model(model, optimizer=ms.Muon(lr=0.02, weight_decay=0.3))
    queries = ms.Queries(hf.texts(9)[6:], ms.measures.hf_completion_nll, collate=hf.padded)
    check(recipe, queries, h=2e-4)


@pytest.mark.parametrize("measure", [ms.measures.hf_margin, ms.measures.hf_cross_entropy])
def test_a_sequence_classifier(measure: Any) -> None:
    torch.manual_seed(0)
    recipe = language_model(
        hf.bert_classifier().double(), loss=ms.losses.hf_cross_entropy, data=hf.labelled_texts(6)
    )
    check(recipe, ms.Queries(hf.labelled_texts(9)[6:], measure, collate=hf.padded))


class Towers(nn.Module):
    """Two encoders whose outputs are to agree on pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Cosine similarities of all pairs, (batch, batch)."""
        return F.normalize(self.left(a), dim=1) @ F.normalize(self.right(b), dim=1).T


def contrastive(model: nn.Module, batch: Any, weights: Tensor) -> Tensor:
    """Each left picks its right among all rights of the batch; a removed pair stays a negative."""
    losses = F.cross_entropy(model(*batch) / 0.3, torch.arange(len(weights)), reduction="none")
    return (weights * losses).sum() / len(weights)


def pairs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, 4, generator=g, dtype=F64)
    return a, torch.cat([a[:, :2], torch.randn(n, 3, generator=g, dtype=F64)], dim=1)


def test_a_contrastive_loss() -> None:
    torch.manual_seed(0)
    optimizer = ms.SGD(lr=0.2, momentum=0.9)
    data = pairs(10, seed=1)
    recipe = ms.Recipe(Towers().double(), contrastive, data, optimizer, batch_size=4, epochs=2)
    similarity = ms.Queries(pairs(3, 2), lambda model, batch: model(*batch).diagonal())
    check(recipe, similarity)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, dim=1)
        z = mean
        if self.training:
            z = z + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(torch.tanh(z)), mean, log_var


def negative_elbo(model: nn.Module, batch: Tensor, step: int) -> Tensor:
    """Reconstruction, and a divergence from the prior that is annealed by the step."""
    output, mean, log_var = model(batch)
    reconstruction = 0.5 * (output - batch).square().sum(1)
    divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
    return reconstruction + min(1.0, step / 4) * divergence


def test_a_variational_autoencoder() -> None:
    torch.manual_seed(0)
    x = torch.randn(10, 6, dtype=F64)
    optimizer = ms.Adam(lr=0.02, eps_root=1e-3)
    recipe = ms.Recipe(VAE().double(), negative_elbo, x, optimizer, batch_size=4, epochs=2)
    check(recipe, ms.Queries(x[:3] + 0.1, lambda model, x: negative_elbo(model, x, step=4)))


def test_a_measurement_that_draws_is_refused() -> None:
    """Its value would depend on which queries are measured together."""
    x = torch.randn(10, 6, dtype=F64)
    optimizer = ms.SGD(lr=0.02)
    run = ms.train(ms.Recipe(VAE().double(), negative_elbo, x, optimizer, batch_size=5, epochs=1))
    noisy = ms.Queries(x[:3], lambda model, x: negative_elbo(model.train(), x, step=4))
    with pytest.raises(ms.ArgumentError, match="draws random numbers"):
        noisy.values(run)


@pytest.mark.parametrize("name", ["1d", "2d", "cumulative-twice"])
def test_batchnorm_under_accumulation(name: str) -> None:
    """Each microbatch normalises by itself and updates the statistics once, in sequence; queries in
    eval mode see where that ends. The last microbatch of each epoch is short."""
    recipe = test_batchnorm.recipe(name, batch_size=8, microbatch=3, drop_last=True)
    x, y = recipe.data
    check(recipe, ms.Queries((x[:3] + 0.1, y[:3]), ms.losses.cross_entropy))


def test_batchnorm_where_the_last_microbatch_is_one_image() -> None:
    """Of one image with transposed memory torch's own backward pass is wrong on the CPU."""
    recipe = test_batchnorm.recipe("2d", batch_size=7, microbatch=3, drop_last=True)
    x, y = recipe.data
    check(recipe, ms.Queries((x[:3] + 0.1, y[:3]), ms.losses.cross_entropy))


def test_a_class_weighted_loss_is_torchs() -> None:
    """(sums, counts) with the class's weight as the count: torch's weighted mean."""
    class_weights = torch.tensor([0.5, 1.0, 3.0], dtype=F64)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        own = class_weights[batch[1]]
        return own * ms.losses.cross_entropy(model, batch), own

    recipe = problems.recipe("mlp", "sgd", "plain", loss=loss, schedule=None, microbatch=2)
    trained = ms.train(recipe).state_dict()
    net = problems.recipe("mlp", "sgd", "plain").model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    criterion = nn.CrossEntropyLoss(weight=class_weights)
    for indices in recipe.order.batches:
        x, y = (d[indices] for d in recipe.data)
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
    for name, value in net.named_parameters():
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-12, atol=1e-12)
    check(recipe, problems.queries("mlp"))


def test_a_base_in_bfloat16_is_kept_once() -> None:
    """A recipe and its runs share the frozen base; only LoRA's own weights are a state."""
    torch.manual_seed(0)
    model = hf.with_lora(hf.llama().to(torch.bfloat16))
    recipe = language_model(model)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in frozen.values()} == {torch.bfloat16}
    shared = dict(recipe.functional.module.named_parameters())
    assert all(shared[name].data_ptr() == p.data_ptr() for name, p in frozen.items())
    run = ms.train(recipe)
    assert run.num_params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert run.final.params.dtype == torch.float32
    inside = dict(run.step.model.module.named_parameters())
    assert all(inside[name].data_ptr() == p.data_ptr() for name, p in frozen.items())
    queries = ms.Queries(hf.texts(9)[6:], ms.measures.hf_completion_nll, collate=hf.padded)
    rows = run.replay(queries.gradients(run))
    assert bool(torch.isfinite(rows).all())
    assert bool((rows != 0).any(1).all())
