"""Inside of a loss a model and its variables are of their own classes, and are used as in a step all the same."""

import copy
import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError

SGD = optax.sgd(0.1)
BATCH = {"x": np.random.default_rng(0).normal(size=[16, 16]).astype(np.float32)}
LAYOUTS = {
    "one": ({}, {}),
    "data": ({"data": 8}, {}),
    "zero 1": ({"fsdp": 8, "zero": 1}, {}),
    "zero 3": ({"fsdp": 8}, {}),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "accumulate": ({"data": 2, "fsdp": 4}, {"accumulate": 2}),
}
MARKS = {"2x2x2": []}


class Scale(nnx.Param):
    """A kind of parameter of the user's."""


class Half(nnx.Param):
    """One that is read otherwise than it is stored."""

    def get_value(self, **index):
        return super().get_value(**index) / 2


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.scale, self.half = Scale(jnp.ones((16,))), Half(jnp.ones((16,)))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x))) * self.scale + self.half[...]


class Registry(nnx.Module):
    """Classes that look at their subclasses."""

    known = {}

    def __init_subclass__(cls, *, key, **options):
        super().__init_subclass__(**options)
        assert key not in cls.known
        cls.known[key] = cls


class Keyed(Registry, key="keyed"):
    def __init__(self, rngs):
        self.one = Leaf(rngs)

    def __call__(self, x):
        return self.one(x) * (Registry.known["keyed"] is type(self))


class Leaf(Registry, key="leaf"):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def squares(model, batch):
    d = (model(batch["x"]) - batch["x"]) ** 2
    return jnp.sum(d), d.size


def penalised(of):
    def loss(model, batch):
        total, count = squares(model, batch)
        return total + count * 1e-2 * of(model), count

    return loss


def every(chosen):
    return penalised(lambda m: sum(jnp.sum(v[...] ** 2) for _, v in nnx.iter_graph(m) if chosen(v)))


BY_TYPE = {nnx.Param: lambda v: jnp.sum(v[...] ** 2), Scale: lambda v: jnp.sum(jnp.abs(v[...])), Half: lambda v: 0.0}


def dispatched(m):
    variables = jax.tree.leaves(nnx.state(m), is_leaf=lambda v: isinstance(v, nnx.Variable))
    return sum(BY_TYPE[type(v)](v) for v in variables)


def merged(m):
    graph, scales, rest = nnx.split(m, nnx.OfType(Scale), ...)
    again = nnx.clone(nnx.merge(graph, scales, rest))
    assert type(again) is Net
    return jnp.sum(again(jp.constrain(jnp.ones((8, 16)), "batch", None)) ** 2) / 8


def copied(m):
    again = copy.copy(m)
    assert type(again) is type(m) is Net
    assert type(copy.copy(m.scale)) is Scale
    return jnp.sum(again(jp.constrain(jnp.ones((8, 16)), "batch", None)) ** 2) / 8


LOSSES = {
    "type is": (Net, every(lambda v: type(v) is nnx.Param)),
    "type in": (Net, every(lambda v: type(v) in {nnx.Param, Half})),
    "table of types": (Net, penalised(dispatched)),
    "isinstance": (Net, every(lambda v: isinstance(v, nnx.Param))),
    "filter": (Net, penalised(lambda m: sum(jnp.sum(v**2) for v in jax.tree.leaves(nnx.state(m, Scale))))),
    "type of the model": (Net, penalised(lambda m: jnp.sum(m.up.kernel[...] ** 2) if type(m) is Net else 0.0)),
    "split, merge, clone": (Net, penalised(merged)),
    "copy": (Net, penalised(copied)),
    "remat": (Net, lambda m, batch: squares(lambda x: nnx.remat(lambda m, x: m(x))(m, x), batch)),
    "registry": (Keyed, squares),
}


@cache
def plain(kind):
    """Returns losses and parameters of a loop of NNX and optax."""
    make, loss = LOSSES[kind]
    layout = jp.compose(make, jp.Parallel(), jax.devices()[:1])
    start = jax.device_get(jp.init_state(layout, SGD).params)
    graph, params = nnx.split(make(nnx.Rngs(0)))
    nnx.replace_by_pure_dict(params, start)

    @jax.jit
    @jax.value_and_grad
    def mean(params):
        total, count = loss(nnx.merge(graph, params, copy=True), BATCH)
        return total / count

    losses = []
    for _ in range(2):
        value, gradient = mean(params)
        params = jax.tree.map(lambda a, b: a - 0.1 * b, params, gradient)
        losses.append(float(value))
    stored = {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(params)}
    return losses, nnx.traversals.unflatten_mapping(stored)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", some(LOSSES, ["type of the model"]))
@pytest.mark.parametrize("layout", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.full])) for name in LAYOUTS])
def test_a_loss_that_asks_for_exact_types_is_that_of_flax(kind, layout):
    make, loss = LOSSES[kind]
    sizes, numerics = LAYOUTS[layout]
    placed = jp.compose(make, jp.Parallel(**sizes), *([] if sizes else [jax.devices()[:1]]))
    state, step, losses = jp.init_state(placed, SGD), jp.train_step(placed, loss, SGD, **numerics), []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    want, params = plain(kind)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_arrays(state.params, params)


def lowered(make, loss, **numerics):
    layout = jp.compose(make, jp.Parallel(fsdp=2), jax.devices()[:2])
    step = jp.train_step(layout, loss, SGD, **numerics)
    return step.lower(step.abstract(), BATCH).as_text()


def test_copies_of_a_model_return_float32_and_its_parts_what_they_compute():
    found = {}

    def loss(model, batch):
        x = batch["x"].astype(jnp.bfloat16)
        call = lambda m, x: m(x)  # noqa: E731
        found["model"], found["copy"], found["remat"] = model(x), nnx.clone(model)(x), nnx.remat(call)(model, x)
        found["part"], found["twin"] = model.up(x), model.twin(x)
        found["kernel"] = model.up.kernel[...]
        found.update({name: value.dtype for name, value in found.items()})
        return squares(model, batch)

    class Twins(Net):
        def __init__(self, rngs, inner=True):
            super().__init__(rngs)
            self.twin = Twins(rngs, inner=False) if inner else None

    lowered(Twins, loss, precision="bf16")
    short = {name for name, dtype in found.items() if dtype == jnp.bfloat16}
    assert short == {"part", "twin", "kernel"}


def test_flax_and_the_classes_of_a_model_are_as_before_after_a_step():
    before = {**vars(nnx.Variable)}, {**vars(Net)}, {**vars(nnx.BatchNorm)}
    lowered(Net, squares)
    with pytest.raises(JaxparError, match="stop"):
        lowered(Net, lambda m, b: 1 / 0 if m(b["x"]) is None else int("stop"))
    assert ({**vars(nnx.Variable)}, {**vars(Net)}, {**vars(nnx.BatchNorm)}) == before
    assert type(pickle.loads(pickle.dumps(nnx.state(Net(nnx.Rngs(0)))))) is nnx.State


def test_a_parameter_that_a_loss_assigns_is_refused():
    def loss(model, batch):
        model.scale[...] = jnp.zeros((16,))
        return squares(model, batch)

    with pytest.raises(JaxparError, match="the parameter scale is assigned"):
        lowered(Net, loss)
