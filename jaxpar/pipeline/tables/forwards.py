"""The forwards of a table without its backwards, as an evaluation runs them.

Between its forwards a table has ticks for its backwards. Where it mixes kinds in a tick, what is left without them has
gaps in every row: of zb_v on 4 stages with 64 microbatches 372 ticks, where 134 do.

Here each stage takes in every tick, of the microbatches that have come to it, the one nearest to the end of the model,
so that few wait; or nearest to its beginning, which is shorter where microbatches are no multiple of the stages. One of
them has Mv + P - 1 ticks on a ring of v chunks if M >= P, and 2M + 2(P - 1) in a v. No order has fewer: the last stage
starts P - 1 ticks late, and in a v what it does last has as many stages to go.
"""

from collections.abc import Callable

from jaxpar.pipeline.tables.schedule import Cell, Cut, Row, Schedule


def forwards(schedule: Schedule) -> tuple[Row, ...]:
    """Returns the forwards alone, on their stages: the shortest of the orders that are tried, its own before others."""
    rows = (tuple(cell if cell and cell.op == "F" else None for cell in row) for row in schedule.cells)
    own = tuple(row for row in rows if any(row))
    return min((own, *(_packed(schedule.cut, rule) for rule in (_deepest, _shallowest))), key=len)


def _deepest(cell: Cell) -> tuple[int, int]:
    return -cell.chunk, cell.microbatch


def _shallowest(cell: Cell) -> tuple[int, int]:
    return cell.chunk, cell.microbatch


def _packed(cut: Cut, rule: Callable[[Cell], tuple[int, int]]) -> tuple[Row, ...]:
    """Returns a table in which each stage runs in every tick the first cell, by a given order, whose input has come."""
    there: list[list[Cell]] = [[] for _ in range(cut.stages)]
    there[cut.place(0)[0]] = [Cell("F", microbatch, 0) for microbatch in range(cut.microbatches)]
    rows: list[Row] = []
    while any(there):
        row = tuple(min(cells, key=rule, default=None) for cells in there)
        for stage, cell in enumerate(row):
            if cell:
                there[stage].remove(cell)
        for stage, cell in enumerate(row):  # what a tick computes, the next may read
            if cell and (part := cut.part(stage, cell.chunk) + 1) < cut.parts:
                to, chunk = cut.place(part)
                there[to].append(Cell("F", cell.microbatch, chunk))
        rows.append(row)
    return tuple(rows)
