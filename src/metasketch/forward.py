"""Forward mode through a whole run: a block of directions in data space to tangents of the state.

    w_dot (b, N)  ->  J w_dot^T  =  (b, P)

One sweep, from the first step to the last, shared by the rows of the block. Cost, in steps of
training: r + 1 + 2b for each step, with r = 0 where every state is kept and 1 otherwise. Exact.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from metasketch.state import State
from metasketch.trajectory import Trajectory


def forward(trajectory: Trajectory, w_dot: Tensor, how: str) -> Generator[int, None, State]:
    """Tangents of the final state along each row of w_dot; yields after each step.

    Mirrors `metasketch.replay.replay`, line by line.
    """
    step, w = trajectory.step, trajectory.w
    order = step.recipe.order
    dot = step.initial().zeros(len(w_dot))
    g_dot = torch.empty_like(dot.params)
    for t, state, batch in trajectory.states():
        batch_dot = w_dot[:, order.batches[t].to(w.device)]
        dot = step.push(state, t, w, batch, dot, batch_dot, how, g_dot)
        yield t
    return dot
