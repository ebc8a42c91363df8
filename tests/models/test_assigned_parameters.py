"""Layers of Flax that assign parameters train as in a loop of NNX: the optimizer updates what they assigned."""

import inspect
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError

SCALES_ARE_TRAINED = "nnx.Param(init_scales" in inspect.getsource(nnx.WeightNorm)
CHAIN = optax.adamw(1e-2, eps=1e-4, weight_decay=1e-1)
RNG = np.random.default_rng(0)
BATCHES = [{name: RNG.normal(size=[16, 4, 4, 16]).astype(np.float32) for name in "xy"} for _ in range(3)]
LAYOUTS = {
    "one": ({}, {}),
    "data": ({"data": 8}, {}),
    "zero 1": ({"fsdp": 8, "zero": 1}, {}),
    "zero 3": ({"fsdp": 8}, {}),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "accumulate": ({"data": 2, "fsdp": 4}, {"accumulate": 2}),
}


class Net(nnx.Module):
    """A layer that another one assigns, between two that nothing does."""

    def __init__(self, rngs, around, inner):
        self.first, self.last = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.normed = around(inner(16, 16, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.normed(self.first(x))))


class Twice(Net):
    """One that is called twice."""

    def __call__(self, x):
        return self.last(self.normed(nnx.relu(self.normed(self.first(x)))))


CONV = partial(nnx.Conv, kernel_size=(3, 3))
UNSCALED = partial(nnx.WeightNorm, use_scale=False, feature_axes=(0,))
MODELS = {
    "weight": partial(Net, around=nnx.WeightNorm, inner=nnx.Linear),
    "spectral": partial(Net, around=nnx.SpectralNorm, inner=nnx.Linear),
    "weight of a convolution": partial(Net, around=nnx.WeightNorm, inner=CONV),
    "spectral of a convolution": partial(Net, around=nnx.SpectralNorm, inner=CONV),
    "without a scale": partial(Net, around=UNSCALED, inner=nnx.Linear),
    "twice": partial(Twice, around=nnx.WeightNorm, inner=nnx.Linear),
    "alone": lambda rngs: nnx.WeightNorm(nnx.Linear(16, 16, rngs=rngs), rngs=rngs),
}


def squares(model, batch):
    d = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(d), d.size


def keyed(model, batch, key):
    return squares(model, {**batch, "x": batch["x"] + 0 * jax.random.normal(key, batch["x"].shape)})


@cache
def plain(kind):
    """Returns losses and all variables of the loop that Flax's guide writes."""
    layout = jp.compose(MODELS[kind], jp.Parallel(), jax.devices()[:1])
    start = jax.device_get(jp.init_state(layout, CHAIN))
    model = MODELS[kind](nnx.Rngs(0))
    given = {**by_words(start.params), **by_words(start.model_state)}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        variable.set_raw_value(jnp.asarray(given[tuple(map(str, path))]))
    optimizer = nnx.Optimizer(model, CHAIN, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        value, gradient = nnx.value_and_grad(lambda m: squares(m, batch)[0] / batch["y"].size)(model)
        optimizer.update(model, gradient)
        return value

    losses = [float(step(model, optimizer, batch)) for batch in BATCHES]
    flat = {tuple(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    return losses, flat


def by_words(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(key.key for key in keys): value for keys, value in flat}


def trained(kind, layout, loss=squares, **numerics):
    if not SCALES_ARE_TRAINED and kind not in ("without a scale", "spectral", "spectral of a convolution"):
        pytest.skip("scales of nnx.WeightNorm are bare arrays in a dict in this Flax, of which it loses the shapes")
    sizes, more = LAYOUTS[layout]
    placed = jp.compose(MODELS[kind], jp.Parallel(**sizes), *([] if sizes else [jax.devices()[:1]]))
    state, step, losses = jp.init_state(placed, CHAIN), jp.train_step(placed, loss, CHAIN, **more, **numerics), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


GRID = [(kind, layout) for kind in MODELS for layout in LAYOUTS if not (layout == "accumulate" and "spectral" in kind)]
OFTEN = [(kind, "2x2x2") for kind in ("weight", "spectral", "twice")] + [("weight of a convolution", "accumulate")]


def mark_of(kind, layout):
    rare = pytest.mark.slow if layout in ("zero 3", "accumulate") else pytest.mark.full
    return [] if (kind, layout) in OFTEN else [rare]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "layout"), [pytest.param(*case, marks=mark_of(*case)) for case in GRID])
def test_a_layer_that_assigns_trains_as_in_a_loop_of_nnx(kind, layout):
    losses, state = trained(kind, layout)
    want, flat = plain(kind)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays({**by_words(state.params), **by_words(state.model_state)}, flat)


def test_a_loss_with_a_key_trains_it_alike():
    losses, state = trained("weight", "one", keyed)
    np.testing.assert_allclose(losses, plain("weight")[0], rtol=1e-5)
    assert_same_arrays(by_words(state.params), plain("weight")[1])


def test_in_bfloat16_what_is_assigned_is_not_rounded():
    losses, state = trained("weight", "one", precision="bf16")
    np.testing.assert_allclose(losses, plain("weight")[0], rtol=2e-2)
    kernel = state.params["normed"]["layer_instance"]["kernel"]
    assert kernel.dtype == jnp.float32
    assert jnp.mean(kernel == kernel.astype(jnp.bfloat16)) < 0.1


class Own(nnx.Module):
    """A layer of the user's that does the same."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        self.layer.kernel[...] = self.layer.kernel[...] / 2
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (Own, {"data": 2}, "the parameter layer/kernel is assigned"),
        (
            MODELS["spectral"],
            {"data": 2, "exchange": jp.Exchange("diloco", every=2)},
            r"nnx.WeightNorm, nnx.SpectralNorm",
        ),
    ],
)
def test_what_would_be_lost_is_refused(model, sizes, message):
    layout = jp.compose(model, jp.Parallel(**sizes), jax.devices()[:2])
    with pytest.raises(JaxparError, match=message):
        lowered(layout)


def lowered(layout):
    step = jp.train_step(layout, squares, CHAIN)
    return step.lower(step.abstract(), BATCHES[0])


@pytest.mark.skipif(SCALES_ARE_TRAINED, reason="this Flax keeps the scales of nnx.WeightNorm in parameters")
def test_scales_that_an_older_flax_keeps_outside_of_variables_are_refused():
    layout = jp.compose(MODELS["alone"], jp.Parallel(data=8))
    with pytest.raises(JaxparError, match=r"does not show on shapes alone[\s\S]*use_scale=False"):
        jp.init_state(layout, CHAIN)
