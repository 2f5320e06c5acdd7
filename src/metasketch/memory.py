"""What fits into a memory budget: states kept, places for recomputation, rows in a block.

All estimates of bytes stand here, in one place, so that the plan of a run, the size of its blocks
and the choice of an implementation agree.
"""

from dataclasses import dataclass
from math import isqrt

from metasketch import checkpoints
from metasketch.errors import MemoryBudgetError
from metasketch.sizes import format_bytes, parse_bytes

TARGET_ROWS = 16
"""Rows that a block should have before memory goes to states: beyond it little is gained."""

MAX_ROWS = 64


@dataclass(frozen=True)
class Sizes:
    """Bytes of the things that a sweep holds.

    Attributes:
        state: one state of the run.
        params: its parameters alone.
        graph: what the graph of one microbatch's gradient saves.
        examples: one number for each training example.
    """

    state: int
    params: int
    graph: int
    examples: int

    @property
    def fixed(self) -> int:
        """Of a sweep, whatever its number of rows: three states (current, next, final), the
        update's coefficients, and the graph of the gradient with what walking it allocates."""
        slots = self.state // max(self.params, 1)
        return 3 * self.state + (slots + 1) * self.state + 4 * self.graph

    def row(self, vmapped: bool) -> int:
        """Of one row of a block: its cotangent before and after the step, and between."""
        return 3 * self.state + 2 * self.examples + (3 * self.graph if vmapped else 0)

    def sweep(self, rows: int, vmapped: bool, plan: checkpoints.Plan) -> int:
        """Of a run and a sweep with a block of so many rows."""
        return plan.in_memory * self.state + self.fixed + rows * self.row(vmapped)


@dataclass(frozen=True)
class Budget:
    """Memory that a run and its sweeps may take, above what the process holds before.

    Attributes:
        total: in bytes; None where the number of states is given instead.
        states: that number.
    """

    total: int | None
    states: int | None = None

    @classmethod
    def parse(cls, memory: int | float | str) -> "Budget":
        """A size such as ``"4GiB"``, or ``"20 states"``: that many, whatever they weigh."""
        if isinstance(memory, str) and memory.strip().endswith(("state", "states")):
            number = memory.strip().removesuffix("s").removesuffix("state").strip()
            if not number.isdecimal() or int(number) < 2:
                raise MemoryBudgetError(
                    f"memory={memory!r}: give a number of states of at least 2, such as "
                    "'20 states', or a size such as '4GiB'"
                )
            return cls(None, int(number))
        return cls(parse_bytes(memory, "memory"))

    def places(self, sizes: Sizes, num_steps: int) -> int:
        """How many states of the trajectory may be in memory at once."""
        if self.total is None:
            assert self.states is not None
            return min(self.states, num_steps)
        row = sizes.row(vmapped=False)
        free = self.total - sizes.fixed - row
        if free < 2 * sizes.state:
            needed = sizes.fixed + row + 2 * sizes.state
            raise MemoryBudgetError(
                f"memory={format_bytes(self.total)} is too small: one state of this run takes "
                f"{format_bytes(sizes.state)}, and a sweep needs {format_bytes(needed)} for two "
                f"of them, one row and the graph of a step ({format_bytes(4 * sizes.graph)}). "
                "Give at least that, or a smaller microbatch"
            )
        for_rows = min((TARGET_ROWS - 1) * row, free // 2)
        return min(max((free - for_rows) // sizes.state, 2), num_steps)

    def rows(self, sizes: Sizes, plan: checkpoints.Plan, vmapped: bool = False) -> int:
        """Rows of the largest block that fits beside the states."""
        if self.total is None:
            return MAX_ROWS
        free = self.total - sizes.fixed - plan.in_memory * sizes.state
        return max(0, min(MAX_ROWS, free // sizes.row(vmapped)))


def block_size(b: int, most: int) -> int:
    """Rows of each block, nearly equal, so that b rows go through in as few blocks as can be.

    >>> block_size(10, 4)
    4
    >>> block_size(9, 4)
    3
    """
    blocks = -(-b // most)
    return -(-b // blocks)


def disk_places(disk: int | float | str | None, sizes: Sizes, num_steps: int) -> int:
    """States that a store keeps: what the disk budget holds, by default about √T."""
    if disk is None:
        return min(num_steps, max(2, isqrt(num_steps)))
    places = parse_bytes(disk, "disk") // sizes.state
    if places < 2:
        raise MemoryBudgetError(
            f"disk={disk!r} is too small: one state of this run takes {format_bytes(sizes.state)}, "
            "and a store needs two of them"
        )
    return min(places, num_steps)
