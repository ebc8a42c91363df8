"""The contracts of layouts, for each row of `layout_table.py`; the programs of a row are compiled once."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import plain_loop
import pytest
import toy_axis
from flax import nnx
from layout_table import CONTRACTS, LIBRARY, MODELS, ROWS, SMALL
from layouts import on_device
from tiny import assert_same_arrays, optimizer

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.errors import JaxparError
from jaxpar.mesh import axes
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel.techniques import all_techniques
from jaxpar.parallel.techniques.context import HOW
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import JAXPAR
from jaxpar.plan.memory import static
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR as BYTES

OPTIMIZER = optimizer()
SAVED = 2  # steps before the checkpoint
PLANNED = ("pipe", "data", "fsdp", "context", "tensor", "sequence")
MARKS = {"every run": [], **{tier: [getattr(pytest.mark, tier)] for tier in ("slow", "nightly", "full")}}


@pytest.fixture(autouse=True)
def added_axis():
    """An axis and a technique that jaxpar does not have, for the row that uses them."""
    with axes.add_axis(toy_axis.AXIS), all_techniques.with_technique(toy_axis.TECHNIQUE):
        yield


def contract(name):
    """Parametrizes a test by the rows that are not exempt; those of one row run in one worker."""
    rows = [
        pytest.param(row, id=row.name, marks=[pytest.mark.xdist_group(row.name), *MARKS[row.tier]])
        for row in ROWS
        if name not in row.exempt
    ]
    parameters = pytest.mark.parametrize("row", rows)
    return lambda test: pytest.mark.spread(len(rows))(parameters(test))  # a row runs in its tier, none is thinned out


@cache
def plain(name):
    """Returns losses, and parameters after the last step, of Flax and optax on one device."""
    model = MODELS[name]
    with nnx.use_eager_sharding(False):  # no mesh is there for the names of dims
        return plain_loop.train(model.make, lambda rngs: model.make(rngs=rngs), model.loss, OPTIMIZER, model.batch)


def step_of(row, parallel, devices=None):
    return jp.train_step(jp.compose(MODELS[row.model].make, parallel, devices), MODELS[row.model].loss, OPTIMIZER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function from a row to its step, losses, last state, and folder with a checkpoint."""

    @cache
    def run(row):
        step, folder, losses = step_of(row, row.parallel), tmp_path_factory.mktemp("saved"), []
        state = jp.init_state(step.layout, OPTIMIZER, seed=0)
        for number in range(plain_loop.STEPS):
            if number == SAVED:
                save(folder, state)
            state, metrics = step(state, MODELS[row.model].batch)
            losses.append(float(metrics["loss"]))
        return step, losses, state, folder

    return run


def save(folder, state):
    store = Store(folder, Checkpoints())
    store.save(SAVED, state, {})
    store.finish()


@contract("equal")
def test_losses_and_parameters_equal_flax_and_optax_on_one_device(row, trained):
    _, losses, state, _ = trained(row)
    expected_losses, expected_params = plain(row.model)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_same_arrays(state.params, expected_params)


@contract("bytes")
def test_the_state_on_a_device_takes_the_bytes_of_a_plan(row, trained):
    step, _, state, _ = trained(row)
    schedule = step.layout.schedule.name if row.parallel.pipe > 1 else Candidate.schedule
    sizes = {key: getattr(row.parallel, key) for key in PLANNED}
    candidate = Candidate(**sizes, zero=row.parallel.stage, schedule=schedule)
    parameters, _, moments = static(Shape.from_settings(SMALL), candidate, BYTES, "first", spmd=JAXPAR.spmd)
    assert on_device(state.params) == parameters
    assert on_device([leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]) == moments


@contract("restored")
def test_a_checkpoint_goes_on_after_another_layout(row, trained, tmp_path):
    """The other one has four devices; the round trip keeps all arrays bit for bit."""
    step, losses, last, folder = trained(row)
    other = step_of(row, jp.Parallel(fsdp=4), jax.devices()[:4])
    moved, number = Store(folder, Checkpoints()).restore(other.abstract())
    assert number == SAVED
    save(tmp_path, moved)
    state, _ = Store(tmp_path, Checkpoints()).restore(step.abstract())
    state, metrics = step(state, MODELS[row.model].batch)
    assert float(metrics["loss"]) == losses[SAVED]
    assert_same_arrays(state, last, 0)


@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@contract("collectives")
def test_the_compiled_program_sends_the_bytes_of_theory(row):
    model = MODELS[row.model]
    layout = jp.compose(model.wide, row.parallel, jp.target_devices("h100:1x8"))
    report = jp.inspect(jp.train_step(layout, model.loss, optax.adamw(1e-3)), model.wide_batch)
    sent = {}
    for entry in report.ledger:
        if entry.payload > 64:  # scalars are left out
            sent[entry.axis, entry.kind] = sent.get((entry.axis, entry.kind), 0) + entry.step_payload
    assert sent == {key: pytest.approx(size, rel=2e-3) for key, size in row.collectives.items()}


@contract("refused")
def test_a_misuse_is_refused_with_the_rule_and_a_way_out(row):
    with pytest.raises(JaxparError, match=row.refusal) as caught:
        jp.compose(MODELS[row.model].make, replace(row.parallel, **row.misuse))
    assert all(problem.rule and problem.fix for problem in caught.value.problems)


def test_every_row_has_each_contract_or_a_reason():
    for row in ROWS:
        assert row.exempt.keys() <= CONTRACTS, row.name
        assert all(row.exempt.values()), row.name
        assert bool(row.collectives) != ("collectives" in row.exempt), row.name


def test_every_technique_has_a_row():
    declared = [row.parallel for row in ROWS]
    assert {axis for p in declared for axis, size in p.sizes.items() if size > 1} == {
        *axes.AXES,
        *all_techniques.TECHNIQUES,
    }
    assert {p.stage for p in declared if p.fsdp > 1 and p.pipe == 1} == {0, 1, 2, 3}
    assert {p.context_by for p in declared if p.context > 1} == {*HOW}
    assert {p.sequence for p in declared if p.tensor > 1 and p.pipe == 1} == {True, False}
    assert {p.pipeline.schedule for p in declared if p.pipe > 1} == {*LIBRARY}
