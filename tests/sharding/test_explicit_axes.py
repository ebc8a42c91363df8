"""Models in JAX's explicit-sharding style train on any layout as they do without it, their axes mapped by rules."""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from explicit_model import Explicit, KeepsMesh, KeepsMeshInLinen, Plain
from flax import nnx
from jax.sharding import AxisType, Mesh
from tiny import Annotated, assert_same_arrays, on_one_device, token_loss, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.mesh.target import missing_plugin

RULES = {"tp": "tensor"}
SPLIT = jp.Parallel(data=4, tensor=2)
CHAIN = optax.adam(1e-3)
ROWS = {name: jax.ShapeDtypeStruct((16, 8), "int32") for name in ("inputs", "targets")}
ROWS["mask"] = jax.ShapeDtypeStruct((16, 8), "float32")


@cache
def alone():
    losses, state, _ = on_one_device(Plain, loss=token_loss, steps=3)
    return losses, state


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(jp.Parallel(data=8, rules={"tp": None}), marks=pytest.mark.full),
        pytest.param(jp.Parallel(fsdp=4, tensor=2, rules=RULES), marks=pytest.mark.full),
        jp.Parallel(data=2, fsdp=2, tensor=2, zero=2, rules=RULES),
    ],
    ids=["data", "fsdp x tensor", "2x2x2"],
)
def test_losses_and_parameters_equal_one_device(layout):
    want, expected = alone()
    got, state, step = train(Explicit, layout, loss=token_loss, steps=3)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)
    if layout.tensor == 2:
        assert "tensor" in step.layout.describe("layers/0/up")


def test_what_it_says_of_activations_is_in_the_program():
    """Its axis of examples is all that the layout has; a dim of which it says nothing is left free."""
    step = jp.train_step(jp.compose(Explicit, jp.Parallel(data=2, fsdp=2, tensor=2, rules=RULES)), token_loss, CHAIN)
    program = step.lower(step.abstract(), ROWS).as_text()
    for said in ('[{"data", "fsdp"}, {?}, {"tensor"}]', '[{"data", "fsdp"}, {?}, {?}]'):
        assert f"<@mesh, {said}>" in program


def test_an_axis_that_no_rule_maps_is_refused_with_the_way_out():
    step = jp.train_step(jp.compose(Explicit, jp.Parallel(data=8)), token_loss, CHAIN)
    with pytest.raises(JaxparError, match="'tp' is no axis of the mesh") as refusal:
        step.lower(step.abstract(), ROWS)
    assert 'rules={"tp": "tensor"} in Parallel, or {"tp": None}; or the model without shardings' in str(refusal.value)


def test_an_axis_that_splits_nothing_says_which_names_have_no_rule():
    with pytest.raises(JaxparError, match=r"tensor=2 does nothing[\s\S]*as rules=\{'tp': 'tensor'\}"):
        jp.compose(partial(nnx.Linear, 16, 32, kernel_metadata={"out_sharding": ("fsdp", "tp")}), SPLIT)


def inputs_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return losses.sum(), losses.size


def own_mesh(*sizes):
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("data", "tp"))


def linen_with(mesh):
    return jp.from_linen(KeepsMeshInLinen(mesh), np.zeros((2, 8), np.int32))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("made_with", "sizes", "layout"),
    [
        pytest.param(linen_with, (1, 1), jp.Parallel(data=8), marks=pytest.mark.full),
        (lambda mesh: partial(KeepsMesh, mesh=mesh), (2, 4), jp.Parallel(data=2, fsdp=2, tensor=2, rules=RULES)),
    ],
    ids=["of one device", "of eight"],
)
def test_a_model_that_keeps_a_mesh_of_its_own_is_split_as_the_layout_says(made_with, sizes, layout):
    """Work that devices repeat would be a warning, which is an error here."""
    want, expected, _ = on_one_device(made_with(own_mesh(1, 1)), loss=inputs_loss, steps=2)
    got, state, _ = train(made_with(own_mesh(*sizes)), layout, loss=inputs_loss, steps=2)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)


def test_an_axis_of_a_mesh_of_its_own_that_no_rule_maps_is_refused():
    step = jp.train_step(jp.compose(partial(KeepsMesh, mesh=own_mesh(2, 4)), jp.Parallel(data=8)), token_loss, CHAIN)
    with pytest.raises(JaxparError, match="'tp' is no axis of the mesh"):
        step.lower(step.abstract(), ROWS)


def explicit_mesh(devices):
    return Mesh(np.array(devices).reshape(2, 4), ("tensor", "fsdp"), axis_types=(AxisType.Explicit,) * 2)


@pytest.mark.nightly
def test_on_a_mesh_with_explicit_axes_losses_are_those_on_auto_axes():
    layout = jp.Parallel(fsdp=4, tensor=2)
    want, *_ = train(Annotated, layout, steps=2, loss=token_loss)
    mesh = explicit_mesh(jax.devices())
    with jax.set_mesh(mesh):
        got, *_ = train(Annotated, layout, mesh, steps=2, loss=token_loss)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(JaxparError, match="tensor=4 on a mesh with tensor=2"):
        jp.compose(Annotated, jp.Parallel(fsdp=2, tensor=4), mesh)


@pytest.mark.nightly
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_on_gpus_the_ledgers_on_explicit_and_auto_axes_are_one():
    devices = jp.target_devices("h100:1x8")
    ledgers = []
    for given in (explicit_mesh(devices), list(np.array(devices).reshape(2, 4).T.flat)):
        layout = jp.compose(Explicit, jp.Parallel(fsdp=4, tensor=2, rules=RULES), given)
        step = jp.train_step(layout, token_loss, CHAIN)
        ledgers.append([(e.kind, e.axes, e.dtype, e.step_payload) for e in jp.inspect(step, ROWS).ledger])
    assert ledgers[0] == ledgers[1]
    gathered = [payload for kind, axes, _, payload in ledgers[0] if kind == "all-gather" and axes != ("fsdp",)]
    assert all(payload <= 16 * 8 * 32 * 4 for payload in gathered)
