"""The generators of schedules.

Synchronous ones: some forwards, then alternating backwards and forwards, then a flush. They differ in the number of
warm-up forwards, and in the order of microbatches and chunks.

Others split a backward, and fill their bubbles with the weight-gradient half of a backward.

The preceding stage waits only for B, so W can run when the stage would idle. If F, B and W take one tick each, all
tables here have (P-1) idle cells per stage. In ZB-H2 and ZB-V none of these is between the first and the last op of a
stage, so they have no bubble if a stage does not wait for the flush.
"""

from collections.abc import Callable

from jaxpar.pipeline.tables.schedule import Cell, Row, Schedule, StageCut, from_orders


def stage_order(forwards: list[Cell], backwards: list[Cell], ahead: int) -> list[Cell]:
    """Returns the cells of a stage in order: `ahead` forwards, then alternating backwards and forwards."""
    cells = forwards[:ahead]
    for n, backward in enumerate(backwards):
        cells += [backward, *forwards[ahead + n : ahead + n + 1]]
    return cells


def breadth_first(microbatches: int, chunks: int) -> tuple[list[Cell], list[Cell]]:
    """Returns the order of a stage's forwards and of its backwards: all microbatches of one chunk, then of the next."""
    forwards = [Cell("F", m, c) for c in range(chunks) for m in range(microbatches)]
    return forwards, [Cell("B", m, c) for c in reversed(range(chunks)) for m in range(microbatches)]


def depth_first(stages: int, microbatches: int, chunks: int) -> tuple[list[Cell], list[Cell]]:
    """Returns the order of a stage's forwards and of its backwards: `stages` microbatches at a time in all chunks.

    Source: Narayanan et al. (2021), arXiv:2104.04473, section 2.2.
    """
    groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
    forwards = [Cell("F", m, c) for group in groups for c in range(chunks) for m in group]
    return forwards, [Cell("B", m, c) for group in groups for c in reversed(range(chunks)) for m in group]


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """GPipe: Huang et al. (2018), arXiv:1811.06965."""
    return _uniform_schedule("gpipe", stages, microbatches, 1)


