"""The states of a run, in order and in reverse, recomputed where they were not kept.

Everything that is recomputed is compared with a digest taken in training, so a sweep either sees
the states that training saw, bit for bit, or stops.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from torch import Tensor

from metasketch.checkpoints import Plan
from metasketch.data import Batch, batch_digest
from metasketch.errors import MismatchError
from metasketch.state import State, digest
from metasketch.step import Step
from metasketch.store import RunStore


@dataclass
class Trajectory:
    """A run between its first and its last state.

    Attributes:
        step: the program.
        w: data weights, (N,).
        plan: which states stay, and where.
        store: the folder for those on disk.
        saved: states that the store keeps (also where memory keeps them).
        digests: of states 0 to T, as far as training has come.
        batch_digests: of batches that are made by code.
        memory: the states in memory.
        recomputed: steps taken again so far, over all sweeps.
    """

    step: Step
    w: Tensor
    plan: Plan
    store: RunStore | None = None
    saved: frozenset[int] = frozenset()
    digests: list[int] = field(default_factory=list)
    batch_digests: list[int] = field(default_factory=list)
    memory: dict[int, State] = field(default_factory=dict)
    recomputed: int = 0

    def record(self, state: State, start: int = 0) -> Generator[int, None, State]:
        """Train from the state before step ``start`` to the end; yields after each step."""
        in_memory = set(self.plan.kept) - self.plan.on_disk
        noted, spare = start, None
        if len(self.digests) == start:
            self.digests.append(digest(state))
        for t, batch in self.step.batches.along(iter(range(start, self.step.recipe.num_steps))):
            if t in in_memory:
                self.memory[t] = state
            if self.store is not None and t in self.saved and (t > start or t == 0):
                self.store.write_state(self.store.state_path(t), state, self._notes(noted, t))
                noted = t
            if self.step.batches.checked:
                self.batch_digests.append(batch_digest(batch))
            before, state = state, self.step.advance(state, t, self.w, batch, spare)
            # Fresh memory for every state would cost as much as the update itself.
            spare = before if t > start and t not in in_memory else None
            self.digests.append(digest(state))
            yield t
        if self.store is not None:
            end = self.step.recipe.num_steps
            self.store.write_state(self.store.final, state, self._notes(noted, end))
        return state

    def _notes(self, since: int, t: int) -> dict[str, object]:
        """Digests of states ``since`` to t, and of the batches between: what a resume needs."""
        return {
            "since": since,
            "digests": [f"{d:016x}" for d in self.digests[since : t + 1]],
            "batches": [f"{d:016x}" for d in self.batch_digests[since:t]],
        }

    def kept_states(self) -> list[int]:
        """Steps before which a state is at hand without recomputing it, in order."""
        return sorted({*self.memory, *(self.saved if self.store is not None else ())})

    def kept_state(self, t: int) -> State:
        """One of them, verified where it comes from disk."""
        return self._held(t)

    def _held(self, t: int) -> State:
        """A state that is kept, from memory or disk."""
        if t in self.memory:
            return self.memory[t]
        assert self.store is not None
        state, _ = self.store.read_state(self.store.state_path(t), self.w.device)
        self._verify(state, t)
        return state

    def _verify(self, state: State, t: int) -> None:
        if digest(state) != self.digests[t]:
            raise MismatchError(
                f"the state before step {t} came out differently than in training: something that "
                "changes rounding (library version, thread count, device), the data, or a loss "
                "that depends on hidden state. Train again in this setting, or go back to the "
                "setting of the training"
            )

    def verify_batch(self, batch: Batch, t: int) -> None:
        """Refuse a batch that is not the one that training saw."""
        if self.step.batches.checked and batch_digest(batch) != self.batch_digests[t]:
            raise MismatchError(
                f"the batch of step {t} is not what training saw: the Dataset, its collate "
                "function or augment must depend only on the generators that are seeded for them, "
                "not on the clock, on files that change, or on earlier calls"
            )

    def states(self) -> Iterator[tuple[int, State, Batch]]:
        """(t, state before step t, batch of step t) from the first step to the last."""
        self._fill()
        state = self._held(0)
        last = self.step.recipe.num_steps - 1
        for t, batch in self.step.batches.along(iter(range(last + 1))):
            self.verify_batch(batch, t)
            if t in self.memory:
                state = self.memory[t]
            yield t, state, batch
            if t < last and t + 1 not in self.memory:
                state = self._again(state, t, batch)

    def states_reversed(self) -> Iterator[tuple[int, State, Batch]]:
        """(t, state before step t, batch of step t) from the last step to the first."""
        self._fill()
        places: dict[int, State] = {}
        at: tuple[int, State] | None = None
        # Closed at once where a sweep fails, or the reader would go on drawing random numbers.
        with closing(self.step.batches.along(self._batches_reversed())) as batches:
            for action in self.plan.actions():
                if action.kind == "advance":
                    state = self._at(action.source, places)
                    for _ in range(action.source, action.state):
                        t, batch = next(batches)
                        self.verify_batch(batch, t)
                        state = self._again(state, t, batch)
                    at = (action.state, state)
                elif action.kind == "store":
                    assert at is not None
                    places[action.state] = at[1]
                elif action.kind == "release":
                    del places[action.state]
                else:
                    t, batch = next(batches)
                    self.verify_batch(batch, t)
                    if at is None or at[0] != t:
                        at = (t, self._at(t, places))
                    yield t, at[1], batch
                    at = None

    def _at(self, t: int, places: dict[int, State]) -> State:
        return places[t] if t in places else self._held(t)

    def _batches_reversed(self) -> Iterator[int]:
        """The steps whose batches a reverse sweep reads, in the order in which it does."""
        for action in self.plan.actions():
            if action.kind == "advance":
                yield from range(action.source, action.state)
            elif action.kind == "visit":
                yield action.state

    def _again(self, state: State, t: int, batch: Batch) -> State:
        state = self.step.advance(state, t, self.w, batch)
        self.recomputed += 1
        self._verify(state, t + 1)
        return state

    def _fill(self) -> None:
        """Recompute states that belong in memory and are not there: once, after a load."""
        missing = sorted(set(self.plan.kept) - self.plan.on_disk - set(self.memory))
        if not missing:
            return
        on_disk = {t for t in self.saved if t <= missing[-1]}
        first = max(t for t in on_disk if t <= missing[0])
        steps = iter(range(first, missing[-1] + 1))
        state: State | None = None
        for t, batch in self.step.batches.along(steps):
            if t in on_disk:
                state = self._held(t)
            assert state is not None
            if t in missing:
                self.memory[t] = state
            if t < missing[-1] and t + 1 not in on_disk:
                state = self._again(state, t, batch)

    def verify(self) -> Generator[int, None, None]:
        """Take every step again and compare each state with its digest; yields after each."""
        state = self._held(0)
        for t, batch in self.step.batches.along(iter(range(self.step.recipe.num_steps))):
            self.verify_batch(batch, t)
            state = self._again(state, t, batch)
            yield t

    def verify_first_step(self) -> None:
        """Take the first step again and compare: a changed loss function shows here."""
        batch = self.step.batches.load(0)
        self.verify_batch(batch, 0)
        if digest(self.step.advance(self._held(0), 0, self.w, batch)) != self.digests[1]:
            raise MismatchError(
                "the first step comes out differently than when the run was stored: the loss "
                "function or the code of the model is another one, or something that changes "
                "rounding is (library version, device). Give the code that was trained with, or "
                "train again into another folder"
            )
