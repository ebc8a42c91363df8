"""A schedule: a table with one cell per tick and stage, the op that the stage runs in the tick.

    1f1b, 3 stages, 4 microbatches        F forward, B backward, W the weights' half of a backward
    stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3
    stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .
    stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

A stage is a position along the axis `pipe`. It holds one or more chunks of consecutive layers; part p of the model,
counted from the embedding, is one chunk of one stage. Each tick ends with a barrier, so the next may read its results.
The constructor replays the table, so every `Schedule` object can be run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal, NamedTuple

from jaxpar.errors import refuse

Placement = Literal["ring", "v"]
OPS = ("F", "B", "W")


class Cell(NamedTuple):
    """An op on a microbatch that a stage runs in a tick.

    Attributes:
      op: F, forward; B, backward, or its input-gradient half if the table has W; W, its weight-gradient half.
      microbatch: Number of the microbatch, from 0.
      chunk: Number of the chunk on its stage, from 0.
    """

    op: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}" + (f"'{self.chunk}" if self.chunk else "")


Row = tuple[Cell | None, ...]


@dataclass(frozen=True)
class StageCut:
    """The division of a model into parts, and of a batch into microbatches.

    Attributes:
      stages: Size of the axis `pipe`.
      microbatches: Number of parts of the batch, which pass the stages in sequence.
      chunks: Number of parts of the model on each stage.
      placement: The stage of part p. ring: chunk p // stages of stage p % stages (Megatron-LM's interleaving). v: two
        chunks, and the second half of the parts is in reverse order of stages (Qi et al. 2024, arXiv:2405.15362).
    """

    stages: int
    microbatches: int
    chunks: int = 1
    placement: Placement = "ring"

    @property
    def parts(self) -> int:
        """Number of parts of the model: stages x chunks."""
        return self.stages * self.chunks

    @cached_property
    def messages(self) -> int:
        """Number of activations and gradients that stages send to other stages, per step."""
        crossing = sum(self.locate(part)[0] != self.locate(part + 1)[0] for part in range(self.parts - 1))
        return 2 * crossing * self.microbatches

    def part(self, stage: int, chunk: int) -> int:
        """Returns the number of the part that is this chunk of a stage."""
        if self.placement == "v" and chunk:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def locate(self, part: int) -> tuple[int, int]:
        """Returns the (stage, chunk) that holds a part of the model."""
        chunk, position = divmod(part, self.stages)
        return (self.stages - 1 - position if self.placement == "v" and chunk else position), chunk


@dataclass(frozen=True, kw_only=True)
class Schedule(StageCut):
    """A cut, and a table [tick, stage] of cells, None where a stage idles.

    Attributes:
      name: Name of the schedule.
      cells: For every tick and stage, the op that the stage runs.
      replicas: Number of devices of each stage; () means one each. With replicas, a microbatch of the table is a group
        of them: see `jaxpar.pipeline.run.stage_replicas`.
    """

    name: str
    cells: tuple[Row, ...]
    replicas: tuple[int, ...] = ()

    def __post_init__(self):
        for key in ("stages", "microbatches", "chunks"):
            if type(getattr(self, key)) is not int or getattr(self, key) < 1:
                raise refuse(f"{key}={getattr(self, key)!r}", rule="a positive whole number", fix=f"{key}=1")
        if self.placement not in ("ring", "v") or (self.placement == "v" and self.chunks != 2):
            raise refuse(
                f"placement={self.placement!r} with chunks={self.chunks}",
                rule="parts are placed as a ring, or as a v with 2 chunks",
                fix='placement="ring"',
            )
        _replay(self)

    @property
    def group(self) -> int:
        """Number of microbatches that a tick handles."""
        return lcm(*self.replicas)

    @property
    def ticks(self) -> int:
        """Rows of the table."""
        return len(self.cells)

    @cached_property
    def split(self) -> bool:
        """Whether backward is split into B and W."""
        return any(cell.op == "W" for _, _, cell in self)

    @cached_property
    def phased(self) -> bool:
        """Whether all ops of a tick are of one kind, in every tick, so that no stage waits for a slower kind."""
        return all(len({cell.op for cell in row if cell}) <= 1 for row in self.cells)

    @property
    def bubble(self) -> float:
        """Share of the cells that are idle: the bubble if all ops take the same time."""
        idle = sum(cell is None for row in self.cells for cell in row)
        return idle / (self.ticks * self.stages) if self.ticks else 0.0

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """The maximum number of activations that each stage saves at once, as (microbatch, chunk) pairs.

        A pair is saved from its F to its B, or to its W if backward is split. It is 1/chunks of a stage's activations.
        """
        return _max_pairs(self, "F", "W" if self.split else "B")

    @cached_property
    def stash(self) -> tuple[int, ...]:
        """The maximum number of stashes (residuals of a B for its W) that each stage saves; 0 if B and W are one op."""
        return _max_pairs(self, "B", "W") if self.split else (0,) * self.stages

    def __iter__(self) -> Iterator[tuple[int, int, Cell]]:
        """Yields (tick, stage, cell) of all cells that are not idle, in order of ticks."""
        for tick, row in enumerate(self.cells):
            for stage, cell in enumerate(row):
                if cell is not None:
                    yield tick, stage, cell

    def __str__(self) -> str:
        width = max((len(str(cell)) for _, _, cell in self), default=1)
        rows = [
            f"stage {stage:<{len(str(self.stages - 1))}}  "
            + " ".join(
                f"{row[stage] or '.':>{width}}" for row in ([str(c) if c else None for c in r] for r in self.cells)
            )
            for stage in range(self.stages)
        ]
        return "\n".join(rows)


def _max_pairs(schedule: Schedule, first_op: str, last_op: str) -> tuple[int, ...]:
    """Returns, per stage, the maximum number of (microbatch, chunk) pairs that are between two ops at once."""
    peaks, current = [0] * schedule.stages, [0] * schedule.stages
    for _, stage, cell in schedule:
        current[stage] += (cell.op == first_op) - (cell.op == last_op)
        peaks[stage] = max(peaks[stage], current[stage])
    return tuple(peaks)


def _replay(schedule: Schedule) -> None:
    """Replays the table on symbols.

    Raises:
      JaxparError: If the input of a cell is not there yet, or a cell repeats an op, has an unknown op, or is missing;
        the message names the first such cell.
    """
    op_ticks: dict[tuple[str, int, int], int] = {}  # (op, microbatch, part) to its tick
    for tick, row in enumerate(schedule.cells):
        if len(row) != schedule.stages:
            raise refuse(
                f"tick {tick} of {schedule.name} has {len(row)} cells",
                rule=f"a tick has one cell for each of the {schedule.stages} stages",
                fix="None where a stage idles",
            )
        new_ops = {}
        for stage, cell in enumerate(row):
            if cell is not None:
                problem = _find_problem(schedule, op_ticks, stage, cell)
                if problem:
                    rule, fix = problem
                    raise refuse(f"tick {tick}, stage {stage} of {schedule.name}: {Cell(*cell)}", rule=rule, fix=fix)
                new_ops[cell.op, cell.microbatch, schedule.part(stage, cell.chunk)] = tick
        op_ticks |= new_ops  # after the whole row: the result of a tick reaches other stages in the next
    ops = OPS if any(op == "W" for op, _, _ in op_ticks) else OPS[:2]
    for op in ops:
        for part in range(schedule.parts):
            for microbatch in range(schedule.microbatches):
                if (op, microbatch, part) not in op_ticks:
                    stage, chunk = schedule.locate(part)
                    raise refuse(
                        f"{schedule.name} ends without {Cell(op, microbatch, chunk)} of stage {stage}",
                        rule="every microbatch goes forward and backward through every part once"
                        + (", and has a W where any has" if op == "W" else ""),
                        fix="one more cell, in a tick after what it needs",
                    )


def _find_problem(cut: StageCut, op_ticks: dict, stage: int, cell: Cell) -> tuple[str, str] | None:
    """Returns (rule, fix) if a cell cannot run after the ops in `op_ticks`."""
    op, microbatch, chunk = cell
    if op not in OPS or not 0 <= microbatch < cut.microbatches or not 0 <= chunk < cut.chunks:
        rule = f"a cell is F, B or W of microbatch 0..{cut.microbatches - 1} and chunk 0..{cut.chunks - 1}"
        return rule, "None where a stage idles"
    part = cut.part(stage, chunk)
    if (op, microbatch, part) in op_ticks:
        return "every op runs once", f"it ran in tick {op_ticks[op, microbatch, part]} already"
    if op == "F":
        needs = [("F", part - 1)] if part else []
    elif op == "B":
        needs = [("F", part), *([("B", part + 1)] if part + 1 < cut.parts else [])]
    else:
        needs = [("B", part)]
    for earlier_op, earlier_part in needs:
        if (earlier_op, microbatch, earlier_part) not in op_ticks:
            earlier_stage, earlier_chunk = cut.locate(earlier_part)
            return (
                f"it needs {Cell(earlier_op, microbatch, earlier_chunk)} of stage {earlier_stage} in an earlier tick",
                "a later tick for this cell, or an earlier one for that",
            )
    return None


def from_orders(
    name: str,
    orders: Sequence[Sequence[Cell]],
    *,
    microbatches: int,
    chunks: int = 1,
    placement: Placement = "ring",
) -> Schedule:
    """Builds the table in which every stage runs its ops in the given order, each as early as possible.

    Args:
      name: Name of the schedule.
      orders: The cells of each stage, in order.
      microbatches: Number of microbatches.
      chunks: Number of parts on each stage.
      placement: The stage of part p.

    Raises:
      JaxparError: If the orders wait for each other in a cycle, or are not a valid table.
    """
    stages = len(orders)
    cut = StageCut(stages, microbatches, chunks, placement)
    op_ticks: dict[tuple[str, int, int], int] = {}
    positions, rows = [0] * stages, []
    while any(positions[stage] < len(orders[stage]) for stage in range(stages)):
        row: list[Cell | None] = [None] * stages
        for stage, order in enumerate(orders):
            # `op_ticks` has earlier ticks only, so that all stages of a tick are checked against the same state
            if positions[stage] < len(order) and _find_problem(cut, op_ticks, stage, order[positions[stage]]) is None:
                row[stage] = order[positions[stage]]
        if not any(row):
            stuck = next(s for s in range(stages) if positions[s] < len(orders[s]))
            cell = orders[stuck][positions[stuck]]
            rule, fix = _find_problem(cut, op_ticks, stuck, cell) or ("", "")
            raise refuse(
                f"the order of {name} stops at tick {len(rows)}: stage {stuck} waits with {Cell(*cell)}",
                rule=rule,
                fix=fix,
            )
        for stage, cell in enumerate(row):
            if cell:
                op_ticks[cell.op, cell.microbatch, cut.part(stage, cell.chunk)] = len(rows)
                positions[stage] += 1
        rows.append(tuple(row))
    return Schedule(
        name=name, cells=tuple(rows), stages=stages, microbatches=microbatches, chunks=chunks, placement=placement
    )
