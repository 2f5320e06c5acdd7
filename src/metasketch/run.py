"""Train, keep what the sweeps need, and sweep."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metasketch import checkpoints, choose
from metasketch import memory as memory_module
from metasketch.environment import computing
from metasketch.errors import ArgumentError, MemoryBudgetError, StoreError
from metasketch.forward import forward
from metasketch.gradient import IMPLEMENTATIONS
from metasketch.memory import Budget, Sizes
from metasketch.probe import probe
from metasketch.progress import drive
from metasketch.recipe import Recipe, weights_of
from metasketch.replay import replay
from metasketch.state import State, checksum
from metasketch.step import Step
from metasketch.store import RunStore, differences
from metasketch.trajectory import Trajectory
from metasketch.version import __version__


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
        implementations: by mode and rows of a block, the implementation that was measured to be
            fastest, or named.
    """

    recipe: Recipe
    trajectory: Trajectory = field(repr=False)
    final: State = field(repr=False)
    budget: Budget
    sizes: Sizes
    num_threads: int
    implementation: str = "auto"
    implementations: dict[str, str] = field(default_factory=dict)
    timings: dict[str, choose.Timing] = field(default_factory=dict, repr=False)

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
        bars = self._cotangents(theta_bar)
        return self._sweep("replay", bars, block, progress)

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
        flat = self._sweep("forward", w_dot, block, progress)
        params, stats = flat.split([self.num_params, len(self.final.stats)], dim=1)
        named = self.step.model.layout.unpack(params)
        named |= self.step.model.stats_layout.unpack(stats)
        original = self.recipe.functional.layout
        for name, shape in zip(original.names, original.shapes, strict=True):
            if name not in named:  # a parameter that takes no part in the loss never moves
                named[name] = flat.new_zeros(len(flat), *shape)
        return named

    def _block_of(self, given: Tensor, what: str) -> Tensor:
        block = torch.as_tensor(given).detach().to(self.final.params)
        if not bool(torch.isfinite(block).all()):
            raise ArgumentError(f"{what} holds NaN or infinity")
        return block

    def _cotangents(self, theta_bar: Mapping[str, Tensor]) -> Tensor:
        """(b, P + R) from named cotangents."""
        if not theta_bar:
            raise ArgumentError("theta_bar is empty: name at least one parameter")
        b = len(next(iter(theta_bar.values())))
        rows = {n: self._block_of(t, f"theta_bar[{n!r}]") for n, t in theta_bar.items()}
        like = self.final.params
        params, used = self.step.model.layout.pack_block(rows, b, like, "theta_bar")
        stats, also = self.step.model.stats_layout.pack_block(rows, b, like, "theta_bar")
        constant = {n for n, _ in self.recipe.functional.module.named_parameters()}
        if unknown := sorted(set(rows) - used - also - constant):
            raise ArgumentError(
                f"theta_bar names {unknown}, which are not in the final state; it has the model's "
                f"parameters, and the running statistics {list(self.step.model.stats_layout.names)}"
            )
        return torch.cat([params, stats], dim=1)

    def _sweep(self, mode: str, rows: Tensor, block: int | None, progress: bool | None) -> Tensor:
        """Send a block of rows through a sweep, in as many sweeps as memory needs."""
        b = len(rows)
        if b == 0:
            raise ArgumentError("there are no rows to send through: b must be at least 1")
        size = block if block is not None else self.budget.block(self.sizes, self.plan, b)
        if size < 1:
            raise ArgumentError(f"block={block!r}: a block has at least one row")
        self.recipe.examples.check_unchanged()
        self.step.model.check_unchanged()
        results = []
        with self.computing():
            how = self._how(mode, min(size, b))
            for part in rows.split(size):
                title = f"{mode} of {len(part)} row{'s' * (len(part) > 1)}"
                if mode == "replay":
                    sweep = replay(self.trajectory, self._bar(part), how)
                    results.append(drive(sweep, self.num_steps, title, progress))
                else:
                    dots = forward(self.trajectory, part, how)
                    dot = drive(dots, self.num_steps, title, progress)
                    results.append(torch.cat([dot.params, dot.stats], dim=1))
        return torch.cat(results)

    def _bar(self, rows: Tensor) -> State:
        params, stats = rows.split([self.num_params, len(self.final.stats)], dim=1)
        zeros = self.final.zeros(len(rows))
        return State(params.clone(), stats.clone(), zeros.slots)

    def _how(self, mode: str, b: int) -> str:
        """The implementation for a block, measured once and then kept."""
        if self.implementation != "auto":
            return self.implementation
        key = f"{mode} b={min(b, 4)}"
        if key not in self.implementations:
            fitting = tuple(
                how
                for how in choose.names()
                if how in ("loop", "tuned")
                or self.budget.block(self.sizes, self.plan, b, vmapped=True) >= b
            )
            timing = choose.measure(self.step, self.weights, mode == "forward", b, fitting)
            self.timings[key] = timing
            self.implementations[key] = timing.fastest
            self._save_choices()
        return self.implementations[key]

    def _save_choices(self) -> None:
        store = self.trajectory.store
        if store is not None and store.record.exists():
            store.write_record({**store.read_record(), "implementations": self.implementations})

    def computing(self) -> Any:
        """The setting in which this run's numbers are made."""
        return _setting(self.recipe, self.num_threads)


