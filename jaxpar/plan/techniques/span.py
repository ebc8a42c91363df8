"""The span of a schedule: the longest path through its table, as counts of ops that times are multiplied with.

    span(F, B, W, ...) = max over paths of  counts . times

The priced table says which path is the longest at some times, and its counts are then what the span grows by. A few
reference times find the paths that matter: the largest of them is the span wherever one of them is the longest, and
never above it. For further microbatches the counts grow by as much with every `stages` of them.
"""

from functools import cache
from typing import Any, Literal

import numpy as np

from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.price import Times, price
from jaxpar.pipeline.tables.schedule import Schedule

Run = Literal["asynchronous", "barrier"]
OPS: tuple[str, ...] = ("F", "B", "W", "head F", "head B", "send")
# from how many times `stages` microbatches on the counts are affine in both; tests hold every schedule to it
ROUNDS: dict[str, int] = {
    **dict.fromkeys(("gpipe", "1f1b", "1f1b_phased", "interleaved", "interleaved_phased"), 1),
    **dict.fromkeys(("zb_h2", "zb_v", "dualpipe_v"), 4),
}
FEW = 12  # stages of the largest table that is priced as it is
# forward, backward, weights, head forward, head backward, send: of a part
REFERENCES = tuple(
    (1.0, backward, weights, head, 1.9 * head, send)
    for backward, weights in ((1.03, 0.97), (2.03, 0.97))
    for head, send in ((0.2, 1e-3), (1e-3, 0.1), (2.0, 1e-3))
)


def path(table: Schedule, times: tuple[float, ...]) -> tuple[int, ...]:
    """Returns how often each of `OPS` is on the longest path, run freely at these times of a part."""
    send, last = times[5], table.parts - 1
    starts = price(table, _times(table, times)).starts
    done: dict[tuple[str, int, int], tuple[int, int]] = {}
    before: dict[tuple[int, int], tuple[int, int] | None] = {}
    latest: dict[int, tuple[int, int]] = {}
    for tick, stage, cell in table:
        part = table.part(stage, cell.chunk)
        needs = done.get((cell.op, cell.microbatch, part - {"F": 1, "B": -1, "W": 0}[cell.op]))
        here = latest.get(stage)
        waits = needs is not None and (here is None or starts[needs][1] + send * (needs[1] != stage) > starts[here][1])
        before[tick, stage] = needs if waits else here
        done[cell.op, cell.microbatch, part] = latest[stage] = (tick, stage)
    counts = dict.fromkeys(OPS, 0)
    at: tuple[int, int] | None = max(starts, key=lambda key: starts[key][1])
    while at is not None:
        _count(counts, table, *at, last)
        earlier = before[at]
        counts["send"] += earlier is not None and earlier[1] != at[1]
        at = earlier
    return tuple(counts.values())


def slowest(table: Schedule, times: tuple[float, ...]) -> tuple[int, ...]:
    """Returns how often each of `OPS` is the slowest of its tick, at these times of a part; and ticks with messages."""
    cost, last = dict(zip(OPS, times, strict=True)), table.parts - 1
    whole = {"F": cost["F"], "B": cost["B"] + (not table.split) * cost["W"], "W": cost["W"]}
    counts = dict.fromkeys(OPS, 0)
    for tick, row in enumerate(table.cells):
        seconds, sends = {}, False
        for stage, cell in enumerate(row):
            if cell is not None:
                part = table.part(stage, cell.chunk)
                to = part + {"F": 1, "B": -1, "W": 0}[cell.op]
                sends |= 0 <= to <= last and table.place(to)[0] != stage
                seconds[stage] = whole[cell.op] + (part == last) * cost.get(f"head {cell.op}", 0.0)
        if seconds:
            _count(counts, table, tick, max(seconds, key=lambda stage: seconds[stage]), last)
        counts["send"] += sends
    return tuple(counts.values())


