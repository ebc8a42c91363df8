"""Compiles a schedule's table into a program for the executor: rows of numbers, slots of buffers, and loops.

    cells ──► for every tick and stage: op, microbatch, chunk, and the slots to read and to write
          ──► for every tick: its kind, the set of ops that the stages run in it
          ──► loops: (kind, kind, ...) x repeats, so that a kind is compiled once and not chosen at run time

There are three pools of slots. `messages` holds arrays from another part, inputs x and gradients g, until the backward
that reads them. `residuals` holds the residuals of a forward for its backward, `stash` those of a B for its W. Interval
colouring assigns the slots, so a pool has exactly as many slots as values that are alive at once.

A stage that is idle in a tick computes and writes too, because all stages run the same code. It writes into a slot that
is free then, which costs a write. If a stage has no free slot in some tick, as after the forwards of `gpipe`, every
write of that pool selects between the new and the old value, which XLA compiles to three reads and two writes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxpar.pipeline.tables.generators import forwards
from jaxpar.pipeline.tables.schedule import Schedule

OP_NUMBER = {None: 0, "F": 1, "B": 2, "W": 3}


class TableRow(NamedTuple):
    """One stage's cell of a tick, as int32 scalars: its op, and the slots that it reads and writes."""

    op: Any
    microbatch: Any
    chunk: Any
    part: Any
    x: Any
    g: Any
    residuals: Any
    stash: Any
    right: Any
    left: Any
    self_send: Any
    version: Any  # this and the next are for updates in the middle of a table: see `asynchronous.py`
    update: Any

    @classmethod
    def read(cls, numbers: Any) -> "TableRow":
        """Splits a row of `Program.rows`, [columns], into its columns."""
        return cls(*(numbers[i] for i in range(len(COLUMNS))))

    def runs(self, op: str) -> Any:
        """Whether the stage runs this op in the tick."""
        return self.op == OP_NUMBER[op]


COLUMNS = TableRow._fields


class TickKind(NamedTuple):
    """The ops and messages of a tick over all stages. Ticks of the same kind run the same code.

    Attributes:
      ops: The ops among F, B and W that at least one stage runs.
      first: Whether the first part runs an F or a B, which needs the embedding.
      last: Whether the last part runs an F, which needs the head and the loss.
      right: Whether a stage sends to the next one.
      left: Whether a stage sends to the previous one.
      self_send: Whether a stage stores its result as a message to itself.
    """

    ops: frozenset[str]
    first: bool
    last: bool
    right: bool
    left: bool
    self_send: bool

    @property
    def phased(self) -> bool:
        """Whether all stages that are not idle run the same op, so that none is chosen by a switch."""
        return len(self.ops) == 1


class Loop(NamedTuple):
    """Consecutive ticks as a repeated body, which consists of tick kinds and inner loops."""

    body: "tuple[TickKind | Loop, ...]"
    repeats: int

    @property
    def ticks(self) -> int:
        """Number of ticks, counting repeats."""
        return self.repeats * sum(1 if isinstance(item, TickKind) else item.ticks for item in self.body)

    @property
    def bodies(self) -> int:
        """Number of ticks that are compiled."""
        return sum(1 if isinstance(item, TickKind) else item.bodies for item in self.body)


