"""Counts the runs of each instruction in a step: trip counts of nested loops multiply, and all branches count.

A pipeline whose table mixes forwards and backwards is a loop with a conditional in it. The number of runs of each
branch is known: a stage runs each op once per microbatch and chunk. A conditional for the ticks with updates of weights
states their number in its scope.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.hlo.text import Module, Op
from jaxpar.sharding.names import CHOICE, UPDATES

if TYPE_CHECKING:  # a plain step loads no pipeline
    from jaxpar.pipeline.tables.schedule import Schedule

# these call a scalar computation per element; its instructions belong to the kernel, and are not visited
_REDUCERS = ("reduce", "all-reduce", "all-reduce-start", "reduce-scatter", "reduce-window", "scatter", "sort",
             "select-and-scatter", "map", "reduce-scatter-start")  # fmt: skip
_UPDATES = re.compile(rf"{UPDATES}(\d+)/cond$")
_AGAIN = re.compile(r"\.remat\d*(_uncompressed|_compressed)?$")  # names of copies by XLA's HloRematerialization


@dataclass(frozen=True, slots=True)
class Visit:
    """An instruction, and the loops and branches around it.

    Attributes:
      op: The instruction.
      computation: Name of its computation.
      loop: Trip counts of the loops around it, outermost first; None where unknown.
      branch: Whether it is in a branch of a conditional, which counts as taken.
      in_fusion: Whether it is inside a fusion, whose result is the only array in memory.
      asynchronous: Whether it only starts here, and a later instruction waits for it.
      squeezed: Whether XLA decided to recompute it to save memory (HloRematerialization).
    """

    op: Op
    computation: str
    loop: tuple[int | None, ...]
    branch: bool
    in_fusion: bool
    asynchronous: bool
    squeezed: bool = False

    @property
    def times(self) -> int | None:
        """Number of runs in a step, or None if unknown."""
        product = 1
        for turns in self.loop:
            if turns is None:
                return None
            product *= turns
        return product


def trip_count(op: Op) -> int | None:
    """Returns the trip count in XLA's config of a `while`; None if it depends on the data."""
    config = op.config.get("known_trip_count")
    count = str(config.get("n")) if isinstance(config, dict) else ""
    return int(count) if count.isdecimal() else None


def walk(module: Module, schedule: "Schedule | None" = None) -> Iterator[Visit]:
    """Yields every instruction that a step runs, in order, with the loops and branches around it.

    Args:
      module: The compiled program.
      schedule: The table that the program runs, if it has a pipeline.
    """
    yield from _walk(module, schedule, module.entry, (), False, False, False, False)


def _walk(
    module: Module, schedule: "Schedule | None", computation: str, loop: tuple[int | None, ...], branch: bool,
    in_fusion: bool, asynchronous: bool, squeezed: bool,
) -> Iterator[Visit]:  # fmt: skip
    originals: set[str] = set()
    for op in module.computations[computation]:
        is_async = asynchronous or (op.opcode.endswith("-start") and not is_sync(op))
        # `fusion.3.remat` after `fusion.3`: XLA keeps the name of the original and adds `.remat`
        original = _AGAIN.sub("", op.name)
        is_repeated = squeezed or original in originals
        originals.add(original)
        yield Visit(op, computation, loop, branch, in_fusion, is_async, is_repeated)
        if op.opcode in _REDUCERS or op.opcode.endswith(("-done", "-update")):
            continue
        inner = (*loop, trip_count(op)) if op.opcode == "while" else loop
        for name in op.condition:  # runs once more often than the body
            condition_count = None if inner[-1] is None else inner[-1] + 1
            yield from _walk(module, schedule, name, (*loop, condition_count), branch, in_fusion, is_async, is_repeated)
        # the executor's own conditional inside the loop over ticks: every op is in one branch, and a stage takes each
        # branch once per microbatch and chunk, not in every tick
        chosen = schedule and op.label.endswith(f"{CHOICE}/cond") and inner[-1:] == (schedule.ticks,)
        for index, name in enumerate(op.callees):
            of_branch = (*inner[:-1], branch_runs(schedule, len(op.callees), index)) if schedule and chosen else inner
            if inner and (updates := _UPDATES.search(op.label)):  # its first branch has no instructions of its own
                of_branch = (*inner[:-1], int(updates[1]))
            yield from _walk(
                module, schedule, name, of_branch, branch or op.opcode == "conditional",
                in_fusion or op.opcode in ("fusion", "fusion-start"), is_async, is_repeated,
            )  # fmt: skip


def branch_runs(schedule: "Schedule", branches: int, index: int) -> Any:
    """Returns the number of times that a device runs a branch of the executor's conditional: a mean over the devices.

    Each stage runs F, B and W of equal layers for each microbatch and chunk. Parts with different programs have a
    branch for each part and op, after that of idle devices; the devices of one stage run it for every group.
    """
    runs, most = schedule.microbatches * schedule.chunks, 4
    if branches <= most:
        return runs
    replicas = schedule.replicas or (1,) * schedule.stages
    part = max(index - 1, 0) // ((branches - 1) // schedule.parts)
    runs, devices = schedule.microbatches * replicas[schedule.locate(part)[0]], sum(replicas)
    return runs // devices if runs % devices == 0 else runs / devices


def is_sync(op: Op) -> bool:
    """Whether a collective is synchronous although the text has a start and a done instruction."""
    return bool(op.config.get("collective_backend_config", {}).get("is_sync"))
