"""The schedules of the library against their closed forms, and tables that cannot be run against an oracle."""

import itertools
import random
from dataclasses import replace

import pytest

from jaxpar.errors import JaxparError
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.price import OpTimes, price
from jaxpar.pipeline.tables.schedule import Cell, from_orders


def grid(stages=range(1, 7), microbatches=range(1, 25), chunks=range(1, 5)):
    """All cuts of the grid that a schedule of the library takes."""
    for (name, kind), P, M, v in itertools.product(LIBRARY.items(), stages, microbatches, chunks):
        if v in kind.chunks and kind.fewest_microbatches(P) <= M and not (kind.multiple_of_stages and M % P):
            yield name, P, M, v


def tables(**cuts):
    return [schedule(name, stages=P, microbatches=M, chunks=v) for name, P, M, v in grid(**cuts)]


SMALL = tables(stages=(1, 2, 3), microbatches=(1, 3, 6), chunks=(1, 2, 3))


def runs(stages, microbatches, chunks, placement, cells):
    """The oracle: an op's tick is one number, and larger than that of all it needs."""
    parts, tick_of = stages * chunks, {}
    for tick, row in enumerate(cells):
        for stage, cell in enumerate(row):
            if cell:
                back = placement == "v" and cell.chunk == 1
                part = 2 * stages - 1 - stage if back else stage + cell.chunk * stages
                if (cell.op, cell.microbatch, part) in tick_of:
                    return False
                tick_of[cell.op, cell.microbatch, part] = tick
    ops = "FBW" if any(op == "W" for op, _, _ in tick_of) else "FB"
    if set(tick_of) != set(itertools.product(ops, range(microbatches), range(parts))):
        return False
    order = []
    for m, p in itertools.product(range(microbatches), range(parts)):
        order += [(("F", m, p), ("B", m, p))]
        order += [(("F", m, p), ("F", m, p + 1)), (("B", m, p + 1), ("B", m, p))] if p + 1 < parts else []
        order += [(("B", m, p), ("W", m, p))] if "W" in ops else []
    return all(tick_of[before] < tick_of[after] for before, after in order)


def accepted(table, cells):
    try:
        return bool(replace(table, cells=tuple(map(tuple, cells))))
    except JaxparError:
        return False


@pytest.mark.nightly
def test_ticks_and_peaks_are_the_published_ones():
    count = 0
    for name, P, M, v in grid():
        table, kind = schedule(name, stages=P, microbatches=M, chunks=v), LIBRARY[name]
        assert table.ticks == kind.ticks(P, M, v), (name, P, M, v)
        assert table.peak == tuple(kind.peak(P, M, v, d) for d in range(P)), (name, P, M, v)
        assert table.stash == tuple(kind.stash(P, M, v, d) for d in range(P)), (name, P, M, v)
        assert sum(1 for _ in table) == P * (2 + table.split) * M * v
        count += 1
    assert count > 1000


@pytest.mark.parametrize(
    ("name", "chunks", "bubble"),
    [
        ("gpipe", 1, lambda P, M, v: (P - 1) / (M + P - 1)),
        ("1f1b", 1, lambda P, M, v: (P - 1) / (M + P - 1)),
        ("1f1b_phased", 1, lambda P, M, v: (P - 1) / (M + P - 1)),
        ("interleaved", 2, lambda P, M, v: (P - 1) / (v * M + P - 1)),
        ("interleaved", 4, lambda P, M, v: (P - 1) / (v * M + P - 1)),
        ("interleaved_phased", 4, lambda P, M, v: (P - 1) / (v * M + P - 1)),
        ("looped_bfs", 4, lambda P, M, v: (P - 1) / (v * M + P - 1)),
        ("zb_h1", 1, lambda P, M, v: (P - 1) / (3 * M + P - 1)),
        ("zb_h2", 1, lambda P, M, v: (P - 1) / (3 * M + P - 1)),
        ("zb_v", 2, lambda P, M, v: (P - 1) / (6 * M + P - 1)),
        ("dualpipe_v", 2, lambda P, M, v: (P - 1) / (6 * M + P - 1)),
    ],
)
def test_bubble_is_the_published_one(name, chunks, bubble):
    for P, M in ((1, 4), (2, 8), (4, 8), (4, 32), (8, 32)):
        table = schedule(name, stages=P, microbatches=M, chunks=chunks)
        assert table.bubble == pytest.approx(bubble(P, M, chunks))
        equal = OpTimes(weights=float(table.split))  # every cell takes 1
        cost = price(table, equal)
        assert cost.barrier == cost.asynchronous == pytest.approx(table.ticks / chunks)
        assert cost.barrier_bubble == pytest.approx(table.bubble)
        # idle cells of a phased table are computed too, as its program has no conditional
        assert cost.work_ratio == pytest.approx(1 / (1 - table.bubble) if table.phased else 1.0)