def looped_bfs(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Looped breadth-first schedule: Lamy-Poirier (2022), arXiv:2211.05953; with one chunk it is gpipe."""
    return _uniform_schedule("looped_bfs", stages, microbatches, chunks)


def _uniform_schedule(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """Each stage runs all forwards, then all backwards."""
    cells = stage_order(*breadth_first(microbatches, chunks), microbatches * chunks)
    return from_orders(name, [cells] * stages, microbatches=microbatches, chunks=chunks)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """PipeDream-Flush: Narayanan et al. (2020), arXiv:2006.09503."""
    forwards, backwards = breadth_first(microbatches, 1)
    orders = [stage_order(forwards, backwards, stages - d) for d in range(stages)]
    return from_orders("1f1b", orders, microbatches=microbatches)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B: Narayanan et al. (2021), arXiv:2104.04473, section 2.2.2."""
    forwards, backwards = depth_first(stages, microbatches, chunks)
    orders = [stage_order(forwards, backwards, warmup_forwards(stages, chunks, d)) for d in range(stages)]
    return from_orders("interleaved", orders, microbatches=microbatches, chunks=chunks)


def warmup_forwards(stages: int, chunks: int, stage: int) -> int:
    """Returns the number of forwards before the first backward.

    These are the 2(P-1-d) + (v-1)P warm-up forwards of Megatron-LM and the first forward of its steady state. Tables
    of the function `phased` have the same number.
    """
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1


def phased(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """Alternates ticks with only forwards and ticks with only backwards; omits ticks without any op.

    Forward k of stage d runs in phase k + d. The last stage's first backward runs in the phase of the forward that it
    needs, vP - 1, and backward k of stage d in phase vP - 1 + k + (P - 1 - d). No stage waits between its forwards, nor
    between its backwards.
    """
    forwards, backwards = breadth_first(microbatches, 1) if chunks == 1 else depth_first(stages, microbatches, chunks)
    offset, rows = chunks * stages - 1, []
    for phase in range(len(forwards) + offset + stages - 1):
        for cells, first in ((forwards, phase), (backwards, phase - offset - (stages - 1))):
            positions = [first - d if cells is forwards else first + d for d in range(stages)]
            rows.append(tuple(cells[k] if 0 <= k < len(cells) else None for k in positions))
    cells = tuple(row for row in rows if any(row))
    return Schedule(name=name, stages=stages, microbatches=microbatches, chunks=chunks, cells=cells)


# Packs the forwards of a table into few ticks, for an evaluation.
#
# Dropping the backwards is not enough: a table that mixes ops in a tick then has gaps in every row. zb_v on 4 stages
# with 64 microbatches would take 372 ticks, where 134 suffice.
#
# In every tick each stage takes, of the microbatches that have arrived, the one nearest to the end of the model, so
# that few wait; or the one nearest to the beginning, which is shorter if microbatches are no multiple of the stages.
# The better of the two has Mv + P - 1 ticks on a ring of v chunks if M >= P, and 2M + 2(P - 1) in a v. No order has
# fewer: the last stage starts P - 1 ticks late, and in a v its last output passes through as many more stages.


def forwards(schedule: Schedule) -> tuple[Row, ...]:
    """Returns the table of only the forwards, in the shortest of three orders; ties go to the table's own order."""
    rows = (tuple(cell if cell and cell.op == "F" else None for cell in row) for row in schedule.cells)
    unpacked = tuple(row for row in rows if any(row))
    return min((unpacked, *(_pack_forwards(schedule, rule) for rule in (_deepest, _shallowest))), key=len)


def _deepest(cell: Cell) -> tuple[int, int]:
    return -cell.chunk, cell.microbatch


def _shallowest(cell: Cell) -> tuple[int, int]:
    return cell.chunk, cell.microbatch


def _pack_forwards(cut: StageCut, rule: Callable[[Cell], tuple[int, int]]) -> tuple[Row, ...]:
    """Builds the table in which each stage runs, in every tick, the first cell by `rule` whose input has arrived."""
    queues: list[list[Cell]] = [[] for _ in range(cut.stages)]
    queues[cut.locate(0)[0]] = [Cell("F", microbatch, 0) for microbatch in range(cut.microbatches)]
    rows: list[Row] = []
    while any(queues):
        row = tuple(min(cells, key=rule, default=None) for cells in queues)
        for stage, cell in enumerate(row):
            if cell:
                queues[stage].remove(cell)
        for stage, cell in enumerate(row):  # the next tick may read the results of this one
            if cell and (part := cut.part(stage, cell.chunk) + 1) < cut.parts:
                receiver, chunk = cut.locate(part)
                queues[receiver].append(Cell("F", cell.microbatch, chunk))
        rows.append(row)
    return tuple(rows)


LETTER_CELLS = {"F": ("F", 0), "B": ("B", 0), "W": ("W", 0), "f": ("F", 1), "b": ("B", 1), "w": ("W", 1)}


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1f1b in which stage d delays its W by d backwards: Qi et al. (2023), arXiv:2401.10241."""
    orders = [_delayed_order("F" * (stages - d), microbatches, late=d) for d in range(stages)]
    return from_orders("zb_h1", orders, microbatches=microbatches)


def zb_h2(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1f1b with as many additional warm-up forwards as fill the bubble: Qi et al. (2023), arXiv:2401.10241."""
    orders = [_delayed_order("F" * (2 * (stages - d) - 1), microbatches, late=2 * d) for d in range(stages)]
    return from_orders("zb_h2", orders, microbatches=microbatches)


def _delayed_order(warm: str, microbatches: int, *, late: int) -> list[Cell]:
    """Returns a stage's cells: warm-up, then after every backward the W of `late` backwards ago and a forward."""
    cycles = ["B" + "W" * (m >= late) + "F" * (m + len(warm) < microbatches) for m in range(microbatches)]
    return parse_order(warm[:microbatches] + "".join(cycles) + "W" * min(late, microbatches))


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """ZB-V: the parts go up the stages and back, so that the first and the last part share a stage.

    Source: Qi et al. (2024), arXiv:2405.15362; the order within a stage is the one that
    PyTorch's `ScheduleZBVZeroBubble` documents: warm-up in three steps, steady state, two steps down.
    """
    orders = []
    for d in range(stages):
        remaining = stages - d
        orders.append(
            parse_order(
                "F" * (2 * remaining - 1)
                + "fF" * d
                + "fbw" * remaining
                + "FBWfbw" * (microbatches - 2 * stages + 1 + d)
                + "BWfbw" * (remaining - 1)
                + "Bb" * d
                + "BW" * remaining
                + "w" * d
                + "W" * d
            )
        )
    return from_orders("zb_v", orders, microbatches=microbatches, chunks=2, placement="v")


def dualpipe_v(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """DualPipeV: forwards of one chunk alternate with backwards of the other, in eight steps.

    In DeepSeek's DualPipeV a forward and a whole backward of the main step run at once and hide each other's messages,
    with a bubble of (P-1)(F&B + B - 3W). Here a cell is one op, so the pair is F, B, W in three ticks. A stage sends
    the result of B before it runs W, so the bubble is P-1 ticks.

    Source: DeepSeek-AI (2024), arXiv:2412.19437, section 3.2.1, cut in half as in github.com/deepseek-ai/DualPipe.
    """
    orders = []
    for d in range(stages):
        remaining = stages - 1 - d
        drain = "bB" * (d + 1)  # step 6; its second half delays the weight gradients
        delayed = drain[d + 1 :] + "B" * remaining
        weights = str.maketrans("bB", "wW")
        delayed_weights = delayed.translate(weights)
        orders.append(
            parse_order(
                "F" * (2 * remaining)
                + "Ff" * (d + 1)
                + "bwf" * remaining
                + "FbwfBW" * (microbatches - 2 * stages + d + 1)
                + "bwfBW" * remaining
                + "".join(b + b.translate(weights) for b in drain[: d + 1])
                + drain[d + 1 :]
                + "".join(weight + "B" for weight in delayed_weights[:remaining])
                + delayed_weights[remaining:]
            )
        )
    return from_orders("dualpipe_v", orders, microbatches=microbatches, chunks=2, placement="v")


def parse_order(ops: str) -> list[Cell]:
    """Parses a stage's order in letters (lower case for chunk 1); the n-th use of a letter is microbatch n.

    >>> print(*parse_order("FFfbB"))
    F0 F1 F0'1 B0'1 B0
    """
    count = dict.fromkeys(LETTER_CELLS, -1)
    cells = []
    for letter in ops:
        count[letter] += 1
        op, chunk = LETTER_CELLS[letter]
        cells.append(Cell(op, count[letter], chunk))
    return cells