def _setting(recipe: Recipe, num_threads: int) -> Any:
    recurrent = any(isinstance(m, nn.RNNBase) for m in recipe.functional.module.modules())
    return computing(recipe.device, num_threads, cudnn=not recurrent)


def train(
    recipe: Recipe,
    weights: Any = None,
    memory: int | float | str = "4GiB",
    store: str | os.PathLike[str] | None = None,
    disk: int | float | str | None = None,
    implementation: str = "auto",
    progress: bool | None = None,
) -> Run:
    """Train a recipe at given data weights, keeping what its sweeps will need.

    Args:
        weights: w, (N,), finite and not negative; ones by default. 0 removes an example: its loss
            no longer counts, everything else (order, batch sizes, dropout, BatchNorm) is as before.
        memory: budget for the states kept, and for the sweeps to come: a size such as ``"4GiB"``,
            or ``"20 states"``. Where not every state fits, some are recomputed in each sweep.
        store: a folder that keeps the run. The same call resumes an interrupted training there,
            and returns a finished one without training.
        disk: budget for the states in the store; by default about √T of them.
        implementation: of the second derivatives: "loop", "tuned", "batched", "forward"; "auto"
            measures which is fastest.
        progress: show a bar; by default on a terminal.

    Returns:
        The finished run. Cost: 1, in units of training; deterministic, bit for bit, on one
        machine with one number of threads.
    """
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"implementation={implementation!r}: choose one of {list(IMPLEMENTATIONS)} or 'auto'"
        )
    num_threads = torch.get_num_threads()
    budget = Budget.parse(memory)
    params, _, _ = recipe.functional.initial()
    w = weights_of(recipe, weights, params)
    if store is not None and RunStore(store).final.exists():
        run = load_run(recipe, store, memory=memory, weights=w)
        run.implementation = implementation
        return run
    with _setting(recipe, num_threads):
        first = probe(recipe, w)
        step = Step.of(recipe, first.used, first.fused)
        state = step.initial()
        sizes = _sizes(state, first.graph_bytes, recipe.num_examples)
        plan, saved = _plan(budget, sizes, recipe.num_steps, disk, store is not None)
        trajectory = Trajectory(
            step, w, plan, None if store is None else RunStore(store), frozenset(saved)
        )
        run = Run(recipe, trajectory, state, budget, sizes, num_threads, implementation)
        if trajectory.store is None:
            run.final = drive(trajectory.record(state), recipe.num_steps, "training", progress)
            return run
        with trajectory.store.locked():
            start, state = _begin(run, trajectory.store, sorted(saved))
            remaining = recipe.num_steps - start
            run.final = drive(trajectory.record(state, start), remaining, "training", progress)
    return run


def _sizes(state: State, graph_bytes: int, num_examples: int) -> Sizes:
    item = state.params.element_size()
    return Sizes(state.nbytes, state.params.numel() * item, graph_bytes, num_examples * item)


def _plan(
    budget: Budget, sizes: Sizes, num_steps: int, disk: int | float | str | None, stored: bool
) -> tuple[checkpoints.Plan, tuple[int, ...]]:
    """The plan of a run's sweeps, and the states that its store keeps."""
    places = budget.places(sizes, num_steps)
    if not stored:
        if disk is not None:
            raise MemoryBudgetError("disk=... needs a folder to write to: give store=... too")
        return checkpoints.plan(num_steps, places), ()
    on_disk = memory_module.disk_places(disk, sizes, num_steps)
    plan = checkpoints.plan(num_steps, places, on_disk)
    if plan.on_disk:
        return plan, tuple(sorted(plan.on_disk))
    return plan, checkpoints.evenly(num_steps, on_disk)


