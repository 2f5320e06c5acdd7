"""Reverse mode through a whole run: a block of cotangents of the final state to rows of influence.

    theta_bar (b, P)  ->  theta_bar^T J  =  (b, N)

One sweep, from the last step to the first, shared by the rows of the block. Cost, in steps of
training: r + 1 + 2b for each step, with r the recomputation of the run's plan. Exact.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from metasketch.state import State
from metasketch.trajectory import Trajectory


def replay(trajectory: Trajectory, bar: State, how: str) -> Generator[int, None, Tensor]:
    """Influence of every example on <bar, final state>, (b, N); yields after each step.

    ``bar`` is used up.

    Mirrors `metasketch.forward.forward`, line by line.
    """
    step, w = trajectory.step, trajectory.w
    order = step.recipe.order
    w_bar = bar.params.new_zeros(len(bar.params), len(w))
    g_bar = torch.empty_like(bar.params)
    for t, state, batch in trajectory.states_reversed():
        bar, batch_bar = step.pull(state, t, w, batch, bar, how, g_bar)
        w_bar.index_add_(1, order.batches[t].to(w.device), batch_bar)
        yield t
    return w_bar
