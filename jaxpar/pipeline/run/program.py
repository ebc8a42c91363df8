"""Compiles a schedule's table into a program for the executor: rows of numbers, slots of buffers, and loops.

    cells ──► for every tick and stage: op, microbatch, chunk, and which slots to read and to write
          ──► for every tick: its kind, that is the ops that any stage runs in it
          ──► loops: (kind, kind, ...) x repeats, so that a kind is compiled once and not chosen at run time

Three pools of slots. `messages` holds arrays from another part: an input x until its backward, a gradient g until its
backward. `kept` holds the residuals that a forward leaves for its backward, `stash` those that a B leaves for its W.
Slots are assigned by interval colouring, so a pool has exactly as many slots as values are alive at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxpar.pipeline.tables.forwards import forwards
from jaxpar.pipeline.tables.schedule import Schedule

COLUMNS = (
    "op", "microbatch", "chunk", "part", "x", "g", "kept", "stash", "right", "left", "self_send", "version", "update",
)  # fmt: skip
OP_NUMBER = {None: 0, "F": 1, "B": 2, "W": 3}


class TickKind(NamedTuple):
    """The kind of a tick: the ops and messages of all its stages. Two ticks of one kind run the same code.

    Attributes:
      ops: Which of F, B and W some stage runs.
      first: Whether the first part runs an F or a B: it needs the embedding.
      last: Whether the last part runs an F: it needs the head and the loss.
      right: Whether a stage sends to the next one.
      left: Whether a stage sends to the one before.
      self_send: Whether a stage keeps its result as a message to itself.
    """

    ops: frozenset[str]
    first: bool
    last: bool
    right: bool
    left: bool
    self_send: bool


class Loop(NamedTuple):
    """Consecutive ticks as a body that is repeated. The body holds kinds of ticks, or inner loops."""

    body: "tuple[TickKind | Loop, ...]"
    repeats: int

    @property
    def ticks(self) -> int:
        """Rows of the table that it covers."""
        return self.repeats * sum(1 if isinstance(each, TickKind) else each.ticks for each in self.body)

    @property
    def bodies(self) -> int:
        """Ticks that are compiled."""
        return sum(1 if isinstance(each, TickKind) else each.bodies for each in self.body)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that the executor runs.

    Attributes:
      schedule: The table.
      rows: Shape [ticks, stages, columns], int32; a slot of -1 is not used.
      loops: The ticks as loops over kinds.
      messages: Slots for inputs and gradients from other parts.
      kept: Slots for the residuals of a forward; 0 for an evaluation.
      stash: Slots for the residuals of a B; 0 where B and W are one op.
      right: Pairs (from, to) of stages that send to the next one.
      left: Pairs of stages that send to the one before.
    """

    schedule: Schedule
    rows: np.ndarray
    loops: tuple[Loop, ...]
    messages: int
    kept: int
    stash: int
    right: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def program(schedule: Schedule, *, forward_only: bool = False) -> Program:
    """Returns the program of a table; with `forward_only`, of its forwards, as an evaluation needs them."""
    ticks = forwards(schedule) if forward_only else schedule.cells
    # idle cells have op, microbatch, chunk and part 0: a masked stage computes on them, so they must exist
    rows = np.full((len(ticks), schedule.stages, len(COLUMNS)), -1, np.int32)
    rows[..., :4] = 0
    at: dict[tuple[str, int, int], tuple[int, int]] = {}
    for tick, row in enumerate(ticks):
        for stage, cell in enumerate(row):
            if cell:
                part = schedule.part(stage, cell.chunk)
                at[cell.op, cell.microbatch, part] = tick, stage
                rows[tick, stage, :4] = OP_NUMBER[cell.op], cell.microbatch, cell.chunk, part
    kinds = [_kind(schedule, row, forward_only=forward_only) for row in ticks]
    # a table that mixes ops in a tick has one kind for all of its ticks: its stages choose at run time anyway, and one
    # loop body instead of many is compiled
    if not schedule.phased and not forward_only:
        ops = frozenset().union(*(kind.ops for kind in kinds))
        flags = [any(flag) for flag in zip(*(kind[1:] for kind in kinds), strict=True)]
        kinds = [TickKind(ops, *flags)] * len(kinds)
    kinds = _alike(kinds)
    return Program(
        schedule=schedule,
        rows=rows,
        loops=_nested(kinds),
        messages=_messages(schedule, rows, at, forward_only=forward_only),
        kept=0 if forward_only else _between(rows, at, "F", "B", "kept"),
        stash=_between(rows, at, "B", "W", "stash") if schedule.split and not forward_only else 0,
        right=_pairs(schedule, at, "right"),
        left=_pairs(schedule, at, "left"),
    )


def _pairs(schedule: Schedule, at, way: str) -> tuple[tuple[int, int], ...]:
    # one permute for all ticks that send this way, with every pair that ever does: ticks of one kind run one code
    sends = {(stage, _target(schedule, op, part, stage)) for (op, _, part), (_, stage) in at.items()}
    return tuple(sorted({(stage, schedule.place(to[1])[0]) for stage, to in sends if to and to[0] == way}))