class SlotPool(NamedTuple):
    """The number of slots of a pool, and whether a stage that drops a value may have no free one."""

    slots: int
    masked: bool


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that the executor runs.

    Attributes:
      schedule: The table.
      rows: Shape [ticks, stages, columns], int32; -1 for no slot.
      loops: The ticks as loops over kinds.
      message_slots: Slots for inputs and gradients from other parts.
      residual_slots: Slots for the residuals of a forward; 0 for an evaluation.
      stash_slots: Slots for the residuals of a B; 0 if B and W are one op.
      masked_pools: Pools among `residuals` and `stash` in which idle stages do not always have a free slot.
      right: Pairs (stage, next stage), for each stage that sends messages to the next one.
      left: Pairs (stage, previous stage), for each stage that sends messages to the previous one.
    """

    schedule: Schedule
    rows: np.ndarray
    loops: tuple[Loop, ...]
    message_slots: int
    residual_slots: int
    stash_slots: int
    masked_pools: frozenset[str]
    right: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]

    def write_mask(self, pool: str, row: TableRow) -> Any:
        """Whether a stage writes into its slot of a pool: always if the slot of an idle stage is a free one."""
        return row.runs({"residuals": "F", "stash": "B"}[pool]) if pool in self.masked_pools else True


@lru_cache(maxsize=64)
def program(schedule: Schedule, *, forward_only: bool = False) -> Program:
    """Compiles a table; with `forward_only`, only its forwards, for an evaluation."""
    ticks = forwards(schedule) if forward_only else schedule.cells
    # idle cells have op, microbatch, chunk and part 0: a masked stage computes on them, so they must exist
    rows = np.full((len(ticks), schedule.stages, len(COLUMNS)), -1, np.int32)
    rows[..., :4] = 0
    runs: dict[tuple[str, int, int], tuple[int, int]] = {}
    for tick, row in enumerate(ticks):
        for stage, cell in enumerate(row):
            if cell:
                part = schedule.part(stage, cell.chunk)
                runs[cell.op, cell.microbatch, part] = tick, stage
                rows[tick, stage, :4] = OP_NUMBER[cell.op], cell.microbatch, cell.chunk, part
    kinds = [_tick_kind(schedule, row, forward_only=forward_only) for row in ticks]
    # a table that mixes ops in a tick has one kind for all of its ticks: its stages choose at run time anyway, and one
    # loop body is compiled instead of many
    if not schedule.phased and not forward_only:
        ops = frozenset().union(*(kind.ops for kind in kinds))
        flags = [any(flag) for flag in zip(*(kind[1:] for kind in kinds), strict=True)]
        kinds = [TickKind(ops, *flags)] * len(kinds)
    kinds = _equalize_directions(kinds)
    residuals = stash = SlotPool(0, False)
    if not forward_only:
        residuals = _assign_pool(rows, runs, kinds, "F", "B", "residuals")
        stash = _assign_pool(rows, runs, kinds, "B", "W", "stash") if schedule.split else stash
    return Program(
        schedule=schedule,
        rows=rows,
        loops=_nest_loops(kinds),
        message_slots=_assign_message_slots(schedule, rows, runs, forward_only=forward_only),
        residual_slots=residuals.slots,
        stash_slots=stash.slots,
        masked_pools=frozenset(name for name, pool in (("residuals", residuals), ("stash", stash)) if pool.masked),
        right=_permute_pairs(schedule, runs, "right"),
        left=_permute_pairs(schedule, runs, "left"),
    )


def _permute_pairs(schedule: Schedule, runs, direction: str) -> tuple[tuple[int, int], ...]:
    # one permute for all ticks that send in this direction, with all of their pairs: they share their code
    sends = {(stage, _find_target(schedule, op, part, stage)) for (op, _, part), (_, stage) in runs.items()}
    return tuple(sorted({(stage, schedule.locate(to[1])[0]) for stage, to in sends if to and to[0] == direction}))


def _find_target(schedule: Schedule, op: str, part: int, stage: int) -> tuple[str, int] | None:
    """Returns (direction in which a stage sends the result of an op, part that reads it); None if no part reads it."""
    if op == "F" and part == schedule.parts - 1:
        return "self_send", part  # the loss gradient, for its own backward
    next_part = part + 1 if op == "F" else part - 1
    if op == "W" or next_part < 0:
        return None
    home, _ = schedule.locate(next_part)
    if home == stage:  # as at the turn of a v-shaped schedule: neighbouring parts on one stage
        return "self_send", next_part
    # on a ring of two stages both directions lead to the same neighbour: forwards go right and backwards left, so that
    # an x and a g may arrive in one tick, for which a row has one slot each
    return (
        "right" if home == (stage + 1) % schedule.stages and (schedule.stages > 2 or op == "F") else "left"
    ), next_part


def _tick_kind(schedule: Schedule, row, *, forward_only: bool) -> TickKind:
    parts = [(cell.op, schedule.part(stage, cell.chunk), stage) for stage, cell in enumerate(row) if cell]
    last = any(op == "F" and part == schedule.parts - 1 for op, part, _ in parts)
    directions = {
        target[0]
        for op, part, stage in parts
        if (target := _find_target(schedule, op, part, stage)) and not (forward_only and part == schedule.parts - 1)
    }
    return TickKind(
        ops=frozenset(op for op, _, _ in parts),
        first=any(op in "FB" and part == 0 for op, part, _ in parts),
        last=last,
        right="right" in directions,
        left="left" in directions,
        self_send="self_send" in directions,
    )


def _equalize_directions(kinds: Sequence[TickKind]) -> list[TickKind]:
    """Makes all ticks with the same ops send in the same directions, as one more compiled body costs more."""
    sends: dict[frozenset, list[bool]] = {}
    for kind in kinds:
        flags = sends.setdefault(kind.ops, [False] * 3)
        sends[kind.ops] = [a or b for a, b in zip(flags, kind[3:], strict=True)]
    return [TickKind(*kind[:3], *sends[kind.ops]) for kind in kinds]


def _assign_message_slots(schedule: Schedule, rows: np.ndarray, runs, *, forward_only: bool) -> int:
    """Assigns slots to the messages x and g; returns their number."""
    column = {name: i for i, name in enumerate(COLUMNS)}
    spans: list[list[tuple[int, int, list[tuple[int, int]]]]] = [[] for _ in range(schedule.stages)]
    for (op, microbatch, part), (tick, stage) in runs.items():
        target = _find_target(schedule, op, part, stage)
        if target is None or (forward_only and part == schedule.parts - 1):
            continue
        direction, dest = target
        gradient = op == "B" or dest == part
        # an input is read twice, by its F and by its B (which differentiates at x), a gradient by its B only
        readers = [runs["B", microbatch, dest]] if not forward_only and ("B", microbatch, dest) in runs else []
        readers += [] if gradient else [runs["F", microbatch, dest]]
        receiver = readers[0][1]
        cells = [(tick, column[direction])] + [(reader, column["g" if gradient else "x"]) for reader, _ in readers]
        spans[receiver].append((tick, max(reader for reader, _ in readers), cells))
    return max(_assign_lowest_slots(rows[:, stage], stage_spans) for stage, stage_spans in enumerate(spans))


def _assign_pool(rows: np.ndarray, runs, kinds: Sequence[TickKind], write: str, read: str, pool: str) -> SlotPool:
    """Assigns slots to the values that op `write` saves for op `read`, and free slots to stages that drop a value."""
    column = COLUMNS.index(pool)
    spans: list[list] = [[] for _ in range(rows.shape[1])]
    for (op, microbatch, part), (tick, stage) in runs.items():
        if op == write:
            end, _ = runs[read, microbatch, part]
            spans[stage].append((tick, end, [(tick, column), (end, column)]))
    slots = max(_assign_lowest_slots(rows[:, stage], stage_spans) for stage, stage_spans in enumerate(spans))
    writes, masked = np.array([write in kind.ops for kind in kinds]), False
    for stage, stage_spans in enumerate(spans):
        used = np.zeros((slots, len(kinds)), bool)
        for start, end, _ in stage_spans:
            used[rows[start, stage, column], start:end] = True  # the last read may share its tick with a write
        idle = writes & (rows[:, stage, column] < 0)
        rows[idle, stage, column] = np.where(used.all(axis=0), -1, used.argmin(axis=0))[idle]
        masked |= bool((idle & used.all(axis=0)).any())
    return SlotPool(slots, masked)


def _assign_lowest_slots(rows: np.ndarray, spans: Iterable[tuple[int, int, list[tuple[int, int]]]]) -> int:
    """Assigns the lowest free slot to every span: (tick of the write, tick of the last read, cells)."""
    free_from: list[int] = []  # slot to the tick in which its value is last read
    # greedy in the order of starts: optimal for intervals, with as many slots as the most that overlap. A slot may be
    # written in the tick that last reads it: reads come first in a tick
    for start, end, cells in sorted(spans, key=lambda span: (span[0], span[1])):
        slot = next((s for s, until in enumerate(free_from) if until <= start), len(free_from))
        free_from[slot : slot + 1] = [end]
        for tick, column in cells:
            rows[tick, column] = slot
    return len(free_from)


def _nest_loops(kinds: Sequence[TickKind]) -> tuple[Loop, ...]:
    """Groups the kinds into nested loops with few bodies to compile: loops of ticks, then loops of loops."""
    loops = _find_loops(tuple(kinds), 8)
    while True:
        merged = _find_loops(loops, 16)
        flat = tuple(
            item.body[0] if item.repeats == 1 and len(item.body) == 1 and isinstance(item.body[0], Loop) else item
            for item in merged
        )
        if sum(loop.bodies for loop in flat) >= sum(loop.bodies for loop in loops):
            return loops
        loops = flat


def _find_loops(symbols: tuple, longest: int) -> tuple[Loop, ...]:
    """Finds the loops with the fewest bodies that expand to these symbols, by dynamic programming from the end."""
    # patterns are tried up to `longest` symbols: a schedule's steady state repeats after a few ticks per chunk, and
    # trying all lengths would make the search quadratic in the table
    count = len(symbols)
    best: list[tuple[int, int, int]] = [(0, 0, 0)] * (count + 1)  # bodies, length of the first pattern, its repeats
    weight = [symbol.bodies if isinstance(symbol, Loop) else 1 for symbol in symbols]
    for i in range(count - 1, -1, -1):
        choices = []
        for length in range(1, min(longest, count - i) + 1):
            cost = sum(weight[i : i + length])
            repeats, pattern = 1, symbols[i : i + length]
            choices.append((cost + best[i + length][0], length, 1))
            while symbols[i + repeats * length : i + (repeats + 1) * length] == pattern:
                repeats += 1
                choices.append((cost + best[i + repeats * length][0], length, repeats))
        best[i] = min(choices, key=lambda choice: (choice[0], choice[1], -choice[2]))
    loops, i = [], 0
    while i < count:
        _, length, repeats = best[i]
        loops.append(Loop(symbols[i : i + length], repeats))
        i += length * repeats
    return tuple(loops)
