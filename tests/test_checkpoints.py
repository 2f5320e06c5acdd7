"""Schedules against dynamic programming, another package, and brute force."""

from functools import cache
from itertools import combinations

import pytest
from checkpoint_schedules import Forward, MultistageCheckpointSchedule
from hypothesis import given, settings
from hypothesis import strategies as st

from metasketch.checkpoints import Plan, binomial_cost, evenly, plan, reversal, split


@cache
def dynamic_cost(length: int, places: int) -> int:
    """R(l, s) = min over m of  m + R(l - m, s - 1) + R(m, s),    R(1, s) = 0"""
    if length <= 1:
        return 0
    if places == 1:
        return length * (length - 1) // 2
    return min(
        m + dynamic_cost(length - m, places - 1) + dynamic_cost(m, places) for m in range(1, length)
    )


@pytest.mark.parametrize("places", range(1, 9))
def test_the_closed_form_equals_dynamic_programming(places: int) -> None:
    for length in range(1, 41):
        assert binomial_cost(length, places) == dynamic_cost(length, places)


@pytest.mark.parametrize("places", range(2, 9))
def test_the_split_attains_the_optimum(places: int) -> None:
    for length in range(2, 41):
        m = split(length, places)
        parts = binomial_cost(length - m, places - 1) + binomial_cost(m, places)
        assert m + parts == dynamic_cost(length, places)


@settings(max_examples=30)
@given(length=st.integers(1, 120), places=st.integers(1, 12))
def test_the_closed_form_equals_another_package(length: int, places: int) -> None:
    """Its count has the steps of the run itself besides."""
    schedule = MultistageCheckpointSchedule(length, min(places, length), 0)
    forwards = 0
    for action in schedule:
        if isinstance(action, Forward):
            forwards += min(action.n1, length) - action.n0
    assert forwards == binomial_cost(length, places) + length


def test_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        binomial_cost(4, 0)


def walk(actions: list, kept: set[int], free: int) -> tuple[list[int], int, int]:
    """Carry out a schedule: states visited, steps recomputed, most places in use."""
    stored, at, visited, steps, most = set(kept), None, [], 0, 0
    for action in actions:
        if action.kind == "advance":
            assert action.source in stored
            assert action.source < action.state
            steps += action.state - action.source
            at = action.state
        elif action.kind == "store":
            assert action.state == at
            assert at not in stored
            stored.add(at)
            most = max(most, len(stored) - len(kept))
            assert most <= free
        elif action.kind == "release":
            assert action.state not in kept
            stored.remove(action.state)
        else:
            assert action.state in stored or action.state == at
            visited.append(action.state)
    assert stored == kept  # every free place was given back
    return visited, steps, most


@given(start=st.integers(0, 5), length=st.integers(1, 90), free=st.integers(0, 10))
def test_a_reversal_visits_every_state_once(start: int, length: int, free: int) -> None:
    actions = list(reversal(start, start + length, free))
    visited, steps, most = walk(actions, {start}, free)
    assert visited == list(range(start + length - 1, start - 1, -1))
    assert steps == binomial_cost(length, free + 1)
    assert most == min(free, length - 1)


plans = st.builds(plan, st.integers(1, 90), st.integers(2, 30), st.integers(0, 12))


@given(plans)
def test_a_plan_does_what_it_says(found: Plan) -> None:
    visited, steps, _ = walk(list(found.actions()), set(found.kept), found.free)
    assert visited == list(range(found.num_steps - 1, -1, -1))
    assert steps == found.recomputed
    assert found.factor == steps / found.num_steps


@given(st.integers(1, 90), st.integers(2, 30), st.integers(0, 12))
def test_a_plan_keeps_to_its_budget(num_steps: int, memory: int, disk: int) -> None:
    found = plan(num_steps, memory, disk)
    assert found.kept[0] == 0
    assert sorted(set(found.kept)) == list(found.kept)
    assert found.on_disk <= set(found.kept)
    assert len(found.on_disk) <= disk
    assert len(found.kept) - len(found.on_disk) + found.free <= memory
    if found.on_disk:
        assert 0 in found.on_disk  # a resumed run has somewhere to start


@pytest.mark.parametrize("disk", [0, 1, 2, 3])
@pytest.mark.parametrize("memory", [1, 2, 3, 4])
def test_a_plan_is_the_best_of_all(memory: int, disk: int) -> None:
    """Of every choice of states to keep, evenly spaced or not, in memory or on disk."""
    for num_steps in range(1, 11):
        costs = [
            Plan(num_steps, (0, *rest), frozenset(), memory - in_memory).recomputed
            for number in range(num_steps)
            for rest in combinations(range(1, num_steps), number)
            if (in_memory := max(0, number + 1 - disk)) <= memory
        ]
        assert plan(num_steps, memory, disk).recomputed == min(costs)


@given(st.integers(1, 200), st.integers(1, 200))
def test_segments_are_nearly_equal(num_steps: int, kept: int) -> None:
    starts = evenly(num_steps, min(kept, num_steps))
    lengths = [b - a for a, b in zip(starts, (*starts[1:], num_steps), strict=True)]
    assert sum(lengths) == num_steps
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("memory", "disk"), [(10, 0), (20, 0), (10, 40), (40, 10)])
def test_more_room_never_costs_more(memory: int, disk: int) -> None:
    here = plan(2000, memory, disk).recomputed
    assert plan(2000, memory + 1, disk).recomputed <= here
    assert plan(2000, memory, disk + 1).recomputed <= here


def test_the_number_in_the_module_docstring() -> None:
    assert round(plan(2000, 20).factor, 2) == 2.52
    assert round(binomial_cost(2000, 20) / 2000, 2) == 2.99