def _target(schedule: Schedule, op: str, part: int, stage: int) -> tuple[str, int] | None:
    """Returns (the way that the result of an op travels, the part that reads it), or None where no part does."""
    if op == "F" and part == schedule.parts - 1:
        return "self_send", part  # the loss gradient, for its own backward
    to = part + 1 if op == "F" else part - 1
    if op == "W" or to < 0:
        return None
    at, _ = schedule.place(to)
    if at == stage:  # as at the turn of a v-shaped schedule: neighbouring parts on one stage
        return "self_send", to
    # on a ring of two stages both ways lead to the same neighbour: forwards go right and backwards left, so that an x
    # and a g may arrive in one tick, for which a row has one slot each
    return ("right" if at == (stage + 1) % schedule.stages and (schedule.stages > 2 or op == "F") else "left"), to


def _kind(schedule: Schedule, row, *, forward_only: bool) -> TickKind:
    parts = [(cell.op, schedule.part(stage, cell.chunk), stage) for stage, cell in enumerate(row) if cell]
    last = any(op == "F" and part == schedule.parts - 1 for op, part, _ in parts)
    ways = {
        way[0]
        for op, part, stage in parts
        if (way := _target(schedule, op, part, stage)) and not (forward_only and part == schedule.parts - 1)
    }
    return TickKind(
        ops=frozenset(op for op, _, _ in parts),
        first=any(op in "FB" and part == 0 for op, part, _ in parts),
        last=last,
        right="right" in ways,
        left="left" in ways,
        self_send="self_send" in ways,
    )


def _alike(kinds: Sequence[TickKind]) -> list[TickKind]:
    """Makes ticks with the same ops send in the same directions: a message nobody reads costs less than a body more."""
    sends: dict[frozenset, list[bool]] = {}
    for kind in kinds:
        before = sends.setdefault(kind.ops, [False] * 3)
        sends[kind.ops] = [a or b for a, b in zip(before, kind[3:], strict=True)]
    return [TickKind(*kind[:3], *sends[kind.ops]) for kind in kinds]


def _messages(schedule: Schedule, rows: np.ndarray, at, *, forward_only: bool) -> int:
    """Assigns slots to the messages x and g; returns their number."""
    column = {name: i for i, name in enumerate(COLUMNS)}
    spans: list[list[tuple[int, int, list[tuple[int, int]]]]] = [[] for _ in range(schedule.stages)]
    for (op, microbatch, part), (tick, stage) in at.items():
        target = _target(schedule, op, part, stage)
        if target is None or (forward_only and part == schedule.parts - 1):
            continue
        way, to = target
        gradient = op == "B" or to == part
        # an input is read twice, by its F and again by its B (which differentiates at x); a gradient by its B alone
        readers = [at["B", microbatch, to]] if not forward_only and ("B", microbatch, to) in at else []
        readers += [] if gradient else [at["F", microbatch, to]]
        receiver = readers[0][1]
        cells = [(tick, column[way])] + [(reader, column["g" if gradient else "x"]) for reader, _ in readers]
        spans[receiver].append((tick, max(reader for reader, _ in readers), cells))
    return max(_colour(rows[:, stage], each) for stage, each in enumerate(spans))


def _between(rows: np.ndarray, at, write: str, read: str, pool: str) -> int:
    """Assigns slots to the values that op `write` leaves for op `read`; returns their number."""
    column = COLUMNS.index(pool)
    spans: list[list] = [[] for _ in range(rows.shape[1])]
    for (op, microbatch, part), (tick, stage) in at.items():
        if op == write:
            until, _ = at[read, microbatch, part]
            spans[stage].append((tick, until, [(tick, column), (until, column)]))
    return max(_colour(rows[:, stage], each) for stage, each in enumerate(spans))


def _colour(rows: np.ndarray, spans: Iterable[tuple[int, int, list[tuple[int, int]]]]) -> int:
    """Gives every span (written at the end of a tick, last read in a later one) the lowest slot that is free."""
    free_from: list[int] = []  # slot to the tick in which what it holds is last read
    # greedy in the order of their starts: for intervals that uses the fewest slots, as many as overlap at most. A slot
    # may be written in the tick that last reads it: reads come first in a tick
    for start, end, cells in sorted(spans, key=lambda span: (span[0], span[1])):
        slot = next((s for s, until in enumerate(free_from) if until <= start), len(free_from))
        free_from[slot : slot + 1] = [end]
        for tick, column in cells:
            rows[tick, column] = slot
    return len(free_from)


def _nested(kinds: Sequence[TickKind]) -> tuple[Loop, ...]:
    """Returns the kinds as nested loops with few bodies to compile: loops of ticks, then loops of those loops."""
    loops = _loops(tuple(kinds), 8)
    while True:
        merged = _loops(loops, 16)
        flat = tuple(
            each.body[0] if each.repeats == 1 and len(each.body) == 1 and isinstance(each.body[0], Loop) else each
            for each in merged
        )
        if sum(loop.bodies for loop in flat) >= sum(loop.bodies for loop in loops):
            return loops
        loops = flat


def _loops(symbols: tuple, longest: int) -> tuple[Loop, ...]:
    """Returns the loops with the fewest bodies that spell the symbols, by dynamic programming from the end."""
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