def test_zero_bubble_is_zero_between_a_stage_s_first_and_last_op():
    for name, P in itertools.product(("zb_h2", "zb_v"), range(1, 9)):
        for M in range(2 * P - 1, 2 * P + 5):
            table = schedule(name, stages=P, microbatches=M)
            for stage in range(P):
                at = [tick for tick, row in enumerate(table.cells) if row[stage]]
                assert at == list(range(at[0], at[0] + 3 * M * table.chunks)), (name, P, M, stage)


def test_peak_is_the_replayed_maximum():
    for table in SMALL + tables(stages=(4,), microbatches=(8,), chunks=(1, 2)):
        last = "W" if table.split else "B"
        ends = {(s, c.microbatch, c.chunk): t for t, s, c in table if c.op == last}
        begins = {(s, c.microbatch, c.chunk): t for t, s, c in table if c.op == "F"}
        kept = [
            max(sum(begins[k] <= t <= ends[k] for k in begins if k[0] == stage) for t in range(table.ticks))
            for stage in range(table.stages)
        ]
        assert table.peak == tuple(kept), table.name


def test_phased_tables_run_one_op_in_a_tick():
    phased = {"gpipe", "1f1b_phased", "interleaved_phased", "looped_bfs"}
    for table in tables(stages=(2, 4), microbatches=(8, 12), chunks=(1, 2, 3)):
        one = all(len({cell.op for cell in row if cell}) == 1 for row in table.cells)
        assert table.phased == one
        assert one or table.name not in phased, table.name


def test_interleaved_orders_are_megatron_s():
    """Narayanan et al. 2021, figure 4: two devices' worth of it, with 2 chunks."""
    table = schedule("interleaved", stages=2, microbatches=4)
    first = [str(row[0]) for row in table.cells if row[0]]
    assert " ".join(first) == "F0 F1 F0'1 F1'1 F2 B0'1 F3 B1'1 F2'1 B0 F3'1 B1 B2'1 B3'1 B2 B3"


def test_messages_cross_between_stages_only():
    for name, P, M, v in grid(stages=(1, 2, 4), microbatches=(8,), chunks=(1, 2, 3)):
        hops = P * v - 1 - (LIBRARY[name].make(P, M, v).placement == "v")  # the v turns within the last stage
        assert schedule(name, stages=P, microbatches=M, chunks=v).messages == (2 * hops * M if P > 1 else 0)


def mutants(table, rng):
    """Every way to change one cell, one of each kind: (what, cells)."""
    tick, stage = rng.randrange(table.ticks), rng.randrange(table.stages)
    cell = table.cells[tick][stage]

    def with_cell(new):
        cells = [list(row) for row in table.cells]
        cells[tick][stage] = new
        return cells

    any_cell = Cell(rng.choice("FBW"), rng.randrange(table.microbatches), rng.randrange(table.chunks))
    if cell is None:
        yield "fill", with_cell(any_cell)
        return
    yield "idle", with_cell(None)
    yield "op", with_cell(cell._replace(op=rng.choice([op for op in ("F", "B", "W", "X") if op != cell.op])))
    yield "microbatch", with_cell(cell._replace(microbatch=cell.microbatch + rng.choice([-2, -1, 1, 2])))
    yield "chunk", with_cell(cell._replace(chunk=cell.chunk + rng.choice([-1, 1])))


