"""Law (a): rows of the influence matrix against finite differences of real retraining."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import metasketch as ms
from tests import problems

CENTRAL = {-2: 1 / 12, -1: -8 / 12, 1: 8 / 12, 2: -1 / 12}
ONE_SIDED = {0: -25 / 12, 1: 48 / 12, 2: -36 / 12, 3: 16 / 12, 4: -3 / 12}
"""Five-point stencils of the first derivative; the second for weights at zero."""


def difference(f: Callable[[Tensor], Tensor], w: Tensor, h: float) -> Tensor:
    """df/dw_i for every example, by retraining: (K, N)."""
    columns = []
    for i in range(len(w)):
        stencil = ONE_SIDED if w[i] == 0 else CENTRAL
        total = torch.zeros((), dtype=w.dtype)
        for offset, factor in stencil.items():
            shifted = w.clone()
            shifted[i] += offset * h
            total = total + factor / h * f(shifted)
        columns.append(total)
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("weighted", [False, True], ids=["ones", "weights"])
@pytest.mark.parametrize(("model", "optimizer", "feature"), problems.grid())
def test_rows_equal_finite_differences(
    model: str, optimizer: str, feature: str, weighted: bool
) -> None:
    recipe, queries = problems.recipe(model, optimizer, feature), problems.queries(model)
    n = problems.NUM_EXAMPLES
    w = problems.random_weights() if weighted else torch.ones(n, dtype=torch.float64)
    run = ms.train(recipe, weights=w, implementation="loop")
    rows = run.replay(queries.gradients(run))
    h = 3e-4 if optimizer == "muon" else 1e-3  # an orthogonalised gradient bends much more
    expected = difference(lambda v: queries.values(ms.train(recipe, weights=v)), w, h)
    assert problems.relative(rows, expected) < 1e-6
