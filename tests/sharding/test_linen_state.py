"""State of a Linen module lasts in whatever container it is, what it sows does not, and each keeps its dtype."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError

SGD = optax.sgd(0.05)
RNG = np.random.default_rng(0)
BATCHES = [{name: RNG.normal(size=[16, 16]).astype(np.float32) for name in "xy"} for _ in range(3)]
LAYOUTS = {
    "one": ({}, {}),
    "data": ({"data": 8}, {}),
    "zero 3": ({"fsdp": 8}, {}),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "accumulate": ({"data": 2, "fsdp": 4}, {"accumulate": 2}),
}
MARKS = {"2x2x2": []}


class Statistics(NamedTuple):
    mean: Any
    count: Any


class Struct(struct.PyTreeNode):
    mean: Any
    count: Any


def boxed(mean, count):
    return nn.Partitioned(mean, names=("mlp",)), count


class Averaged(nn.Module):
    """A mean and a count in a container."""

    box: Any
    dim: int = 32

    @nn.compact
    def __call__(self, x):
        state = self.variable("stats", "ema", lambda: self.box(jnp.zeros(self.dim), jnp.zeros(())))
        h = nn.Dense(self.dim)(x)
        mean, count = jax.tree.leaves(state.value)
        if not self.is_initializing():
            mean, count = 0.5 * mean + 0.5 * jax.lax.stop_gradient(h).mean(0), count + 1
            state.value = jax.tree.unflatten(jax.tree.structure(state.value), [mean, count])
        return nn.Dense(16)(nn.relu(h - mean) * (1 + 0.1 * count))


class Recurrent(nn.Module):
    """The carry of an LSTM from batch to batch."""

    @nn.compact
    def __call__(self, x):
        cell = nn.OptimizedLSTMCell(16)
        carry = self.variable("carry", "lstm", cell.initialize_carry, jax.random.key(0), (16,))
        begin = jax.tree.map(lambda c: jnp.broadcast_to(c, (x.shape[0], 16)), carry.value)
        end, y = cell(begin, x)
        if not self.is_initializing():
            carry.value = jax.tree.map(lambda c: jax.lax.stop_gradient(c).mean(0), end)
        return nn.Dense(16)(y)


class Mixed(nn.Module):
    """One collection of state and of what is sown, also by a scan, and only outside of init."""

    @nn.compact
    def __call__(self, x):
        last = self.variable("stats", "last", lambda: (jnp.zeros(16), jnp.zeros(())))
        layers = nn.scan(Layer, variable_axes={"params": 0, "stats": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(name="layers")(x, None)
        self.sow("stats", "h", x)
        if not self.is_initializing():
            self.sow("stats", "late", x)
            last.value = jax.lax.stop_gradient(x).mean(0), last.value[1] + 1
        return nn.Dense(16)(x * (1 + 0.1 * last.value[1]) + last.value[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        seen = self.variable("stats", "seen", lambda: (jnp.zeros(16),))
        y = x + jnp.tanh(nn.Dense(16)(x)) + 0.1 * seen.value[0]
        self.sow("stats", "y", y)
        if not self.is_initializing():
            seen.value = (jax.lax.stop_gradient(y).mean(0),)
        return y, None


class Counted(nn.Module):
    """What is sown in one form lasts, as a loop of `apply` that hands the collection on has it; so do perturbations."""

    @nn.compact
    def __call__(self, x):
        h = self.perturb("h", x.mean(0))
        self.sow("seen", "calls", 1.0, reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)
        calls = self.get_variable("seen", "calls") if self.has_variable("seen", "calls") else 1.0
        self.sow("seen", "all", h)
        return nn.Dense(16)(x + h * calls)


class Large(nn.Module):
    """A tuple of matrices that are worth keeping in pieces."""

    @nn.compact
    def __call__(self, x):
        state = self.variable("memory", "pair", lambda: (jnp.eye(128), jnp.zeros((128, 128))))
        h = nn.Dense(128)(x)
        eye, mean = state.value
        if not self.is_initializing():
            g = jax.lax.stop_gradient(h)
            state.value = eye, 0.5 * mean + 0.5 * g.T @ g / len(g)
        return nn.Dense(16)(h @ eye + 0.1 * h @ mean)


MODELS = {
    "tuple": Averaged(lambda *of: of),
    "list": Averaged(lambda *of: [*of]),
    "dict": Averaged(lambda mean, count: {"a": mean, "b": {"c": count}}),
    "named tuple": Averaged(Statistics),
    "struct": Averaged(Struct),
    "nested": Averaged(lambda mean, count: ([mean], (count,))),
    "boxes": Averaged(boxed),
    "carry": Recurrent(),
    "mixed": Mixed(),
    "counted": Counted(),
    "large": Large(),
}
SOWN = {("stats", "h"), ("stats", "late"), ("stats", "layers", "y"), ("seen", "all")}  # what a loop of Flax leaves out


def squares(model, batch):
    d = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(d), d.size


def lasting(tree, inside=()):
    """Returns the collections as the next call of a loop of Flax gets them: without what would grow."""
    kept = {name: value for name, value in tree.items() if (*inside, name) not in SOWN}
    return {name: lasting(each, (*inside, name)) if isinstance(each, dict) else each for name, each in kept.items()}


def plain(module, params, state, pieces):
    """Returns losses, parameters and collections of a loop of Flax and optax."""

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def mean(params, state, x, y):
        out, written = module.apply({"params": params, **state}, x, mutable=[*state])
        return jnp.mean((out - y) ** 2), nn.unbox(written)

    losses = []
    for batch in BATCHES:
        values, total = [], jax.tree.map(jnp.zeros_like, params)
        for i in range(pieces):
            (value, state), gradient = mean(params, state, *(batch[name][i::pieces] for name in "xy"))
            values, state = [*values, value], lasting(state)
            total = jax.tree.map(lambda a, b: a + b / pieces, total, gradient)
        params = jax.tree.map(lambda a, b: a - 0.05 * b, params, total)
        losses.append(float(np.mean(values)))
    return losses, params, state


def trained(module, layout, loss=squares, **numerics):
    sizes, more = LAYOUTS[layout]
    model = jp.from_linen(module, jnp.zeros([2, 16]))
    placed = jp.compose(model, jp.Parallel(**sizes), *([] if sizes else [jax.devices()[:1]]))
    state, losses = jp.init_state(placed, SGD), []
    start, step = jax.device_get(state), jp.train_step(placed, loss, SGD, **more, **numerics)
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return start, losses, state


OFTEN = ("tuple", "counted")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n in MODELS])
@pytest.mark.parametrize("layout", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.full])) for name in LAYOUTS])
def test_state_lasts_in_any_container(kind, layout):
    start, losses, state = trained(MODELS[kind], layout)
    assert jax.tree.leaves(start.model_state["collections"])
    pieces = LAYOUTS[layout][1].get("accumulate", 1)
    want, params, rest = plain(MODELS[kind], start.params, start.model_state["collections"], pieces)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays((state.params, state.model_state["collections"]), (params, rest))


@pytest.mark.nightly
def test_a_loss_sees_what_a_call_sowed():
    seen = {}

    def loss(model, batch):
        total, count = squares(model, batch)
        seen.update(model.sown)
        stats = seen["stats"]
        (h,), (late,), (y,) = stats["h"], stats["late"], stats["layers"]["y"]
        assert h.shape == late.shape == y.shape[1:] == (16, 16)
        assert {*seen["stats"]} == {"h", "late", "layers"}
        return total + 0.1 * jnp.sum(h**2), count

    _, losses, state = trained(Mixed(), "one", loss)
    assert {*state.model_state["collections"]["stats"]} == {"last", "layers"}
    assert losses[0] > trained(Mixed(), "one")[1][0]


class Late(nn.Module):
    collection: str = "stats"

    @nn.compact
    def __call__(self, x):
        self.variable("stats", "a", lambda: jnp.zeros(()))
        if not self.is_initializing():
            self.variable(self.collection, "z", lambda: jnp.zeros(()))
        return nn.Dense(16)(x)


class Inside(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(Late()(x))


class Grown(nn.Module):
    """A list that each call makes longer, without `sow`."""

    @nn.compact
    def __call__(self, x):
        state = self.variable("stats", "seen", lambda: [jnp.zeros(())])
        state.value = [*state.value, jnp.zeros(())]
        return nn.Dense(16)(x)


class Written(nn.Module):
    """State that is made in one dtype and written in another."""

    made: Any
    written: Any

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(16)(x)
        last = self.variable("memory", "last", lambda: jnp.zeros((16,), self.made))
        y = nn.Dense(16)(h + 0.1 * last.value.astype(h.dtype))
        if not self.is_initializing():
            last.value = (4 * jax.lax.stop_gradient(h)[0]).astype(self.written or h.dtype)
        return y


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Late(), r"makes the variable stats/z while it is called"),
        (Inside(), r"makes the variable stats/Late_0/z while it is called"),
        (Late("other"), r"makes a variable of the collection other while it is called"),
        pytest.param(
            Grown(),
            r"writes another tree of arrays to its state than it was made with: collections/stats/seen/2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Written(jnp.int32, jnp.float32),
            r"collections/memory/last in float32, which was made in int32",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Written(jnp.float32, jnp.complex64), r"in complex64, which was made in float32", marks=pytest.mark.slow
        ),
        pytest.param(Written(jnp.uint8, jnp.int32), r"in int32, which was made in uint8", marks=pytest.mark.slow),
        pytest.param(Written(jnp.bool_, jnp.int32), r"in int32, which was made in bool", marks=pytest.mark.slow),
    ],
)
def test_what_a_compiled_step_cannot_keep_is_refused(module, message):
    with pytest.raises(JaxparError, match=message):
        trained(module, "one")


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("made", "written", "precision"),
    [
        pytest.param(jnp.float32, None, "bf16", marks=pytest.mark.slow),
        pytest.param(jnp.float16, jnp.float32, "fp32", marks=pytest.mark.slow),
        pytest.param(jnp.float32, jnp.int32, "fp32", marks=pytest.mark.slow),
        pytest.param(jnp.int32, jnp.int8, "fp32", marks=pytest.mark.slow),
        (jnp.float32, jnp.bool_, "fp32"),
    ],
)
@pytest.mark.parametrize("layout", ["one", pytest.param("accumulate", marks=pytest.mark.slow)])
def test_state_is_written_in_the_dtype_that_it_was_made_in(made, written, precision, layout):
    _, losses, state = trained(Written(made, written), layout, precision=precision)
    (last,) = jax.tree.leaves(state.model_state["collections"])
    assert last.dtype == made
    assert jnp.any(last != 0)
    assert np.isfinite(losses).all()
