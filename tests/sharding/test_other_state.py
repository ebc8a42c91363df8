"""State that is no parameter is sharded, counted and refused as parameters are; numbers are those of one device."""

import json
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models_with_state import DIM, MODELS, Adapted, batches, squares
from pairwise import some
from tiny import assert_same_arrays, on_one_device, train

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import loads
from jaxpar.job.plan import question
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.candidate import Candidate
from jaxpar.step.state import abstract, shardings

LAYOUTS = {
    "zero1": jp.Parallel(fsdp=8, zero=1),
    "zero2": jp.Parallel(fsdp=4, data=2, zero=2),
    "zero3": jp.Parallel(fsdp=8, zero=3),
    "2x2x2": jp.Parallel(data=2, fsdp=2, tensor=2),
}
WHOLE = 4 * DIM * DIM


@cache
def alone(kind):
    model, loss = MODELS[kind]
    losses, state, _ = on_one_device(model, loss=loss, data=batches, chain=CHAIN, steps=3)
    return losses, state


CHAIN = optax.adamw(1e-2, eps=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "layout", "accumulate"),
    [
        pytest.param("adapted", "zero1", 2, marks=pytest.mark.full),
        pytest.param("averaged", "zero3", 1, marks=pytest.mark.slow),
        pytest.param("averaged", "2x2x2", 1, marks=pytest.mark.slow),
        ("recurrent", "zero2", 1),
    ],
)
def test_what_a_model_writes_is_that_of_one_device(kind, layout, accumulate):
    model, loss = MODELS[kind]
    want, expected = alone(kind)
    if accumulate > 1:
        want, expected, _ = on_one_device(model, loss=loss, data=batches, chain=CHAIN, steps=3, accumulate=accumulate)
    got, state, _ = train(model, LAYOUTS[layout], loss=loss, data=batches, chain=CHAIN, steps=3, accumulate=accumulate)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays((state.params, state.model_state), (expected.params, expected.model_state))
    large = [leaf for leaf in jax.tree.leaves(state.model_state) if leaf.size == DIM * DIM]
    assert large
    assert {leaf.addressable_shards[0].data.nbytes for leaf in large} == {WHOLE // 8 * layout_copies(layout)}
    small = [leaf for leaf in jax.tree.leaves(state.model_state) if leaf.size <= DIM]
    assert all(leaf.sharding.is_fully_replicated for leaf in small)


def layout_copies(name):
    return LAYOUTS[name].data


def held(layout):
    """Returns the bytes of a device's part of a state, by arithmetic on shapes."""
    shapes = abstract(layout, CHAIN)
    sizes = jax.tree.map(
        lambda leaf, on: math.prod(on.shard_shape(leaf.shape)) * leaf.dtype.itemsize, shapes, shardings(layout, shapes)
    )
    return sum(jax.tree.leaves(sizes))


@pytest.mark.spread(0)
@pytest.mark.parametrize("layout", some(LAYOUTS, ["zero3"]))
def test_bytes_per_device_are_the_arguments_of_the_compiled_program(layout):
    made = jp.compose(Adapted, LAYOUTS[layout])
    step = jp.train_step(made, squares, CHAIN)
    batch = next(batches(1))
    compiled = step.lower(step.abstract(), batch).compile()
    rows = sum(value.nbytes for value in batch.values()) // made.replicas
    found = compiled.memory_analysis().argument_size_in_bytes
    assert found == pytest.approx(held(made) + rows, abs=256)


def test_a_frozen_base_is_counted_and_listed():
    layout = jp.compose(partial(Adapted, dim=4096), jp.Parallel(fsdp=8), 8)
    assert "other state 64.02 MiB, 8.016 MiB per device" in layout.summary()
    row = next(line for line in layout.explain().splitlines() if line.startswith("base "))
    assert "f32[4096, 4096/fsdp]" in row
    assert "8 MiB" in row
    assert "other state" in row
    assert any(line.startswith("scale ") for line in layout.explain().splitlines())


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_on_gpus_the_base_is_gathered_and_the_batch_is_not():
    layout = jp.compose(partial(Adapted, dim=512), jp.Parallel(fsdp=8), jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, squares, CHAIN)
    rows = {"inputs": jax.ShapeDtypeStruct((4096, 512), "float32"), "labels": jax.ShapeDtypeStruct((4096,), "float32")}
    report = jp.inspect(step, rows)
    gathers = [entry for entry in report.ledger if entry.kind == "all-gather" and entry.payload > 2**16]
    assert [(entry.axes, entry.step_payload) for entry in gathers] == [(("fsdp",), 4 * 512 * 512)]
    held = {share.cause: share.bytes for share in report.memory}
    assert held["other state"] == pytest.approx(4 * 512 * 512 / 8, abs=4096)


def test_linen_collections_are_counted():
    layout = jp.compose(MODELS["recurrent"][0], jp.Parallel(fsdp=8), 8)
    assert "other state 128 KiB, 16 KiB per device" in layout.summary()


def test_a_large_base_that_stays_whole_is_refused():
    with pytest.raises(JaxparError, match=r"base of \[1030, 1030\] \(4.047 MiB\) stays whole on all 4 devices of fsdp"):
        jp.compose(partial(Adapted, dim=1030), jp.Parallel(fsdp=4), 4)


PLANNED = """
from flax import nnx
from jax import numpy as jnp
from jaxpar.step.losses import classification_loss as loss

class Net(nnx.Module):
    def __init__(self, rngs, width=256):
        self.base = nnx.Variable(jnp.ones((64, width)))
        self.two = nnx.Linear(width, 10, rngs=rngs)
    def __call__(self, x):
        return self.two(x.reshape(x.shape[0], -1) @ self.base[...])
"""


@pytest.mark.nightly
def test_a_plan_and_a_check_count_it(tmp_path, monkeypatch, capsys):
    module = f"planned_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(PLANNED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = f'[model]\nname = "{module}:Net"\n[data]\nsource = "digits"\n[train]\nglobal_batch = 64\nloss = "classify"\n'
    (tmp_path / "own.toml").write_text(text)
    asked = question(loads(text, (), allow_import=True), devices=8, chip="h100", per_node=None, options={})
    base = 4 * 64 * 256
    assert asked.bytes(Candidate(fsdp=8, zero=1, microbatch=8)).state == base / 8
    assert asked.bytes(Candidate(fsdp=8, zero=0, microbatch=8)).state == base
    assert main(["check", "own.toml", "mesh.simulate=8", "parallel.fsdp=8", "--allow-import", "--json", "c.json"]) == 0
    assert "other state 64 KiB, 8 KiB per device" in capsys.readouterr().out
    assert json.loads((tmp_path / "c.json").read_text())["other_state"] == {"base": "f32[64, 256/fsdp]"}


class Assigning(nnx.Module):
    """Changes a parameter itself, in one of the ways that there are."""

    def __init__(self, how, kind=nnx.Param, *, rngs):
        self.how, self.head = how, nnx.Linear(DIM, DIM, rngs=rngs)
        self.seen = kind(jnp.zeros((DIM,)))

    def __call__(self, x):
        mean = 0.9 * self.seen[...] + 0.1 * x.mean(0)
        if self.how == "entries":
            self.seen[:] = mean
        elif self.how == "value":
            self.seen.set_value(mean)
        elif self.how == "attribute":
            self.seen = nnx.Param(mean)
        elif self.how == "another":
            self.more = nnx.Param(mean)
        return self.head(x - mean)


def traced(how, kind=nnx.Param, loss=squares):
    layout = jp.compose(partial(Assigning, how, kind), jp.Parallel(data=8))
    step = jp.train_step(layout, loss, CHAIN)
    return step.lower(step.abstract(), next(iter(batches(1))))


def by_its_loss(model, batch):
    model.seen[...] = model.seen[...] + 1
    return squares(model, batch)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (partial(traced, "entries"), "the parameter seen is assigned"),
        (partial(traced, "value"), "the parameter seen is assigned"),
        (partial(traced, "attribute"), "the parameter seen is assigned"),
        (partial(traced, "another"), "Assigning made the variable more while it was called"),
        (partial(traced, "", loss=by_its_loss), "the parameter seen is assigned"),
    ],
)
def test_a_parameter_that_a_model_assigns_is_refused_not_dropped(case, words):
    with pytest.raises(JaxparError, match=words):
        case()


def test_what_a_model_assigns_is_kept_in_a_variable_of_another_kind():
    traced("entries", nnx.Variable)
