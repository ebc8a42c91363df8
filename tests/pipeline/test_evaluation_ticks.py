"""An evaluation runs the forwards of its table in as few ticks as they need, whatever the table does between them."""

import itertools

import pytest

from jaxpar.errors import JaxparError
from jaxpar.pipeline.run.tick_program import TickKind, program
from jaxpar.pipeline.tables.generators import forwards
from jaxpar.pipeline.tables.library import LIBRARY, schedule

SIZES = ((2, 4), (3, 7), (4, 16), (4, 64), (8, 16))


def tables():
    """Returns every schedule with every number of chunks up to 4, where it takes these sizes."""
    for name, (stages, microbatches), chunks in itertools.product(LIBRARY, SIZES, (1, 2, 3, 4)):
        try:
            yield schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
        except JaxparError:
            continue


TABLES = list(tables())


@pytest.mark.parametrize("name", LIBRARY)
def test_forwards_take_as_few_ticks_as_they_need(name):
    """A ring ends on its last stage, which starts P - 1 ticks late; a v has as far to go back."""
    own = [table for table in TABLES if table.name == name]
    assert own
    for table in own:
        late = (table.stages - 1) * (2 if table.placement == "v" else 1)
        assert len(forwards(table)) == table.microbatches * table.chunks + late


def test_the_largest_gap_is_closed():
    table = schedule("zb_v", stages=4, microbatches=64)
    kept = sum(any(cell and cell.op == "F" for cell in row) for row in table.cells)
    assert (kept, len(program(table, forward_only=True).rows)) == (372, 134)


@pytest.mark.parametrize("name", LIBRARY)
def test_every_forward_runs_once_on_its_stage_after_the_one_before_it(name):
    for table in (table for table in TABLES if table.name == name):
        done = {}
        for tick, row in enumerate(forwards(table)):
            for stage, cell in enumerate(row):
                if cell:
                    assert cell.op == "F"
                    key = cell.microbatch, table.part(stage, cell.chunk)
                    assert key not in done
                    assert not key[1] or done[key[0], key[1] - 1] < tick
                    done[key] = tick
        assert set(done) == set(itertools.product(range(table.microbatches), range(table.parts)))


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_an_evaluation_has_the_head_in_no_tick_without_it(name):
    """In a mixed table a tick may be anything; forwards alone are all of a kind, so nothing is chosen at run time."""
    made = program(schedule(name, stages=4, microbatches=16), forward_only=True)
    kinds = list(unrolled(made.loops))
    assert all(kind.ops == {"F"} for kind in kinds)
    assert sum(kind.last for kind in kinds) == 16


def unrolled(body):
    for each in body:
        if isinstance(each, TickKind):
            yield each
        else:
            yield from (kind for _ in range(each.repeats) for kind in unrolled(each.body))
