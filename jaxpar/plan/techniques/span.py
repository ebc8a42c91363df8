"""The span of a schedule: the longest path through its table, as counts of ops to multiply with times.

    span(F, B, W, ...) = max over paths of  counts . times

Pricing the table at a few reference times gives candidates for the longest path. The span is the maximum over them; it
is exact if one of them is the longest path at the given times, and otherwise a lower bound. Counts are affine in the
number of microbatches, in steps of `stages` microbatches.
"""

from functools import cache
from typing import Any, Literal

import numpy as np

from jaxpar.parallel.declaration import HELD, LEAST
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.price import OpTimes, price
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import device_layer_parameters, stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe

Run = Literal["asynchronous", "barrier"]
OPS: tuple[str, ...] = ("F", "B", "W", "head F", "head B", "send")
# from this multiple of `stages` microbatches on, the counts are affine in both; tests check it for every schedule
ROUNDS: dict[str, int] = {
    **dict.fromkeys(("gpipe", "1f1b", "1f1b_phased", "interleaved", "interleaved_phased"), 1),
    **dict.fromkeys(("zb_h2", "zb_v", "dualpipe_v"), 4),
}
FEW = 12  # stages of the largest table that is priced directly
# times of a part: forward, backward, weights, head forward, head backward, send
REFERENCES = tuple(
    (1.0, backward, weights, head, 1.9 * head, send)
    for backward, weights in ((1.03, 0.97), (2.03, 0.97))
    for head, send in ((0.2, 1e-3), (1e-3, 0.1), (2.0, 1e-3))
)


def path(table: Schedule, times: tuple[float, ...]) -> tuple[int, ...]:
    """Returns the count of each of `OPS` on the longest path of an asynchronous run with these times of a part."""
    send, last = times[5], table.parts - 1
    starts = price(table, _times(table, times)).starts
    finished: dict[tuple[str, int, int], tuple[int, int]] = {}
    predecessors: dict[tuple[int, int], tuple[int, int] | None] = {}
    last_of_stage: dict[int, tuple[int, int]] = {}
    for tick, stage, cell in table:
        part = table.part(stage, cell.chunk)
        source = finished.get((cell.op, cell.microbatch, part - {"F": 1, "B": -1, "W": 0}[cell.op]))
        prior = last_of_stage.get(stage)
        late = source is not None and (
            prior is None or starts[source][1] + send * (source[1] != stage) > starts[prior][1]
        )
        predecessors[tick, stage] = source if late else prior
        finished[cell.op, cell.microbatch, part] = last_of_stage[stage] = (tick, stage)
    counts = dict.fromkeys(OPS, 0)
    position: tuple[int, int] | None = max(starts, key=lambda key: starts[key][1])
    while position is not None:
        _count(counts, table, *position, last)
        predecessor = predecessors[position]
        counts["send"] += predecessor is not None and predecessor[1] != position[1]
        position = predecessor
    return tuple(counts.values())


def slowest(table: Schedule, times: tuple[float, ...]) -> tuple[int, ...]:
    """Returns the count of ticks in which each of `OPS` is slowest, with these times of a part, and ticks that send."""
    cost, last = dict(zip(OPS, times, strict=True)), table.parts - 1
    op_seconds = {"F": cost["F"], "B": cost["B"] + (not table.split) * cost["W"], "W": cost["W"]}
    counts = dict.fromkeys(OPS, 0)
    for tick, row in enumerate(table.cells):
        seconds, sends = {}, False
        for stage, cell in enumerate(row):
            if cell is not None:
                part = table.part(stage, cell.chunk)
                target = part + {"F": 1, "B": -1, "W": 0}[cell.op]
                sends |= 0 <= target <= last and table.locate(target)[0] != stage
                seconds[stage] = op_seconds[cell.op] + (part == last) * cost.get(f"head {cell.op}", 0.0)
        if seconds:
            _count(counts, table, tick, max(seconds, key=lambda stage: seconds[stage]), last)
        counts["send"] += sends
    return tuple(counts.values())


def _times(table: Schedule, times: tuple[float, ...]) -> OpTimes:
    """Returns the times of every part; the last part includes the head."""
    forward, backward, weights, head_f, head_b, send = times
    parts = lambda time, extra=0.0: (*(time,) * (table.parts - 1), time + extra)  # noqa: E731
    return OpTimes(forward=parts(forward, head_f), backward=parts(backward, head_b), weights=parts(weights), send=send)


