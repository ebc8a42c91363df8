"""Schedules that fill their bubbles with the weight-gradient half of a backward.

What comes before a stage waits for B only, so that W may run whenever the stage has nothing better to do. All tables
here have (P-1) idle cells per stage, if F, B and W take one tick each. Where a flush is not waited for, what remains
is the span: the time between a stage's own first and last op, which ZB-H2 and ZB-V leave no gaps in.
"""

from jaxpar.pipeline.tables.schedule import Cell, Schedule, from_orders

OF_LETTER = {"F": ("F", 0), "B": ("B", 0), "W": ("W", 0), "f": ("F", 1), "b": ("B", 1), "w": ("W", 1)}


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1f1b whose stage d is d weights late: Qi et al. (2023), arXiv:2401.10241."""
    orders = [_late("F" * (stages - d), microbatches, late=d) for d in range(stages)]
    return from_orders("zb_h1", orders, microbatches=microbatches)


def zb_h2(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """As many more forwards at the start as fill it: Qi et al. (2023), arXiv:2401.10241."""
    orders = [_late("F" * (2 * (stages - d) - 1), microbatches, late=2 * d) for d in range(stages)]
    return from_orders("zb_h2", orders, microbatches=microbatches)


def _late(warm: str, microbatches: int, *, late: int) -> list[Cell]:
    """Returns a stage's order: after every backward the weights of `late` backwards ago, then a forward."""
    turns = ["B" + "W" * (m >= late) + "F" * (m + len(warm) < microbatches) for m in range(microbatches)]
    return numbered(warm[:microbatches] + "".join(turns) + "W" * min(late, microbatches))


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The parts go down the stages and come back, so that the last one is where the first is.

    Source: Qi et al. (2024), arXiv:2405.15362; the order within a stage is the one that
    PyTorch's `ScheduleZBVZeroBubble` documents: warm-up in three steps, steady state, two steps down.
    """
    orders = []
    for d in range(stages):
        left = stages - d
        orders.append(
            numbered(
                "F" * (2 * left - 1)
                + "fF" * d
                + "fbw" * left
                + "FBWfbw" * (microbatches - 2 * stages + 1 + d)
                + "BWfbw" * (left - 1)
                + "Bb" * d
                + "BW" * left
                + "w" * d
                + "W" * d
            )
        )
    return from_orders("zb_v", orders, microbatches=microbatches, chunks=2, placement="v")


def dualpipe_v(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Forwards of one chunk beside backwards of the other, in the eight steps of DeepSeek's DualPipeV.

    There a forward and a whole backward of the main step run at once and hide each other's messages, at a bubble of
    (P-1)(F&B + B - 3W). A cell here is one op: the pair is F, B, W in three ticks, and because the B of a pair is sent
    before its W is done, P-1 ticks are left of the bubble.

    Source: DeepSeek-AI (2024), arXiv:2412.19437, section 3.2.1, cut in half as in github.com/deepseek-ai/DualPipe.
    """
    orders = []
    for d in range(stages):
        left = stages - 1 - d
        ends = "bB" * (d + 1)  # step 6; the second half of them leaves the weights for later
        later = ends[d + 1 :] + "B" * left
        weights = str.maketrans("bB", "wW")
        owed = later.translate(weights)
        orders.append(
            numbered(
                "F" * (2 * left)
                + "Ff" * (d + 1)
                + "bwf" * left
                + "FbwfBW" * (microbatches - 2 * stages + d + 1)
                + "bwfBW" * left
                + "".join(b + b.translate(weights) for b in ends[: d + 1])
                + ends[d + 1 :]
                + "".join(weight + "B" for weight in owed[:left])
                + owed[left:]
            )
        )
    return from_orders("dualpipe_v", orders, microbatches=microbatches, chunks=2, placement="v")


def numbered(ops: str) -> list[Cell]:
    """Returns the cells of a stage's order in letters (small ones for chunk 1), microbatches counted for each letter.

    >>> print(*numbered("FFfbB"))
    F0 F1 F0'1 B0'1 B0
    """
    count = dict.fromkeys(OF_LETTER, -1)
    cells = []
    for letter in ops:
        count[letter] += 1
        op, chunk = OF_LETTER[letter]
        cells.append(Cell(op, count[letter], chunk))
    return cells
