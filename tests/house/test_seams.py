"""The house takes a new axis without being rebuilt: a toy one, added here through the public seams alone."""

import re
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import toy_axis

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.errors import JaxparError
from jaxpar.job.check import check
from jaxpar.job.file import parse
from jaxpar.mesh import axes
from jaxpar.parallel.specs import batch_sharding
from jaxpar.parallel.techniques import table

ROOT = Path(__file__).parents[2]
OPTIMIZER = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def toy():
    with ExitStack() as stack:
        stack.enter_context(axes.add_axis(toy_axis.AXIS))
        stack.enter_context(table.with_technique(toy_axis.TECHNIQUE))
        yield


def wide(rngs, name="wide"):
    return toy_axis.Wide(16, 32, name, rngs=rngs)


def batch(step):
    return {"x": np.random.default_rng(step).normal(size=(16, 16)).astype(np.float32)}


def trained(parallel, steps=3, state=None, devices=None, first=0):
    layout = jp.compose(wide, parallel, devices)
    state = jp.init_state(layout, OPTIMIZER) if state is None else state
    step, losses = jp.train_step(layout, toy_axis.loss, OPTIMIZER), []
    for i in range(first, first + steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return layout, state, losses


def alone():
    return trained(jp.Parallel(), devices=jax.devices()[:1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "parallel",
    [
        jp.Parallel(data=4, axes={"toy": 2}),
        pytest.param(jp.Parallel(fsdp=2, axes={"toy": 4}), marks=pytest.mark.full),
        pytest.param(jp.Parallel(fsdp=2, zero=1, data=2, axes={"toy": 2}), marks=pytest.mark.full),
    ],
    ids=["data", "fsdp", "ZeRO-1"],
)
def test_a_new_axis_trains_as_one_device(parallel):
    _, one, expected = alone()
    layout, state, losses = trained(parallel)
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, whole in zip(jax.tree.leaves(state.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(whole), atol=1e-5)
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


@pytest.mark.nightly
def test_its_collective_is_found_in_the_ledger():
    devices = jp.target_devices("h100:1x8")
    step = jp.train_step(jp.compose(wide, jp.Parallel(data=4, axes={"toy": 2}), devices), toy_axis.loss, OPTIMIZER)
    report = jp.inspect(step, {"x": jax.ShapeDtypeStruct((16, 16), "float32")})
    assert any("toy" in entry.axis for entry in report.ledger)


def test_it_is_declared_in_a_job():
    job = parse.loads("[parallel]\ndata = 4\n[parallel.axes]\ntoy = 2\n[mesh]\nsimulate = 8\n")
    assert job.parallel.sizes["toy"] == 2
    assert "toy=2 does nothing" in str(check(job))  # a decoder has no dim called wide


@pytest.mark.nightly
def test_a_checkpoint_is_restored_under_another_layout(tmp_path):
    parallel = jp.Parallel(data=4, axes={"toy": 2})
    _, state, _ = trained(parallel)
    store = Store(tmp_path, Checkpoints())
    store.save(3, state, {})
    store.wait()
    _, _, expected = trained(parallel, state=state, first=3)
    other = jp.Parallel(fsdp=8)
    layout = jp.compose(wide, other)
    restored, _ = store.restore(jp.train_step(layout, toy_axis.loss, OPTIMIZER).abstract())
    _, _, losses = trained(other, state=restored, first=3)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_house_does_not_know_the_toy():
    files = (ROOT / "jaxpar").rglob("*.py")
    knows = [path.relative_to(ROOT) for path in files if re.search(r"\btoy\b", path.read_text())]
    assert knows == [Path("jaxpar/parallel/declaration.py")]  # as an example of a key