def _count(counts: dict[str, int], table: Schedule, tick: int, stage: int, last: int) -> None:
    """Adds the ops of a cell to `counts`; an unsplit backward counts as a B and a W."""
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

    Beyond `ROUNDS` x stages microbatches the counts are affine in both, so they are extrapolated from smaller tables.

    Raises:
      JaxparError: If the library has no such schedule, or it does not support these numbers.
    """
    rounds = ROUNDS.get(name, 2)
    base = rounds * stages + microbatches % stages
    if stages > FEW and microbatches >= rounds * stages and name in LIBRARY:
        small, large = FEW - 4, FEW
        low, high = (paths(name, small, n * small, chunks, run) for n in (rounds, rounds + 1))
        large_counts = paths(name, large, rounds * large, chunks, run)
        per_microbatch = (high - low) / small
        per_stage = (large_counts - low - per_microbatch * rounds * (large - small)) / (large - small)
        return low + per_microbatch * (microbatches - rounds * small) + per_stage * (stages - small)
    if microbatches > base + stages:
        low, high = paths(name, stages, base, chunks, run), paths(name, stages, base + stages, chunks, run)
        return low + (microbatches - base) // stages * (high - low)
    table = schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    references = REFERENCES if table.split else REFERENCES[:3]
    rows = [(path if run == "asynchronous" else slowest)(table, times) for times in references]
    return np.array(rows + rows[:1] * (len(REFERENCES) - len(rows)), float)


def counts(
    name: np.ndarray | str,
    stages: np.ndarray | int,
    microbatches: np.ndarray | int,
    chunks: np.ndarray | int,
    *,
    run: Run = "asynchronous",
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns the counts of the longest paths of many schedules, [schedules, references, ops], and their shape.

    Args:
      name: Name of a schedule of the library; like the next three, a single value, or an array that broadcasts.
      stages: Size of the axis `pipe`.
      microbatches: Number of microbatches.
      chunks: Parts on each stage.
      run: "asynchronous": a stage starts an op as soon as its input has arrived; "barrier": all stages start a tick
        together.

    Raises:
      JaxparError: If the library has no such schedule, or it does not support these numbers.
    """
    name, stages, microbatches, chunks = np.broadcast_arrays(name, stages, microbatches, chunks)
    names, code = np.unique(name, return_inverse=True)
    key = np.ravel_multi_index(
        (chunks.ravel(), stages.ravel(), code.ravel(), microbatches.ravel()),
        (chunks.max() + 1, stages.max() + 1, len(names), microbatches.max() + 1),
    )
    _, first, indices = np.unique(key, return_index=True, return_inverse=True)
    distinct = zip(*(array.ravel()[first].tolist() for array in (name, stages, microbatches, chunks)), strict=True)
    return np.stack([paths(*kind, run) for kind in distinct])[indices.ravel()], name.shape


def span(path_counts: tuple[np.ndarray, tuple[int, ...]], times: tuple[Any, ...]) -> Any:
    """Returns the seconds from the first op to the end of the last.

    Args:
      path_counts: The result of `counts`.
      times: Seconds of each of `OPS` for one part, as numbers or arrays that broadcast with those of the schedules.

    >>> float(span(counts("1f1b", 4, 8, 1), (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)))  # (8 + 4 - 1) x 3
    33.0
    """
    rows, shape = path_counts
    cost = np.stack([np.broadcast_to(time, shape).ravel() for time in times], axis=1)
    return np.einsum("nro,no->nr", rows, cost).max(axis=1).reshape(shape)


# `head="auto"` of `jaxpar.Pipeline` for a decoder: the head on the last stage, or spread over all stages.


def auto_head(shape: Shape, candidate: Candidate) -> Any:
    """Returns `last` or `spread` for every candidate, with the rule of `jaxpar.parallel.head_placement`."""
    table = shape.vocab * shape.dim / candidate.tensor
    freed = HELD * table * (2 - shape.tied) * (1 - 1 / np.asarray(candidate.pipe))
    divides = np.equal(shape.vocab % (candidate.pipe * candidate.tensor), 0)
    looks_up = np.greater(candidate.context, 1) & np.equal(candidate.tensor, 1)
    spread = ~looks_up & candidate.schedule_traits.phased & divides & np.not_equal(candidate.zero, 2) & (freed >= LEAST)
    return np.where(spread, "spread", "last")


# Bytes of sharding during a step, besides the training state: unreduced gradients and gathered parameters.


def gathers_once(candidate: Candidate, recipe: Recipe) -> Any:
    """Whether all parameters are shards between steps, and are gathered once per step."""
    sharded_parameters = np.greater_equal(candidate.zero, recipe.sharded_from) & np.less(candidate.zero, 3)
    return sharded_parameters & np.greater(candidate.shards, 1)


def gradient_bytes(
    gradients: np.ndarray | float,
    candidate: Candidate,
    software: SoftwareModel,
    recipe: Recipe,
    *,
    stacked: float = 1.0,
) -> Any:
    """Returns the bytes of gradients and of their sum in the backward pass, if each microbatch reduces them.

    A scan over layers returns their gradients all at once, for the share `stacked` of all parameters; other gradients
    are added one by one. Their dtype is that of the stored parameters, or of the copy that is gathered for a step.
    """
    if not software.reduce_every_microbatch:
        return gradients
    unpipelined, several = np.equal(candidate.pipe, 1), np.greater(candidate.microbatches, 1)
    scattered = unpipelined & ~several & np.equal(candidate.zero, 1)
    dtype_ratio = np.where(gathers_once(candidate, recipe), software.wire[1] / max(recipe.gradients, 1e-9), 1.0)
    extra = np.where(unpipelined & several, stacked * dtype_ratio * gradients, 0.0)
    return np.where(scattered, gradients / candidate.shards, gradients) + extra


def gathered_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Any:
    """Returns the bytes of gathered parameters: a layer and the next, or all parameters of a stage.

    All are gathered for a step if they are shards between steps, except with ZeRO-3.
    """
    for_a_step = gathers_once(candidate, recipe)
    of_stage = stage_parameters(shape, candidate, "last")
    layer = np.where(
        np.equal(candidate.zero, 3) & np.greater(candidate.fsdp, 1), device_layer_parameters(shape, candidate.tensor), 0
    )
    return software.wire[0] * np.where(for_a_step, of_stage, 2 * layer)
