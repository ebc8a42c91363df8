"""Attributes of a model that have the name of a protocol of jaxpar's, and hold something else, are the model's own."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.errors import JaxparError

SGD = optax.sgd(0.1)
BATCH = {"x": np.random.default_rng(0).normal(size=[16, 16]).astype(np.float32)}


def squares(model, batch):
    d = (model(batch["x"]) - batch["x"]) ** 2
    return jnp.sum(d), d.size


class Seen:
    """Notes what a model sees: a list in an attribute would be Flax's."""

    def __init__(self):
        self.values = []

    def append(self, value):
        self.values.append(value)


class Linen(nn.Module):
    """A flag, or a policy of JAX's, or a name that is none of jaxpar's, as models of others have it."""

    remat: Any = False
    seen: Any = None

    @nn.compact
    def __call__(self, x):
        self.seen.append(self.remat)
        return (nn.remat(nn.Dense) if self.remat is True else nn.Dense)(16)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs, remat, seen):
        self.layer, self.remat, self.seen = nnx.Linear(16, 16, rngs=rngs), remat, seen

    def __call__(self, x):
        self.seen.append(self.remat)
        return self.layer(x)


class ByClass(nnx.Module):
    remat = True

    def __init__(self, rngs, seen):
        self.layer, self.seen = nnx.Linear(16, 16, rngs=rngs), seen

    def __call__(self, x):
        self.seen.append(self.remat)
        return self.layer(x)


def linen(remat):
    return lambda seen: jp.from_linen(Linen(remat, seen), jnp.zeros([1, 16]))


def of_nnx(remat):
    return lambda seen: lambda rngs: Nnx(rngs, remat, seen)


def program(model, **numerics):
    layout = jp.compose(model, jp.Parallel(data=8))
    step = jp.train_step(layout, squares, SGD, **numerics)
    return layout, step.lower(step.abstract(), BATCH).as_text()


@pytest.mark.spread(0)
@pytest.mark.parametrize("model", [linen, of_nnx])
@pytest.mark.parametrize(
    "own",
    [
        pytest.param(False, marks=pytest.mark.slow),
        pytest.param(True, marks=pytest.mark.slow),
        None,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param("minimal", marks=pytest.mark.slow),
        pytest.param("nothing_saveable", marks=pytest.mark.slow),
        pytest.param(("full",), marks=pytest.mark.slow),
    ],
)
def test_a_remat_that_is_no_policy_of_jaxpars_stays(model, own):
    seen = Seen()
    layout, text = program(model(own)(seen))
    assert {*seen.values} == {own}
    assert not layout.blueprint.takes_remat
    _, again = program(model(own)(Seen()), remat="full")  # around the model, as around any
    assert again.count("optimization_barrier") > text.count("optimization_barrier")


@pytest.mark.parametrize("model", [linen, of_nnx])
def test_a_remat_that_is_a_policy_is_given_that_of_the_step(model):
    seen = Seen()
    layout, _ = program(model("none")(seen), remat="full")
    assert layout.blueprint.takes_remat
    assert seen.values[-1] == "full"


def test_a_remat_of_the_class_stays():
    seen = Seen()
    program(lambda rngs: ByClass(rngs, seen), remat="full")
    assert {*seen.values} == {True}


class ByName(nn.Module):
    """Computes in a dtype that it has by its name."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, dtype=getattr(jnp, self.dtype))(x)


class NnxByName(nnx.Module):
    def __init__(self, rngs, dtype="float32"):
        self.layer, self.dtype = nnx.Linear(16, 16, rngs=rngs), dtype

    def __call__(self, x):
        return self.layer(x.astype(getattr(jnp, self.dtype)))


@pytest.mark.parametrize("model", [jp.from_linen(ByName(), jnp.zeros([1, 16])), NnxByName])
def test_a_dtype_by_its_name_stays_a_name(model):
    _, text = program(model, precision="bf16")
    assert "bf16[16,16]" in text.replace("x", ",") or "16x16xbf16" in text


class Stored(nnx.Module):
    """Layers in a container of Python's, as models had them before Flax 0.12."""

    def __init__(self, rngs, container, filled):
        layer = nnx.Linear(16, 16, rngs=rngs)
        self.layers = container([("a", layer)] if container is dict else [layer] * filled)
        if not filled:
            self.layers.append(layer)  # Flax sees it once the module is made


@pytest.mark.parametrize(
    ("container", "filled", "fix"),
    [
        (list, True, "self.layers = nnx.List(...)"),
        (list, False, "self.layers = nnx.List(...)"),
        (tuple, True, "self.layers = nnx.List(...)"),
        (dict, True, "self.layers = nnx.Dict(...)"),
    ],
)
def test_modules_in_a_container_of_python_are_refused_with_flax_s(container, filled, fix):
    model = lambda rngs: Stored(rngs, container, filled)  # noqa: E731
    with pytest.raises(JaxparError, match="since Flax 0") as caught:
        jp.compose(model, jp.Parallel(data=8))
    assert fix in str(caught.value)