def test_no_table_survives_a_changed_cell():
    """But one: where there is a single W, the table without it is one of whole backwards."""
    rng, count = random.Random(0), 0
    while count < 6000:
        table = rng.choice([table for table in SMALL if not (table.split and table.parts * table.microbatches == 1)])
        for what, cells in mutants(table, rng):
            assert not accepted(table, cells), (table.name, what)
            count += 1


def test_tables_with_swapped_cells_run_if_the_oracle_says_so():
    rng, verdicts = random.Random(1), []
    for _ in range(6000):
        table = rng.choice(SMALL)
        stage, one, other = rng.randrange(table.stages), rng.randrange(table.ticks), rng.randrange(table.ticks)
        cells = [list(row) for row in table.cells]
        cells[one][stage], cells[other][stage] = cells[other][stage], cells[one][stage]
        expected = runs(table.stages, table.microbatches, table.chunks, table.placement, cells)
        assert accepted(table, cells) == expected, (table.name, one, other, stage)
        verdicts.append(expected)
    assert 300 < sum(verdicts) < 5700  # both happen


@pytest.mark.parametrize("table", SMALL[::7], ids=lambda t: f"{t.name}-{t.stages}-{t.microbatches}-{t.chunks}")
def test_the_oracle_accepts_the_library(table):
    assert runs(table.stages, table.microbatches, table.chunks, table.placement, table.cells)


REFUSED = [
    (lambda: schedule("1f1", stages=2, microbatches=2), "schedule '1f1'", "did you mean '1f1b'?"),
    (lambda: schedule("gpipe", stages=0, microbatches=2), "stages=0", "stages=4"),
    (lambda: schedule("PipeDream", stages=2, microbatches=2), "'PipeDream'", 'parallel.pipeline.weights = "stash"'),
    (lambda: schedule("gpipe", stages=2, microbatches=True), "microbatches=True", "microbatches=4"),
    (lambda: schedule("gpipe", stages=2, microbatches=2, chunks=2), "chunks=2", "interleaved"),
    (lambda: schedule("interleaved", stages=2, microbatches=2, chunks=1), "chunks=1", "chunks=2"),
    (lambda: schedule("interleaved", stages=4, microbatches=6), "microbatches=6", "microbatches=8"),
    (lambda: schedule("interleaved_phased", stages=4, microbatches=3), "microbatches=3", "microbatches=4"),
    (lambda: schedule("zb_h2", stages=4, microbatches=6), "microbatches=6", "microbatches=7"),
    (lambda: schedule("zb_v", stages=4, microbatches=6), "microbatches=6", "microbatches=7"),
    (lambda: schedule("zb_v", stages=4, microbatches=8, chunks=3), "chunks=3", "chunks=2"),
    (lambda: schedule("dualpipe_v", stages=4, microbatches=7), "microbatches=7", "microbatches=8"),
    (lambda: schedule("gpipe", stages=10, microbatches=10**9), "has 20000000180 cells", "fewer microbatches"),
    (lambda: schedule("gpipe", stages=10**6, microbatches=1), "has 2000000000000 cells", "fewer microbatches"),
    (
        lambda: from_orders("mine", [[Cell("F", 0), Cell("B", 0)], [Cell("B", 0), Cell("F", 0)]], microbatches=1),
        "stops at tick 1: stage 0 waits with B0",
        "",
    ),
    (lambda: price(schedule("gpipe", stages=2, microbatches=2), OpTimes((1.0,))), "1 times for forward", "forward=1.0"),
    (lambda: OpTimes(float("nan")), "forward=nan", "forward=1.0"),
    (lambda: OpTimes(send=-1.0), "send=-1.0", "send=1.0"),
]


@pytest.mark.parametrize(("call", "got", "fix"), REFUSED)
def test_what_cannot_be_is_refused_with_one_message(call, got, fix):
    with pytest.raises(JaxparError) as raised:
        call()
    (problem,) = raised.value.problems
    assert got in problem.got
    assert fix in problem.fix
