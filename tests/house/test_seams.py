"""The house takes a new axis without being rebuilt: a toy one, added here through the public seams alone.

It is trained, compiled, saved and restored as a row of tests/contracts/layout_table.py.
"""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import toy_axis

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.job.check import check
from jaxpar.job.file import parse
from jaxpar.mesh import axes
from jaxpar.parallel.state_specs import batch_sharding
from jaxpar.parallel.techniques import all_techniques

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def toy():
    with ExitStack() as stack:
        stack.enter_context(axes.add_axis(toy_axis.AXIS))
        stack.enter_context(all_techniques.with_technique(toy_axis.TECHNIQUE))
        yield


def wide(rngs, name="wide"):
    return toy_axis.Wide(16, 32, name, rngs=rngs)


@pytest.mark.parametrize(
    "parallel", [jp.Parallel(data=4, axes={"toy": 2}), jp.Parallel(fsdp=2, zero=1, data=2, axes={"toy": 2})], ids=str
)
def test_a_new_axis_is_shown_and_splits_the_batch(parallel):
    layout = jp.compose(wide, parallel)
    assert "toy" in layout.summary()
    assert "wide/toy" in layout.explain()
    assert batch_sharding(layout, (16, 16)).spec[0] == tuple(
        axis for axis in ("data", "fsdp", "toy") if axis in layout.sizes
    )


def test_idle_use_is_refused():
    with pytest.raises(JaxparError, match="toy=2 does nothing: it splits no parameter") as caught:
        jp.compose(lambda rngs: wide(rngs, None), jp.Parallel(data=4, axes={"toy": 2}))
    assert "axes={'toy': 1} and a larger data" in str(caught.value)


def test_an_axis_without_a_field_is_declared_in_axes():
    with pytest.raises(JaxparError, match="Parallel") as caught:
        jp.Parallel(data=4, toy=2)
    assert caught.value.problems[0].fix == "axes={'toy': 2}"


def test_an_axis_that_no_technique_uses_is_refused():
    with axes.add_axis(axes.Axis(name="idle", meaning="nothing")):
        with pytest.raises(JaxparError, match="idle=2 does nothing: no technique uses the axis `idle`"):
            jp.compose(wide, jp.Parallel(data=4, axes={"idle": 2}))
    with pytest.raises(JaxparError, match=r"the axes of a mesh are .*\btoy\b"):
        jp.compose(wide, jp.Parallel(data=4, axes={"toi": 2}))


def test_it_is_declared_in_a_job():
    job = parse.loads("[parallel]\ndata = 4\n[parallel.axes]\ntoy = 2\n[mesh]\nsimulate = 8\n")
    assert job.parallel.sizes["toy"] == 2
    assert "toy=2 does nothing" in str(check(job))  # a decoder has no dim called wide


def test_the_house_does_not_know_the_toy():
    files = (ROOT / "jaxpar").rglob("*.py")
    knows = [path.relative_to(ROOT) for path in files if re.search(r"\btoy\b", path.read_text())]
    assert knows == [Path("jaxpar/parallel/declaration.py")]  # as an example of a key
