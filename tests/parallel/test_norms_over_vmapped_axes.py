"""A norm over a named axis: of a vmap of the model it means over that axis; one of a `pmap` is left out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError

LAYOUTS = {
    "one": ({}, {}),
    "data": ({"data": 8}, {}),
    "zero 1": ({"fsdp": 8, "zero": 1}, {}),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "accumulate": ({"data": 2, "fsdp": 4}, {"accumulate": 2}),
}
SGD = optax.sgd(0.1)
BATCH = {"x": np.random.default_rng(0).normal(size=[16, 2, 4]).astype(np.float32)}
MARKS = {"2x2x2": [], "zero 3": [pytest.mark.slow], "accumulate": [pytest.mark.slow]}


def squares(model, batch):
    d = (model(batch["x"]) - batch["x"]) ** 2
    return jnp.sum(d), d.size


class Group(nn.Module):
    """A group of features, whose norm is over all groups."""

    axis: str | tuple = "groups"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RMSNorm(axis_name=self.axis)(nn.Dense(8)(x)))


class Example(nn.Module):
    """One example, whose statistics are those of the batch: as S5 is written."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False, axis_name="batch")(nn.Dense(8)(x)))


class OfPmap(nn.Module):
    """A norm of a `pmap`: its axis is nowhere."""

    axis: str | None = "devices"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False, axis_name=self.axis)(nn.Dense(8)(x)))


def over_groups(axis="groups"):
    name = {"axis_name": "groups", "variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    return nn.vmap(Group, in_axes=1, out_axes=1, **name)(axis)


OVER_BATCH = {
    "in_axes": 0,
    "out_axes": 0,
    "variable_axes": {"params": None, "batch_stats": None},
    "split_rngs": {"params": False},
    "axis_name": "batch",
}
# model, and the one that plain Flax runs: it has no axis of a pmap
LINEN = {
    "groups": (over_groups(), over_groups()),
    "groups of groups and devices": (over_groups(("groups", "devices")), over_groups()),
    "batch": (nn.vmap(Example, **OVER_BATCH)(), nn.vmap(Example, **OVER_BATCH)()),
    "pmap": (OfPmap(), OfPmap(None)),
}


def plain(module, params, state, steps, pieces):
    """Returns losses, parameters and collections of a loop of Flax and optax."""

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def mean(params, state, x):
        y, written = module.apply({"params": params, **state}, x, mutable=[*state])
        return jnp.mean((y - x) ** 2), written

    losses, kept = [], SGD.init(params)
    for _ in range(steps):
        values, total = [], jax.tree.map(jnp.zeros_like, params)
        for x in (BATCH["x"][i::pieces] for i in range(pieces)):
            (value, state), gradient = mean(params, state, x)
            values.append(value)
            total = jax.tree.map(lambda a, b: a + b / pieces, total, gradient)
        updates, kept = SGD.update(total, kept, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(np.mean(values)))
    return losses, params, state


def trained(model, layout, loss=squares, steps=2):
    sizes, numerics = LAYOUTS[layout]
    placed = jp.compose(model, jp.Parallel(**sizes), *([jax.devices()[:1]] if not sizes else []))
    state, losses = jp.init_state(placed, SGD), []
    start = jax.device_get(state)
    step = jp.train_step(placed, loss, SGD, **numerics)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return start, losses, state


@pytest.mark.nightly
@pytest.mark.parametrize("kind", some(LINEN, ["pmap"], ["groups"]))
@pytest.mark.parametrize("layout", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.full])) for name in LAYOUTS])
def test_a_linen_norm_is_over_the_axes_that_the_model_binds(kind, layout):
    model, alone = LINEN[kind]
    start, losses, state = trained(jp.from_linen(model, BATCH["x"][:1]), layout)
    pieces = LAYOUTS[layout][1].get("accumulate", 1)
    want, params, rest = plain(alone, start.params, start.model_state["collections"], 2, pieces)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays((state.params, state.model_state["collections"]), (params, rest))


class Groups(nnx.Module):
    def __init__(self, rngs, norm=nnx.LayerNorm, axis="groups"):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def layers(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers, self.norm = layers(rngs), norm(4, axis_name=axis, rngs=rngs)

    def __call__(self, x):
        def one(norm, layer, x):
            return norm(layer(x))

        axes = (None, 0, 1)
        return nnx.vmap(one, in_axes=axes, out_axes=1, axis_name="groups")(self.norm, self.layers, x)


class RMS(nnx.RMSNorm):
    """A class of the user's, which inherits the call."""


class Examples(nnx.Module):
    """Statistics of the batch, which a loss sees one by one."""

    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.LayerNorm(4, axis_name="batch", rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


def one_by_one(model, batch):
    y = jax.vmap(model, axis_name="batch")(batch["x"])
    d = (y - batch["x"]) ** 2
    return jnp.sum(d), d.size


class Devices(nnx.Module):
    def __init__(self, rngs, axis="devices"):
        self.up, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, axis_name=axis, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


# model, the one that plain Flax runs, loss
NNX = {
    "groups": (Groups, Groups, squares),
    "groups, a class of one's own": (lambda rngs: Groups(rngs, RMS), lambda rngs: Groups(rngs, RMS), squares),
    "groups and devices": (lambda rngs: Groups(rngs, axis=("groups", "devices")), Groups, squares),
    "examples": (Examples, Examples, one_by_one),
    "devices": (Devices, lambda rngs: Devices(rngs, None), squares),
}


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("kind", some(NNX, ["devices"], ["groups"]))
@pytest.mark.parametrize("layout", ["2x2x2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("one", "data"))])
def test_an_nnx_norm_is_over_the_axes_that_the_model_binds(kind, layout):
    model, alone, loss = NNX[kind]
    start, losses, state = trained(model, layout, loss)
    graph, params, rest = nnx.split(alone(nnx.Rngs(0)), nnx.Param, ...)
    nnx.replace_by_pure_dict(params, start.params)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def mean(params, rest):
        merged = nnx.merge(graph, params, rest, copy=True)
        total, count = loss(merged, BATCH)
        return total / count, nnx.state(merged, nnx.Not(nnx.Param))

    want = []
    for _ in range(2):
        (value, rest), gradient = mean(params, rest)
        params = jax.tree.map(lambda a, b: a - 0.1 * b, params, gradient)
        want.append(float(value))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays(state.params, nnx.to_pure_dict(params))
    assert_same_arrays(state.model_state, nnx.to_pure_dict(rest))


@pytest.mark.nightly
def test_axes_of_replicas_are_none_of_a_model():
    """A norm over "replica", as of a pmap, is not over the replicas of an exchange."""
    made = [trained_apart(axis) for axis in ("replica", "data", None)]
    assert made[0] == made[1] == made[2]


def trained_apart(axis):
    layout = jp.compose(
        lambda rngs: Devices(rngs, axis),
        jp.Parallel(data=2, exchange=jp.Exchange("diloco", every=2)),
        jax.devices()[:2],
    )
    step = jp.train_step(layout, squares, SGD)
    return float(step(jp.init_state(layout, SGD), BATCH)[1]["loss"])


def test_groups_of_devices_are_refused():
    grouped = lambda rngs: nnx.LayerNorm(4, axis_name="batch", axis_index_groups=[[0, 1]], rngs=rngs)  # noqa: E731
    layout = jp.compose(grouped, jp.Parallel(), jax.devices()[:1])
    with pytest.raises(JaxparError, match="axis_index_groups"):
        jp.train_step(layout, squares, SGD)(jp.init_state(layout, SGD), BATCH)
