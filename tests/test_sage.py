"""SAGE: its probes, its surrogates, their calibration, and the laws that its result obeys."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metasketch as ms
from metasketch import probes
from metasketch.attribution_store import Block, Folder
from metasketch.calibrate import calibrated, whitening
from metasketch.estimate import Augmented, Regression
from metasketch.example_gradients import ExampleGradients, adam_metric, exposure
from metasketch.measured import Measured, Replayed
from metasketch.metrics import relative_error
from metasketch.prior import CountSketch, checkpoints_of, cost, width_of_features
from metasketch.query_gradients import QueryGradients
from metasketch.surrogate import Stack, Surrogate, shapes_of
from tests import problems
from tests.test_attribute import K, N, Problem, problem, sized_loss

__all__ = ["problem"]  # the fixture

DTYPE = torch.float64


def made_up(seed: int = 0, k: int = 30, n: int = 120, p: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """V (k, p) with rows over four orders of size, Φ (n, p), and Y = S(1e-2) + V R / 3."""
    g = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(0, -2, p, dtype=DTYPE)
    Phi = torch.randn(n, p, generator=g, dtype=DTYPE) * spectrum
    V = torch.randn(k, p, generator=g, dtype=DTYPE) * spectrum
    V *= torch.logspace(0, -4, k, dtype=DTYPE)[:, None]
    S = surrogate(V, Phi).dense(1e-2)
    R = torch.randn(p, n, generator=g, dtype=DTYPE)
    R *= torch.linalg.vector_norm(S) / torch.linalg.vector_norm(V @ R) / 3
    return V, Phi, S + V @ R


def surrogate(V: Tensor, Phi: Tensor, weights: Tensor | None = None) -> Surrogate:
    w = torch.ones(len(Phi), dtype=DTYPE) if weights is None else weights
    sizes = torch.linalg.vector_norm(Phi, dim=1)
    return Surrogate.of(V @ Phi.T, Phi, w, torch.arange(len(Phi)), sizes)


def stack_of(*surrogates: Surrogate) -> Stack:
    n = surrogates[0].right.shape[1]
    shapes = shapes_of(surrogates[0].sizes, torch.ones(n, dtype=DTYPE))
    return Stack(surrogates, shapes, cost=0.1)


def matrix(Y: Tensor) -> Surrogate:
    """A surrogate of a given matrix: Y = -L (E + λ N μ)^-1 R with N μ = 0."""
    ones = torch.ones(Y.shape[1], dtype=DTYPE)
    return Surrogate(-Y, torch.eye(Y.shape[1], dtype=DTYPE), ones, ones, 0.0)


def estimated(V: Tensor, Y: Tensor, stack: Stack | None, a: int, start: int = 0) -> Tensor:
    """The estimate from a spherical probes, with surrogates or without."""
    G = V @ V.T
    Z = probes.spherical(G, start, start + a)
    replays = {0: Replayed(Z, Z.T @ Y, torch.ones(a, dtype=DTYPE))}
    surrogates = None if stack is None else lambda: stack
    known = Measured(len(V), Y.shape[1], lambda: G, replays, surrogates=surrogates)
    C, Q = (Regression() if stack is None else Augmented()).factors(known)
    return C @ Q


def correlation(A: Tensor, Y: Tensor) -> float:
    """Mean correlation of rows, which is the LDS relative to that of Y."""
    return float(np.mean([np.corrcoef(a, y)[0, 1] for a, y in zip(A, Y, strict=True)]))


def test_spherical_probes_are_leading_directions_of_unit_rows() -> None:
    V, _, _ = made_up()
    norms = torch.linalg.vector_norm(V, dim=1)
    left = torch.linalg.svd(V / norms[:, None]).U
    Z = probes.spherical(V @ V.T, 0, 7)
    cosines = ((norms[:, None] * Z) * left[:, :7]).sum(0).abs()
    torch.testing.assert_close(cosines, torch.ones(7, dtype=DTYPE))
    torch.testing.assert_close(probes.spherical(V @ V.T, 2, 5), Z[:, 2:5])
    rescaled = V * torch.logspace(3, -3, len(V), dtype=DTYPE)[:, None]
    again = torch.logspace(3, -3, len(V), dtype=DTYPE)[:, None]
    torch.testing.assert_close(probes.spherical(rescaled @ rescaled.T, 0, 7) * again, Z)
    V[3] = 0.0
    assert not probes.spherical(V @ V.T, 0, 7)[3].any()


def test_gram_regression_is_the_best_linear_prediction() -> None:
    """Ten lines of dense algebra; exact for Y = V^T J where probes span the rows of V."""
    V, _, Y = made_up()
    G, Z = V @ V.T, probes.gaussian(len(V), 0, 0, 6)
    known = Measured(len(V), Y.shape[1], lambda: G)
    known.replays[0] = Replayed(Z, Z.T @ Y, torch.ones(6, dtype=DTYPE))
    C, Q = Regression().factors(known)
    expected = G @ Z @ torch.linalg.solve(Z.T @ G @ Z, Z.T @ Y)
    assert relative_error_of(C @ Q, expected) < 1e-9
    low = torch.cat([V[:4], torch.randn(26, 4, dtype=DTYPE) @ V[:4]])
    Y_low = low @ torch.randn(V.shape[1], 50, dtype=DTYPE)
    assert relative_error_of(estimated(low, Y_low, None, 4), Y_low) < 1e-8


def relative_error_of(A: Tensor, Y: Tensor) -> float:
    return float(torch.linalg.vector_norm(A - Y) / torch.linalg.vector_norm(Y))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("n", "p"), [(40, 90), (90, 40)])
def test_a_surrogate_is_the_influence_function(n: int, p: int, zeros: bool) -> None:
    """By kernel and by covariance, at any weights, against one dense solve."""
    V, Phi, _ = made_up(n=n, p=p)
    w = torch.linspace(0.5, 1.5, n, dtype=DTYPE)
    if zeros:
        Phi[:, p // 2 :] = 0.0
        w[:2] = 0.0
        w[2:4], Phi[2:4] = 1.0, Phi[:2]  # what was left out lies in the span of the others
    mean = (w * Phi.square().sum(1)).sum()
    for damping in (1e-3, 1e-1):
        H = Phi.T @ (w[:, None] * Phi) + damping * mean * torch.eye(p, dtype=DTYPE)
        expected = -V @ torch.linalg.solve(H, Phi.T)
        assert relative_error_of(surrogate(V, Phi, w).dense(damping), expected) < 1e-6


def test_stacks_agree_with_their_members() -> None:
    V, Phi, _ = made_up()
    stack = stack_of(surrogate(V, Phi), surrogate(V, 2 * Phi.flip(1)))
    assert len(stack) == 2 * 4 * 3
    members = [
        c.dense(damping) * shape
        for c in stack.checkpoints
        for damping in stack.dampings
        for shape in stack.shapes
    ]
    beta, Z = torch.randn(24, dtype=DTYPE), probes.gaussian(len(V), 0, 0, 3)
    expected = sum(b * S for b, S in zip(beta, members, strict=True))
    torch.testing.assert_close(stack.combined(beta), expected)
    seen = torch.stack([Z.T @ S for S in members])
    torch.testing.assert_close(stack.seen_by(Z, slice(5, 17)), seen[:, :, 5:17])
    assert stack.plain.tolist() == [j % 3 == 0 for j in range(24)]


def test_whitening_makes_measurements_independent() -> None:
    V, _, _ = made_up()
    G, Z = V @ V.T, probes.gaussian(len(V), 0, 0, 6)
    Z[:, 3] *= 1e-6
    W = whitening(G, Z)
    torch.testing.assert_close(W @ Z.T @ G @ Z @ W.T, torch.eye(6, dtype=DTYPE), atol=1e-6, rtol=0)
    Z[:, 2] = 0.0
    assert whitening(G, Z).shape == (5, 6)
    assert not whitening(G, Z)[:, 2].any()


def test_a_surrogate_equal_to_Y_is_returned_exactly() -> None:
    """Among others that are useless, from two probes of thirty."""
    V, Phi, Y = made_up()
    stack = stack_of(surrogate(V, Phi), matrix(Y))
    assert relative_error_of(estimated(V, Y, stack, 2), Y) < 1e-6
    scaled = stack_of(matrix(-3.7 * Y))
    assert relative_error_of(estimated(V, Y, scaled, 3), Y) < 1e-9


@pytest.mark.parametrize("a", [1, 2, 5, 12])
def test_pure_noise_costs_nothing_to_speak_of(a: int) -> None:
    """At most 1 % of the correlation, however much noise there is to fit."""
    for seed in range(3):
        V, _, Y = made_up(seed)
        g = torch.Generator().manual_seed(100 + seed)
        noise = [matrix(V @ torch.randn(V.shape[1], Y.shape[1], generator=g).double())]
        noise += [matrix(torch.randn(Y.shape, generator=g).double())]
        alone = correlation(estimated(V, Y, None, a), Y)
        assert correlation(estimated(V, Y, stack_of(*noise), a), Y) > 0.99 * alone


def test_a_surrogate_is_used_where_it_helps() -> None:
    V, Phi, Y = made_up()
    stack = stack_of(surrogate(V, Phi))
    for a in (3, 8):
        alone, augmented = estimated(V, Y, None, a), estimated(V, Y, stack, a)
        assert relative_error_of(augmented, Y) < 0.7 * relative_error_of(alone, Y)
        assert correlation(augmented, Y) > correlation(alone, Y) + 0.1
        G, Z = V @ V.T, probes.spherical(V @ V.T, 0, a)
        found = calibrated(stack, G, Z, Z.T @ Y)
        assert not found.off
        assert found.errors["off"] == 1.0
        assert found.errors[found.chosen] == min(found.errors.values()) < 0.8


def test_rescaling_one_query_rescales_its_row_alone() -> None:
    V, Phi, Y = made_up()
    expected = estimated(V, Y, stack_of(surrogate(V, Phi)), 5)
    factor = torch.ones(len(V), 1, dtype=DTYPE)
    factor[7] = -300.0
    found = estimated(factor * V, factor * Y, stack_of(surrogate(factor * V, Phi)), 5)
    torch.testing.assert_close(found / factor, expected, rtol=1e-6, atol=0)


def test_calibration_reproduces_what_was_measured() -> None:
    V, Phi, Y = made_up()
    Z = probes.spherical(V @ V.T, 0, 5)
    found = estimated(V, Y, stack_of(surrogate(V, Phi)), 5)
    assert relative_error_of(Z.T @ found, Z.T @ Y) < 1e-9


def test_count_sketches_keep_inner_products() -> None:
    rows = torch.randn(6, 4000, dtype=DTYPE)
    sketch = CountSketch.of(4000, 2000, rows)
    gap = sketch(rows) @ sketch(rows).T - rows @ rows.T
    assert float(gap.abs().max()) < 4000 * 5 / 2000**0.5
    assert width_of_features(100, 50, 4, None) == 50
    assert width_of_features(100, 10**6, 4, 10**6) == 625


def gradients_by_hand(run: ms.Run) -> Tensor:
    """∇ℓ_i in eval mode, by torch alone."""
    model, rows = run.model(), []
    for i in range(run.num_examples):
        batch = run.recipe.examples.fetch(torch.tensor([i]), epoch=0)
        out = run.recipe.loss(model, batch)
        loss = (out[0] if isinstance(out, tuple) else out).sum()
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, [named[n] for n in run.step.model.layout.names])
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("model", problems.MODELS)
def test_gradients_of_examples(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where that works, one after the other elsewhere: the same as torch's own."""
    run = ms.train(problems.recipe(model, "adamw", "sums-counts"), progress=False)
    expected = gradients_by_hand(run)
    gradients = ExampleGradients(run, run.final, at_once=4)

    def every() -> Tensor:
        return torch.cat([rows for _, rows in gradients.blocks(torch.arange(10))])

    torch.testing.assert_close(every(), expected)
    monkeypatch.setattr(ExampleGradients, "_together", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        every()
    monkeypatch.setattr(ExampleGradients, "_agrees", lambda *_: False)
    torch.testing.assert_close(every(), expected)


def test_the_metric_is_adams() -> None:
    run = ms.train(problems.recipe("mlp", "adamw", "plain"), progress=False)
    metric = adam_metric(run, run.final)
    assert metric is not None
    step = 1 / (run.final.slots["exp_avg_sq"] + 1e-3).sqrt()
    torch.testing.assert_close(
        metric.square() / step, (1 / step.mean()).expand_as(step), rtol=1e-4, atol=0
    )
    plain = ms.train(problems.recipe("mlp", "sgd", "plain"), progress=False)
    assert adam_metric(plain, plain.final) is None


def test_exposure_sums_the_rates() -> None:
    recipe = problems.recipe("mlp", "sgd", "plain")
    run = ms.train(recipe, progress=False)
    expected = [
        sum(
            rate
            for rate, batch in zip(recipe.rates, recipe.order.batches, strict=True)
            if i in batch
        )
        for i in range(10)
    ]
    np.testing.assert_allclose(exposure(run), expected)


@pytest.mark.parametrize("objective", ["attribution", "reconstruction"])
def test_budgets_count_everything(problem: Problem, objective: str) -> None:
    """2B sweeps at most, the prior included; exact from the budget that measures every row."""
    for B in (1, 3, 7, 8):
        found = ms.attribute(problem.run, problem.queries, "sage", B, objective=objective)
        replays = min(2 * B - 1, K)
        assert found.sweeps["replay"] == replays
        assert found.sweeps["forward"] == 0
        assert sum(found.sweeps.values()) <= 2 * B
        assert found.sweeps["prior"] == (0 if replays == K else cost(problem.run, 1))
        assert (found.method, found.budget) == ("sage", B)
    assert relative_error(found, problem.Y) < 1e-6


def test_smaller_budgets_are_prefixes(problem: Problem, tmp_path: Path) -> None:
    """A store that is extended, or read with less, gives what a fresh call gives."""

    def attributed(B: int, store: Path | None) -> ms.Influence:
        return ms.attribute(problem.run, problem.queries, "sage", B, store=store)

    fresh = {B: attributed(B, None).dense() for B in (2, 5)}
    for B in (2, 5, 2):
        np.testing.assert_allclose(attributed(B, tmp_path / "s").dense(), fresh[B], rtol=1e-6)


def test_finished_work_is_not_done_again(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill before the prior, and with everything there."""
    expected = ms.attribute(problem.run, problem.queries, "sage", 3, store=tmp_path).dense()
    steps = [t for t, _ in checkpoints_of(problem.run)]
    for t in steps:
        assert isinstance(Folder(tmp_path).read(Block("prior", t)), Surrogate)
    monkeypatch.setattr(ms.Run, "_sweep", lambda *_: pytest.fail("a sweep was taken"))
    (tmp_path / "prior" / f"{steps[-1]:06d}.safetensors").unlink()
    again = ms.attribute(problem.run, problem.queries, "sage", 3, store=tmp_path).dense()
    np.testing.assert_allclose(again, expected, rtol=1e-9)
    monkeypatch.setattr(ExampleGradients, "blocks", lambda *_: pytest.fail("gradients were made"))
    again = ms.attribute(problem.run, problem.queries, "sage", 3, store=tmp_path).dense()
    np.testing.assert_array_equal(again, expected)


def test_little_memory_gives_a_projected_prior(problem: Problem) -> None:
    """Nothing is held whole, and what was measured stays exact."""
    memory = problem.run.num_params * N * 8 * 4 - 1
    V = QueryGradients(problem.queries.of(problem.run), memory)
    width = width_of_features(N, problem.run.num_params, 8, V.memory)
    assert width < problem.run.num_params
    found = ms.attribute(problem.run, problem.queries, "sage", 4, memory=memory)
    Z = probes.spherical(torch.from_numpy(problem.G), 0, 7).numpy()
    np.testing.assert_allclose(Z.T @ found.dense(), Z.T @ problem.Y, rtol=1e-6, atol=1e-9)


def test_the_prior_alone(problem: Problem) -> None:
    """Also of a run of which only the checkpoints are known; it says that nothing calibrated it."""
    with pytest.warns(ms.MetasketchWarning, match="nothing calibrated"):
        found = ms.attribute(problem.run, problem.queries, "prior")
    assert found.sweeps == {"replay": 0, "forward": 0, "prior": cost(problem.run, 1)}
    assert found.budget is None
    attached = ms.attach(problem.run.recipe, problem.run.state_dict())
    assert (
        dict(attached.model().named_parameters()).keys()
        == dict(problem.run.model().named_parameters()).keys()
    )
    with pytest.warns(ms.MetasketchWarning, match="nothing calibrated"):
        elsewhere = ms.attribute(attached, problem.queries, "prior")
    assert elsewhere.sweeps["prior"] == cost(problem.run, 1)
    named = problem.run.final
    by_hand = surrogate_by_hand(problem, metric=False)
    assert named.slots
    assert relative_error(elsewhere, by_hand) < 1e-6
    assert relative_error(found, surrogate_by_hand(problem, metric=True)) < 1e-6


def surrogate_by_hand(problem: Problem, metric: bool) -> Any:
    run = problem.run
    Phi = gradients_by_hand(run).numpy()
    V = problem.V[:, : run.num_params]
    if metric:
        scale = adam_metric(run, run.final)
        assert scale is not None
        Phi, V = Phi * scale.numpy(), V * scale.numpy()
    H = Phi.T @ Phi
    return -V @ np.linalg.solve(H + 1e-3 * np.trace(H) * np.eye(len(H)), Phi.T)


def test_attached_runs_refuse_sweeps_by_name(problem: Problem) -> None:
    run = problem.run
    attached = ms.attach(run.recipe, [run.state_dict(), run.state_dict()])
    with pytest.raises(ms.ArgumentError, match=r"attached.*method=\"prior\""):
        ms.attribute(attached, problem.queries, "spell", 2)
    with pytest.raises(ms.ArgumentError, match="attached"):
        attached.forward(torch.ones(1, N, dtype=DTYPE))
    named = run.state_dict()
    first = next(iter(named))
    with pytest.raises(ms.ArgumentError, match=f"has no '{first}'"):
        ms.attach(run.recipe, {n: t for n, t in named.items() if n != first})
    with pytest.raises(ms.ArgumentError, match="has shape"):
        ms.attach(run.recipe, {**named, first: torch.zeros(2)})
    with pytest.raises(ms.ArgumentError, match="NaN"):
        ms.attach(run.recipe, {**named, first: named[first] * torch.nan})
    with pytest.raises(ms.ArgumentError, match="states is empty"):
        ms.attach(run.recipe, [])


def test_losses_that_are_no_sums_have_no_prior() -> None:
    run = ms.train(problems.recipe("mlp", "sgd", "scalar"), progress=False)
    queries = problems.queries("mlp")
    with pytest.raises(ms.LossError, match="one scalar"):
        ms.attribute(run, queries, "prior")
    with pytest.warns(ms.MetasketchWarning, match="replays alone"):
        found = ms.attribute(run, queries, "sage", 1)
    assert found.sweeps == {"replay": 2, "forward": 0, "prior": 0}


def test_mistakes(problem: Problem) -> None:
    with pytest.raises(ms.ArgumentError, match="objective='both'"):
        ms.attribute(problem.run, problem.queries, "sage", 2, objective="both")
    with pytest.raises(ms.ArgumentError, match="takes no sweep"):
        ms.attribute(problem.run, problem.queries, "prior", 2)


def test_examples_never_seen_have_no_influence() -> None:
    """And those whose gradient is not finite are named."""
    recipe = problems.recipe(
        "mlp",
        "sgd",
        "plain",
        batches=[torch.arange(4), torch.arange(2, 8)],
        batch_size=None,
        epochs=None,
    )
    run = ms.train(recipe, progress=False)
    with pytest.warns(ms.MetasketchWarning, match="nothing calibrated"):
        found = ms.attribute(run, problems.queries("mlp"), "prior")
    assert not found.dense()[:, 8:].any()
    assert found.dense()[:, :8].all()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scale = torch.where(batch[1] >= 0, 1.0, 1.0)
        losses = ms.losses.cross_entropy(model, batch)
        return losses if model.training else losses / (batch[0][:, 0] * 0) * scale

    broken = ms.train(dataclasses.replace(recipe, loss=loss), progress=False)
    with pytest.raises(ms.NumericalError, match="gradient of training example 0"):
        ms.attribute(broken, problems.queries("mlp"), "prior")


assert sized_loss is not None
