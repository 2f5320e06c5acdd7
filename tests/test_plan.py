"""The cost model: what it counts is what a job then does; how long that takes is measured."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import metasketch as ms
from metasketch.gradient import VMAPPED
from metasketch.memory import MAX_ROWS, Budget
from metasketch.methods import make
from metasketch.plan import makespan, planned
from metasketch.query_gradients import QueryGradients
from metasketch.speeds import Speeds
from tests import problems

K, N = 16, 40


@pytest.fixture(scope="module")
def asked() -> tuple[ms.Run, ms.Queries]:
    return problems.asked(N, K)


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize(
    ("method", "B"), [("spell", 13), ("mage", 5), ("pca", 4), ("exact", None), ("sage", 4)]
)
def test_it_counts_what_the_job_then_does(
    asked: tuple[ms.Run, ms.Queries], method: str, B: int | None, block: int | None, tmp_path: Path
) -> None:
    """Blocks, sweeps and bytes on disk are those of the store that the job leaves."""
    run, queries = asked
    plan = ms.plan(run, queries, method, B, audit=5, block=block)
    found = ms.attribute(run, queries, method, B, tmp_path, audit=5, block=block)
    assert dict(plan.sweeps) == {k: v for k, v in found.sweeps.items() if k != "prior"}
    record = json.loads((tmp_path / "attribution.json").read_text())
    assert list(plan.blocks) == [stop - start for start, stop in record["rounds"]]
    stored = [t for path in tmp_path.rglob("*.safetensors") for t in load_file(path).values()]
    assert plan.disk == sum(t.numel() * t.element_size() for t in stored)
    assert plan.memory > plan.disk + run.plan.in_memory * run.sizes.state
    assert 0 < plan.seconds < 60
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert f"{found.sweeps['replay']} replay" in str(plan)


@pytest.mark.parametrize("memory", ["2 states", "5 states", "100 states"])
def test_steps_taken_again(memory: str) -> None:
    run = ms.train(problems.recipe("mlp", "sgd", "plain", epochs=4), memory=memory)
    before = run.trajectory.recomputed
    run.forward(torch.ones(1, problems.NUM_EXAMPLES))
    assert run.trajectory.recomputed - before == run.plan.recomputed_forward


def test_sizes_and_the_rows_of_a_block_agree(asked: tuple[ms.Run, ms.Queries]) -> None:
    """As many rows fit into a budget as its sweep takes bytes."""
    run, _ = asked
    for total, vmapped in itertools.product((300_000, 400_000), (False, True)):
        rows = Budget(total).rows(run.sizes, run.plan, vmapped)
        assert 0 < rows < MAX_ROWS
        assert run.sizes.sweep(rows, vmapped, run.plan) <= total
        assert run.sizes.sweep(rows + 1, vmapped, run.plan) > total


class Fixed(Speeds):
    """Speeds by hand: a sweep of b rows takes 10 + b seconds, a forward one half of that."""

    def sweep(self, mode: str, rows: int) -> float:
        return (10.0 + rows) * (1 if mode == "replay" else 0.5)

    def values(self) -> float:
        return 1.0

    def gradient(self) -> float:
        return 0.25

    def products(self, b: int) -> float:
        return 0.0

    def choosing(self, rule: Any, known: int, count: int) -> float:
        return 0.125


def fixed(asked: tuple[ms.Run, ms.Queries]) -> Fixed:
    run, queries = asked
    return Fixed(run, QueryGradients(queries.of(run)))


def test_seconds_by_hand(asked: tuple[ms.Run, ms.Queries]) -> None:
    """SPELL of 12: a warm-up of 10 in two blocks of 5, then two rounds; 16 gradients."""
    plan = planned(fixed(asked), make("spell"), 12, block=5)
    assert plan.blocks == (5, 5, 1, 1)
    replays = 2 * 15 + 2 * 11 + 4 * 0.125
    assert plan.parts == {
        "queries": 1 + 16 * 0.25,
        "prior": 0.0,
        "replays": replays,
        "forward passes": (2 * 15 + 2 * 11) / 2,
        "audit": 0.0,
    }
    assert plan.seconds == 5 + replays + 26
    exact = planned(fixed(asked), make("exact"), None, audit=4)
    assert exact.seconds == 5 + 26.125 + 7  # gradients are held: made once, and no Gram matrix


def test_workers_share_what_does_not_depend(asked: tuple[ms.Run, ms.Queries]) -> None:
    """Two replays go side by side, then their forward passes; SPELL's rounds go one by one."""
    one, two, three = (planned(fixed(asked), make("mage"), 6, w, block=3) for w in (1, 2, 3))
    assert one.seconds == 5 + 2 * (13.125 + 6.5)
    assert two.seconds == three.seconds == 5 + 13.125 + 6.5
    alone, shared = (planned(fixed(asked), make("spell", warmup=0), 6, w) for w in (1, 2))
    assert alone.seconds == shared.seconds
    assert "by 2 workers" in str(two)


def test_a_worker_waits_for_what_it_depends_on() -> None:
    """Forward passes of the second block need the first block's replays, which take long."""

    def seconds(block: Any) -> float:
        return 10.0 if (block.kind, block.number) == ("replay", 0) else 1.0

    assert makespan([(0, 1), (1, 2)], 2, True, seconds, 2) == 11.0
    assert makespan([(0, 1), (1, 2)], 2, False, seconds, 2) == 10.0
    assert makespan([(0, 1), (1, 2)], 2, True, seconds, 1) == 13.0


def test_gradients_that_are_not_held(asked: tuple[ms.Run, ms.Queries]) -> None:
    """They cost more gradients, and less memory."""
    run, queries = asked
    whole = QueryGradients(queries.of(run)).whole
    held, tiled = (ms.plan(run, queries, "mage", 4, memory=m) for m in (2 * whole, 2 * whole - 1))
    assert held.memory - tiled.memory == whole - (2 * whole - 1)
    assert tiled.seconds > 0
    assert not QueryGradients(queries.of(run), 2 * whole - 1).held


def test_a_batched_implementation_holds_more() -> None:
    recipe, queries = problems.recipe("mlp", "sgd", "plain"), problems.queries("mlp")
    memory = [
        ms.plan(ms.train(recipe, implementation=how), queries, "mage", 2).memory
        for how in ("loop", "batched")
    ]
    assert "batched" in VMAPPED
    assert memory[0] < memory[1]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"workers": 0}, "workers=0"),
    "method": ({"method": "mag"}, "did you mean 'mage'"),
    "budget": ({"budget": 0}, "budget=0"),
    "no budget": ({"budget": None}, "needs a budget"),
    "option": ({"warmup": -1}, "warmup=-1"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_named(asked: tuple[ms.Run, ms.Queries], what: str) -> None:
    given, words = MISTAKES[what]
    with pytest.raises(ms.ArgumentError, match=words):
        ms.plan(*asked, **{"method": "spell", "budget": 3, **given})
