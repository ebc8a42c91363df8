"""Packs the forwards of a table into few ticks, for an evaluation.

Dropping the backwards is not enough: a table that mixes ops in a tick then has gaps in every row. zb_v on 4 stages with
64 microbatches would take 372 ticks, where 134 suffice.

In every tick each stage takes, of the microbatches that have arrived, the one nearest to the end of the model, so that
few wait; or the one nearest to the beginning, which is shorter if microbatches are no multiple of the stages. The
better of the two has Mv + P - 1 ticks on a ring of v chunks if M >= P, and 2M + 2(P - 1) in a v. No order has fewer:
the last stage starts P - 1 ticks late, and in a v its last output passes through as many more stages.
"""

from collections.abc import Callable

from jaxpar.pipeline.tables.schedule import Cell, Row, Schedule, StageCut


def forwards(schedule: Schedule) -> tuple[Row, ...]:
    """Returns the forwards on their stages, in the shortest of three orders; the table's own wins ties."""
    rows = (tuple(cell if cell and cell.op == "F" else None for cell in row) for row in schedule.cells)
    unpacked = tuple(row for row in rows if any(row))
    return min((unpacked, *(_packed(schedule.cut, rule) for rule in (_deepest, _shallowest))), key=len)


def _deepest(cell: Cell) -> tuple[int, int]:
    return -cell.chunk, cell.microbatch


def _shallowest(cell: Cell) -> tuple[int, int]:
    return cell.chunk, cell.microbatch


def _packed(cut: StageCut, rule: Callable[[Cell], tuple[int, int]]) -> tuple[Row, ...]:
    """In every tick each stage runs the first cell, by `rule`, whose input has arrived."""
    arrived: list[list[Cell]] = [[] for _ in range(cut.stages)]
    arrived[cut.place(0)[0]] = [Cell("F", microbatch, 0) for microbatch in range(cut.microbatches)]
    rows: list[Row] = []
    while any(arrived):
        row = tuple(min(cells, key=rule, default=None) for cells in arrived)
        for stage, cell in enumerate(row):
            if cell:
                arrived[stage].remove(cell)
        for stage, cell in enumerate(row):  # the next tick may read the results of this one
            if cell and (part := cut.part(stage, cell.chunk) + 1) < cut.parts:
                receiver, chunk = cut.place(part)
                arrived[receiver].append(Cell("F", cell.microbatch, chunk))
        rows.append(row)
    return tuple(rows)