def _begin(run: Run, store: RunStore, saved: list[int]) -> tuple[int, State]:
    """Where training starts: at the beginning, or at the last state that a killed one left."""
    facts = _facts(run.recipe, run.weights)
    if store.record.exists():
        record = store.read_record()
        _check_same(store, record, facts)
        if record["num_threads"] == run.num_threads and record["saved"] == saved:
            start = _resume(run.trajectory, store)
            if start is not None:
                return start
    record = {
        "metasketch": __version__,
        "torch": torch.__version__,
        "facts": facts,
        "num_threads": run.num_threads,
        "used": list(run.step.model.layout.names),
        "fused": run.step.fused,
        "graph_bytes": run.sizes.graph,
        "saved": saved,
        "implementations": {},
    }
    store.write_record(record)
    return 0, run.step.initial()


def _resume(trajectory: Trajectory, store: RunStore) -> tuple[int, State] | None:
    """The last state from which training can go on, with the digests up to there."""
    found: tuple[int, State] | None = None
    for t in sorted(trajectory.saved):
        try:
            state, notes = store.read_state(store.state_path(t), trajectory.w.device)
        except StoreError:
            break
        if notes.get("since") != (0 if found is None else found[0]):
            break
        _note(trajectory, notes)
        in_memory = t in trajectory.plan.kept and t not in trajectory.plan.on_disk
        if in_memory:
            trajectory.memory[t] = state
        found = (t, state)
    return found


def _note(trajectory: Trajectory, notes: Mapping[str, Any]) -> None:
    """Append the digests that a stored state carries (its first one is known already)."""
    known = 1 if trajectory.digests else 0
    trajectory.digests += [int(d, 16) for d in notes["digests"][known:]]
    trajectory.batch_digests += [int(d, 16) for d in notes["batches"]]


def _facts(recipe: Recipe, w: Tensor) -> dict[str, Any]:
    return {**recipe.facts(), "weights": checksum(w)}


def _check_same(store: RunStore, record: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    differing = differences(record["facts"], facts)
    if differing:
        raise StoreError(
            f"the store {store.folder} holds another run; it differs in: {'; '.join(differing)}. "
            "Give another folder, or the recipe that was stored"
        )


def load_run(
    recipe: Recipe,
    store: str | os.PathLike[str],
    memory: int | float | str = "4GiB",
    weights: Any = None,
) -> Run:
    """A stored run, verified against the recipe.

    The recipe is compared fact by fact, the first step is taken again, and every state that a sweep
    recomputes is compared with its digest.

    Args:
        recipe: the recipe that was trained.
        store: the folder that `train` was given.
        memory: budget for the sweeps to come.
        weights: the data weights of the run; ones by default.
    """
    folder = RunStore(store)
    record = folder.read_record()
    params, _, _ = recipe.functional.initial()
    w = weights_of(recipe, weights, params)
    _check_same(folder, record, _facts(recipe, w))
    if not folder.final.exists():
        raise StoreError(
            f"the run in {Path(store)} is not finished: call train(recipe, store=...) to go on"
        )
    with _setting(recipe, record["num_threads"]):
        step = Step.of(recipe, record["used"], record["fused"])
        sizes = _sizes(step.initial(), record["graph_bytes"], recipe.num_examples)
        budget = Budget.parse(memory)
        saved = record["saved"]
        plan = _plan_for_stored(budget, sizes, recipe.num_steps, saved)
        trajectory = Trajectory(step, w, plan, folder, frozenset(saved))
        for t in saved:
            _, notes = folder.read_state(folder.state_path(t), w.device)
            _note(trajectory, notes)
        final, notes = folder.read_state(folder.final, w.device)
        _note(trajectory, notes)
        run = Run(recipe, trajectory, final, budget, sizes, record["num_threads"])
        run.implementations = dict(record["implementations"])
        trajectory.verify_first_step()
    return run


def _plan_for_stored(
    budget: Budget, sizes: Sizes, num_steps: int, saved: list[int]
) -> checkpoints.Plan:
    """The plan for states that are on disk already, with more of them in memory if they fit."""
    places = budget.places(sizes, num_steps)
    if places >= num_steps:
        return checkpoints.plan(num_steps, places)
    return checkpoints.Plan(num_steps, tuple(saved), frozenset(saved), places)
