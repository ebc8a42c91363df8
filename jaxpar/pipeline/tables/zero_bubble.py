"""Schedules that fill their bubbles with the weight-gradient half of a backward.

The preceding stage waits only for B, so W can run when the stage would idle. If F, B and W take one tick each, all
tables here have (P-1) idle cells per stage. In ZB-H2 and ZB-V none of these is between the first and the last op of a
stage, so they have no bubble if a stage does not wait for the flush.
"""

from jaxpar.pipeline.tables.schedule import Cell, Schedule, from_orders

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
