"""Counts how often each instruction of a program runs in one step: loops multiplied, branches taken together.

A pipeline's table that mixes forwards and backwards is a loop with a choice in it. There it is known how often each
branch is taken: a stage does each of its ops once for every microbatch and chunk.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.hlo.text import Module, Op
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import CHOICE

_REDUCERS = ("reduce", "all-reduce", "all-reduce-start", "reduce-scatter", "reduce-window", "scatter", "sort",
             "select-and-scatter", "map", "reduce-scatter-start")  # fmt: skip
_AGAIN = re.compile(r"\.remat\d*(_uncompressed|_compressed)?$")  # names of copies by XLA's HloRematerialization


@dataclass(frozen=True, slots=True)
class Visit:
    """An instruction in its place.

    Attributes:
      op: The instruction.
      computation: Where it stands.
      loop: Turns of the loops around it, outermost first; None where a trip count is not known.
      branch: Whether it stands in a branch, of which a step takes one: it is counted as if taken.
      fused: Whether it stands inside a fusion, of which only the result is an array in memory.
      asynchronous: Whether it was started, and is waited for later.
      squeezed: Whether XLA computes it a second time of its own accord, because it lacks memory.
    """

    op: Op
    computation: str
    loop: tuple[int | None, ...]
    branch: bool
    fused: bool
    asynchronous: bool
    squeezed: bool = False

    @property
    def times(self) -> int | None:
        """Executions in a step, or None where that is not known."""
        product = 1
        for turns in self.loop:
            if turns is None:
                return None
            product *= turns
        return product


def trip_count(op: Op) -> int | None:
    """Returns how often a `while` turns, as XLA found out; None where it depends on the data."""
    known = op.config.get("known_trip_count")
    turns = str(known.get("n")) if isinstance(known, dict) else ""
    return int(turns) if turns.isdecimal() else None


def walk(module: Module, schedule: Schedule | None = None) -> Iterator[Visit]:
    """Yields every instruction that a step runs, in order, inside whatever calls it.

    Args:
      module: The compiled program.
      schedule: The table that it runs, where it is a pipeline's.
    """
    yield from _walk(module, schedule, module.entry, (), False, False, False, False)


def _walk(
    module: Module, schedule: Schedule | None, computation: str, loop: tuple[int | None, ...], branch: bool,
    fused: bool, asynchronous: bool, squeezed: bool,
) -> Iterator[Visit]:  # fmt: skip
    seen: set[str] = set()
    for op in module.computations[computation]:
        started = asynchronous or (op.opcode.endswith("-start") and not is_sync(op))
        first = _AGAIN.sub("", op.name)
        again = squeezed or first in seen
        seen.add(first)
        yield Visit(op, computation, loop, branch, fused, started, again)
        if op.opcode in _REDUCERS or op.opcode.endswith(("-done", "-update")):
            continue
        inner = (*loop, trip_count(op)) if op.opcode == "while" else loop
        for name in op.condition:  # asked once more than the loop turns
            asked = None if inner[-1] is None else inner[-1] + 1
            yield from _walk(module, schedule, name, (*loop, asked), branch, fused, started, again)
        if schedule and op.label.endswith(f"{CHOICE}/cond") and inner[-1:] == (schedule.ticks,):
            inner = (*inner[:-1], schedule.microbatches * schedule.chunks)
        for name in op.called:
            yield from _walk(
                module, schedule, name, inner, branch or op.opcode == "conditional",
                fused or op.opcode in ("fusion", "fusion-start"), started, again,
            )  # fmt: skip


def is_sync(op: Op) -> bool:
    """Returns whether a collective that is written as started and awaited is run at once all the same."""
    return bool(op.config.get("collective_backend_config", {}).get("is_sync"))