def _times(table: Schedule, times: tuple[float, ...]) -> Times:
    """Returns the times of every part, the last one's with the head."""
    forward, backward, weights, head_f, head_b, send = times
    of = lambda time, more=0.0: (*(time,) * (table.parts - 1), time + more)  # noqa: E731
    return Times(forward=of(forward, head_f), backward=of(backward, head_b), weights=of(weights), send=send)


def _count(counts: dict[str, int], table: Schedule, tick: int, stage: int, last: int) -> None:
    """Counts the ops of a cell that is not idle: a backward that is not split is both halves."""
    cell = table.cells[tick][stage]
    if cell is None:
        return
    for op in ("B", "W") if cell.op == "B" and not table.split else (cell.op,):
        counts[op] += 1
    if table.part(stage, cell.chunk) == last and cell.op != "W":
        counts[f"head {cell.op}"] += 1


@cache
def paths(name: str, stages: int, microbatches: int, chunks: int, run: Run = "asynchronous") -> np.ndarray:
    """Returns the counts of the longest paths of a schedule at the reference times. Shape [references, ops].

    Beyond `ROUNDS` x stages microbatches the counts are affine in both; what is larger comes from smaller tables.

    Raises:
      JaxparError: If the library has no such schedule, or it does not take these numbers.
    """
    rounds = ROUNDS.get(name, 2)
    base = rounds * stages + microbatches % stages
    if stages > FEW and microbatches >= rounds * stages and name in LIBRARY:
        few, more = FEW - 4, FEW
        one, two = (paths(name, few, n * few, chunks, run) for n in (rounds, rounds + 1))
        other = paths(name, more, rounds * more, chunks, run)
        per = (two - one) / few
        wide = (other - one - per * rounds * (more - few)) / (more - few)
        return one + per * (microbatches - rounds * few) + wide * (stages - few)
    if microbatches > base + stages:
        one, two = paths(name, stages, base, chunks, run), paths(name, stages, base + stages, chunks, run)
        return one + (microbatches - base) // stages * (two - one)
    table = schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    references = REFERENCES if table.split else REFERENCES[:3]
    found = [(path if run == "asynchronous" else slowest)(table, times) for times in references]
    return np.array(found + found[:1] * (len(REFERENCES) - len(found)), float)


def counts(
    name: Any, stages: Any, microbatches: Any, chunks: Any, *, run: Run = "asynchronous"
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns the counts of the longest paths of many schedules, [schedules, references, ops], and their shape.

    Args:
      name: Of a schedule of the library.
      stages: Size of the axis `pipe`.
      microbatches: Pieces of the batch.
      chunks: Parts on each stage. All are single values, or arrays that broadcast.
      run: Stages run freely, or tick by tick.

    Raises:
      JaxparError: If the library has no such schedule, or it does not take these numbers.
    """
    name, stages, microbatches, chunks = np.broadcast_arrays(name, stages, microbatches, chunks)
    names, code = np.unique(name, return_inverse=True)
    key = np.ravel_multi_index(
        (chunks.ravel(), stages.ravel(), code.ravel(), microbatches.ravel()),
        (chunks.max() + 1, stages.max() + 1, len(names), microbatches.max() + 1),
    )
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    kinds = zip(*(array.ravel()[first].tolist() for array in (name, stages, microbatches, chunks)), strict=True)
    return np.stack([paths(*kind, run) for kind in kinds])[which.ravel()], name.shape


def span(found: tuple[np.ndarray, tuple[int, ...]], times: tuple[Any, ...]) -> Any:
    """Returns the seconds from the first op to the end of the last.

    Args:
      found: What `counts` returned.
      times: Seconds of each of `OPS` for one part, of a shape that broadcasts to that of the schedules.

    >>> float(span(counts("1f1b", 4, 8, 1), (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)))  # (8 + 4 - 1) x 3
    33.0
    """
    rows, shape = found
    cost = np.stack([np.broadcast_to(time, shape).ravel() for time in times], axis=1)
    return np.einsum("nro,no->nr", rows, cost).max(axis=1).reshape(shape)
