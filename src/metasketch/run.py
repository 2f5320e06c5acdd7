"""A finished run and its sweeps, in blocks."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metasketch import checkpoints, choose
from metasketch.environment import computing
from metasketch.errors import ArgumentError, ModelError, StoreError
from metasketch.forward import forward
from metasketch.gradient import VMAPPED
from metasketch.memory import Budget, Sizes, block_size
from metasketch.progress import drive
from metasketch.recipe import Recipe
from metasketch.replay import replay
from metasketch.state import State, checksum, digest
from metasketch.step import Step
from metasketch.trajectory import Trajectory
from metasketch.verdict import Verdict

Sweep = Callable[[slice, str], Generator[int, None, Tensor]]
"""Sends some rows through the run, with an implementation of the second derivatives."""


@dataclass
class Run:
    """A finished training run, ready to be differentiated through.

    Made by `train` and `load_run`.

    Attributes:
        recipe: what was trained.
        weights: the data weights w, (N,).
        plan: which states are kept; ``plan.factor`` is the recomputation of a reverse sweep.
        num_threads: threads that training used; sweeps use as many, since the number changes
            rounding.
        most_rows: rows of the largest block that a sweep takes.
        implementation: the one to use for second derivatives, or "auto".
        implementations: by mode and rows of a block, the one in use: measured to be fastest, or
            named.
        verdict: what the doctor found, where it was asked: see `metasketch.diagnose`.
        attached: only checkpoints are known (see `attach`): there is nothing to sweep through.
    """

    recipe: Recipe
    trajectory: Trajectory = field(repr=False)
    final: State = field(repr=False)
    budget: Budget
    sizes: Sizes
    num_threads: int
    most_rows: int
    implementation: str = "auto"
    implementations: dict[str, str] = field(default_factory=dict)
    timings: dict[str, choose.Timing] = field(default_factory=dict, repr=False)
    verdict: Verdict | None = None
    attached: bool = False

    @property
    def num_steps(self) -> int:
        """T."""
        return self.recipe.num_steps

    @property
    def num_examples(self) -> int:
        """N."""
        return self.recipe.num_examples

    @property
    def num_params(self) -> int:
        """P: parameters that take part in training."""
        return self.step.model.layout.size

    @property
    def weights(self) -> Tensor:
        return self.trajectory.w

    @property
    def plan(self) -> checkpoints.Plan:
        return self.trajectory.plan

    @property
    def step(self) -> Step:
        return self.trajectory.step

    def facts(self) -> dict[str, Any]:
        """What identifies the run: see `metasketch.Recipe.facts`."""
        return facts_of(self.recipe, self.weights)

    @property
    def final_digest(self) -> str:
        """What identifies the final state bit for bit, and the number of threads."""
        return f"{digest(self.final):016x} on {self.num_threads} threads"

    def model(self) -> nn.Module:
        """A fresh module with the trained weights, in eval mode."""
        return self.step.model.materialize(self.final.params, self.final.stats, self.final.counts)

    def state_dict(self) -> dict[str, Tensor]:
        """The final state by name: trained parameters and BatchNorm running statistics."""
        named = self.step.model.layout.unpack(self.final.params)
        named |= self.step.model.stats_layout.unpack(self.final.stats)
        return {name: tensor.clone() for name, tensor in named.items()}

    def replay(
        self,
        theta_bar: Mapping[str, Tensor],
        block: int | None = None,
        progress: bool | None = None,
    ) -> Tensor:
        """Reverse mode: influence of every training example on <theta_bar, final state>.

            theta_bar  ->  theta_bar^T J,    J = d(final state) / dw

        A positive entry means: more weight on that example raises the quantity whose gradient
        theta_bar is; removing it lowers it by about that much.

        Args:
            theta_bar: cotangents (b, *shape) by the names of parameters and running statistics;
                absent names are zero. Pass a query's gradient with respect to the statistics too
                if it was measured in eval mode.
            block: rows that share a sweep; by default as many as the memory budget holds.
            progress: show a bar; by default on a terminal.

        Returns:
            (b, N). Exact. Cost in training steps: T (r + 1 + 2b) for each block.
        """
        b, bar_of = self._cotangents(theta_bar)

        def sweep(rows: slice, how: str) -> Generator[int, None, Tensor]:
            return replay(self.trajectory, bar_of(rows), how)

        return self._sweep("replay", b, sweep, block, progress)

    def forward(
        self, w_dot: Tensor, block: int | None = None, progress: bool | None = None
    ) -> dict[str, Tensor]:
        """Forward mode: how the final state moves along directions in data-weight space.

            w_dot  ->  J w_dot^T,    J = d(final state) / dw

        Args:
            w_dot: directions (b, N).
            block: rows that share a sweep; by default as many as the memory budget holds.
            progress: show a bar; by default on a terminal.

        Returns:
            Tangents (b, *shape) by the names of parameters and running statistics. Exact. Cost in
            training steps: T (r + 1 + 2b) for each block, r at most 1.
        """
        w_dot = self._block_of(w_dot, "w_dot")
        if w_dot.dim() != 2 or w_dot.shape[1] != self.num_examples:
            raise ArgumentError(
                f"w_dot has shape {tuple(w_dot.shape)}; directions in data space are "
                f"(b, {self.num_examples})"
            )

        def sweep(rows: slice, how: str) -> Generator[int, None, Tensor]:
            dot = yield from forward(self.trajectory, w_dot[rows], how)
            return torch.cat([dot.params, dot.stats], dim=1)

        flat = self._sweep("forward", len(w_dot), sweep, block, progress)
        named = self.named(flat)
        original = self.recipe.functional.layout
        for name, shape in zip(original.names, original.shapes, strict=True):
            if name not in named:  # a parameter that takes no part in the loss never moves
                named[name] = flat.new_zeros(len(flat), *shape)
        return named

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Tangents or cotangents of the final state by name, (b, *shape), in the run's precision,
        from flat ones (b, P + R)."""
        block = flat.to(self.final.params)
        params, stats = block.split([self.num_params, len(self.final.stats)], dim=1)
        return self.step.model.layout.unpack(params) | self.step.model.stats_layout.unpack(stats)

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """The other way: (b, P + R) from the names of what takes part in training."""
        layouts = (self.step.model.layout, self.step.model.stats_layout)
        lead = (len(next(iter(named.values()))),)
        parts = [
            layout.pack([named[n] for n in layout.names], lead)
            for layout in layouts
            if layout.names
        ]
        return torch.cat(parts, dim=1)

    def _block_of(self, given: Tensor, what: str) -> Tensor:
        block = torch.as_tensor(given).detach().to(self.final.params)
        if not bool(torch.isfinite(block).all()):
            raise ArgumentError(f"{what} holds NaN or infinity")
        return block

    def _cotangents(self, theta_bar: Mapping[str, Tensor]) -> tuple[int, Callable[[slice], State]]:
        """Named cotangents, checked: how many, and what makes a block of some of them."""
        if not theta_bar:
            raise ArgumentError("theta_bar is empty: name at least one parameter")
        b = len(next(iter(theta_bar.values())))
        given = {n: self._block_of(t, f"theta_bar[{n!r}]") for n, t in theta_bar.items()}
        params, stats = self.step.model.layout, self.step.model.stats_layout
        known = {n for layout in (params, stats) for n in layout.check_block(given, b, "theta_bar")}
        constant = {n for n, _ in self.recipe.functional.module.named_parameters()}
        if unknown := sorted(set(given) - known - constant):
            raise ArgumentError(
                f"theta_bar names {unknown}, which are not in the final state; it has the model's "
                f"parameters, and the running statistics {list(stats.names)}"
            )

        def bar_of(rows: slice) -> State:
            part = {name: tensor[rows] for name, tensor in given.items()}
            theta = params.block(part, self.final.params)
            slots = {name: torch.zeros_like(theta) for name in self.final.slots}
            return State(theta, stats.block(part, self.final.params), slots)

        return b, bar_of

    def _sweep(
        self, mode: str, b: int, sweep: Sweep, block: int | None, progress: bool | None
    ) -> Tensor:
        """Send b rows through, in as many sweeps as memory needs."""
        if self.attached:
            raise ArgumentError(
                "this run was attached: only its checkpoints are known, so no sweep can go through "
                'it. Take method="prior", which needs none, or train here with ms.train'
            )
        if b == 0:
            raise ArgumentError("there are no rows to send through: b must be at least 1")
        size = block_size(b, self.most_rows) if block is None else block
        if size < 1:
            raise ArgumentError(f"block={block!r}: a block has at least one row")
        self.recipe.examples.check_unchanged()
        self.step.model.check_unchanged()
        results = []
        with self.computing():
            how = self.how(mode, min(size, b))
            for start in range(0, b, size):
                rows = slice(start, min(start + size, b))
                title = f"{mode} of {rows.stop - start} row{'s' * (rows.stop - start > 1)}"
                results.append(drive(sweep(rows, how), self.num_steps, title, progress))
        return results[0] if len(results) == 1 else torch.cat(results)

    def how(self, mode: str, b: int) -> str:
        """The implementation for a block, measured (or tried, where it is named) once."""
        key = f"{mode} b={min(b, choose.SAMPLE_ROWS)}"
        if key not in self.implementations:
            candidates: tuple[str, ...] = (self.implementation,)
            if self.implementation == "auto":
                rows = b if b < choose.SAMPLE_ROWS else self.most_rows
                roomy = self.budget.rows(self.sizes, self.plan, vmapped=True) >= rows
                candidates = tuple(h for h in choose.names() if roomy or h not in VMAPPED)
            timing = choose.measure(self.step, self.weights, mode == "forward", b, candidates)
            self.timings[key] = timing
            self.implementations[key] = timing.fastest
            self._save("implementations", self.implementations)
        return self.implementations[key]

    def settle(self, mode: str, rows: int) -> None:
        """Decide how blocks of this many rows are differentiated in a mode, if it is not decided.

        Cost: about 15 steps.
        """
        with self.computing():
            self.how(mode, rows)

    def judge(self, verdict: Verdict) -> None:
        """Carry what the doctor found, in the store too where there is one."""
        self.verdict = verdict
        self._save("verdict", verdict.facts())

    def _save(self, name: str, value: Any) -> None:
        store = self.trajectory.store
        if store is not None:
            with contextlib.suppress(StoreError):  # which is not worth a failed sweep
                store.write_record({**store.read_record(), name: value})

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """The setting in which this run's numbers are made."""
        return computing_as(self.recipe, self.num_threads)


def facts_of(recipe: Recipe, w: Tensor) -> dict[str, Any]:
    """What identifies a run of a recipe at data weights w, as a flat table."""
    return {**recipe.facts(), "weights": checksum(w)}


@contextlib.contextmanager
def computing_as(recipe: Recipe, num_threads: int) -> Iterator[None]:
    """The setting for a recipe; autocast around the call is refused."""
    kind = recipe.device.type
    if torch.is_autocast_enabled(kind) and not recipe.low_precision:
        raise ModelError(
            "autocast is on around the call: half-precision arithmetic loses the digits that "
            "derivatives through a whole training run need. Call outside of torch.autocast, or "
            "ask for it by name with Recipe(low_precision=True)"
        )
    recurrent = any(isinstance(m, nn.RNNBase) for m in recipe.functional.module.modules())
    with computing(recipe.device, num_threads, cudnn=not recurrent):
        yield
