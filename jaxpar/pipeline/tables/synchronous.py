"""Schedules with whole backwards: a number of forwards, then backwards and forwards in turns, then a flush.

They differ in how many forwards a stage runs ahead, and in which microbatch of which chunk comes next.
"""

from jaxpar.pipeline.tables.schedule import Cell, Schedule, from_orders


def order(forwards: list[Cell], backwards: list[Cell], ahead: int) -> list[Cell]:
    """Returns the cells of a stage in order: `ahead` forwards, then backwards and forwards in turns."""
    cells = forwards[:ahead]
    for n, backward in enumerate(backwards):
        cells += [backward, *forwards[ahead + n : ahead + n + 1]]
    return cells


def breadth_first(microbatches: int, chunks: int) -> tuple[list[Cell], list[Cell]]:
    """Returns forwards and backwards of a stage: all microbatches through a chunk, then through the next."""
    forwards = [Cell("F", m, c) for c in range(chunks) for m in range(microbatches)]
    return forwards, [Cell("B", m, c) for c in reversed(range(chunks)) for m in range(microbatches)]


def grouped(stages: int, microbatches: int, chunks: int) -> tuple[list[Cell], list[Cell]]:
    """Returns forwards and backwards of a stage: `stages` microbatches at a time through all of its chunks.

    Source: Narayanan et al. (2021), arXiv:2104.04473, section 2.2.
    """
    groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
    forwards = [Cell("F", m, c) for group in groups for c in range(chunks) for m in group]
    return forwards, [Cell("B", m, c) for group in groups for c in reversed(range(chunks)) for m in group]


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Huang et al. (2018), arXiv:1811.06965."""
    return _same_on_all("gpipe", stages, microbatches, 1)


def looped_bfs(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Lamy-Poirier (2022), arXiv:2211.05953; with one chunk it is gpipe."""
    return _same_on_all("looped_bfs", stages, microbatches, chunks)


def _same_on_all(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards."""
    cells = order(*breadth_first(microbatches, chunks), microbatches * chunks)
    return from_orders(name, [cells] * stages, microbatches=microbatches, chunks=chunks)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """PipeDream-Flush: Narayanan et al. (2020), arXiv:2006.09503."""
    forwards, backwards = breadth_first(microbatches, 1)
    orders = [order(forwards, backwards, stages - d) for d in range(stages)]
    return from_orders("1f1b", orders, microbatches=microbatches)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Narayanan et al. (2021), arXiv:2104.04473, section 2.2.2."""
    forwards, backwards = grouped(stages, microbatches, chunks)
    orders = [order(forwards, backwards, warm(stages, chunks, d)) for d in range(stages)]
    return from_orders("interleaved", orders, microbatches=microbatches, chunks=chunks)


def warm(stages: int, chunks: int, stage: int) -> int:
    """Returns the forwards before the first backward: Megatron-LM's 2(P-1-d) + (v-1)P, and the one of the first pair.

    It is also how many of them have passed by when the phased table gets there.
    """
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1


def phased(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    """Forwards of all stages in one tick, backwards in the next; ticks in which nobody has any are left out.

    Forward k of stage d runs in phase k + d. The last stage's first backward runs in the phase of the forward it
    needs, vP - 1, and backward k of stage d in phase vP - 1 + k + (P - 1 - d). No stage ever waits within its row of
    forwards, nor within its row of backwards.
    """
    forwards, backwards = breadth_first(microbatches, 1) if chunks == 1 else grouped(stages, microbatches, chunks)
    turn, rows = chunks * stages - 1, []
    for phase in range(len(forwards) + turn + stages - 1):
        for cells, first in ((forwards, phase), (backwards, phase - turn - (stages - 1))):
            at = [first - d if cells is forwards else first + d for d in range(stages)]
            rows.append(tuple(cells[k] if 0 <= k < len(cells) else None for k in at))
    cells = tuple(row for row in rows if any(row))
    return Schedule(name=name, stages=stages, microbatches=microbatches, chunks=chunks, cells=cells)
