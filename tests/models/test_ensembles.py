"""Members under a `vmap` and small parameters of each layer train on every layout, beside Flax and optax alone."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.errors import JaxparError

OPTIMIZER = optax.adam(1e-2)
GENERATOR = np.random.default_rng(0)
BATCH = {name: GENERATOR.normal(size=(16, 8)).astype(np.float32) for name in "xy"}


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(32)(nn.relu(nn.Dense(32)(x)))))


class Critics(nn.Module):
    """The double critic of SAC and TD3, with members in dim `axis` of every parameter."""

    members: int = 2
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        lifted = {"variable_axes": {"params": self.axis}, "split_rngs": {"params": True}}
        critic = nn.vmap(Critic, in_axes=None, out_axes=0, axis_size=self.members, **lifted)()
        return jnp.mean(critic(x), axis=0)


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        gate = self.param("gate", nn.initializers.ones, ())
        return x + gate * jnp.tanh(nn.Dense(8)(x)), None


class GatedStack(nn.Module):
    """Layers with a scalar each, as in ReZero."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Gated, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)
        return layers()(x, None)[0]


class Member(nnx.Module):
    def __init__(self, rngs):
        self.up, self.scale = nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.ones((1,)))

    def __call__(self, x):
        return self.scale * jnp.tanh(self.up(x))


class Members(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=8)
        @nnx.vmap
        def made(rngs):
            return Member(rngs)

        self.members = made(rngs)

    def __call__(self, x):
        return jnp.mean(nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(self.members, x), axis=0)


class ScaledLayer(nnx.Module):
    """A layer with a small vector and a scalar, as of LayerScale."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.scale, self.gate = nnx.Param(jnp.full((8,), 0.1)), nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x + self.gate * self.scale * jnp.tanh(self.up(x))


class ScaledLayers(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=8)
        @nnx.vmap
        def made(rngs):
            return ScaledLayer(rngs)

        self.layers = made(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def loss(model, batch):
    difference = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(difference), difference.size


MODELS = {
    "2 critics": Critics(),
    "8 critics": Critics(8),
    "10 critics": Critics(10),
    "8 critics in dim 1": Critics(8, axis=1),
    "gates": GatedStack(),
    "members": Members,
    "scales": ScaledLayers,
}
FEW = ("gates", "members")
OFTEN = [*((name, "2x2x2") for name in MODELS), ("gates", "fsdp 8, zero 3")]


def marks_of(name, layout):
    rarely = [] if name in FEW and layout == "2x2x2" else [pytest.mark.slow]
    return [pytest.mark.xdist_group(name), *(rarely if (name, layout) in OFTEN else [pytest.mark.full])]


@cache
def alone(name):
    module = MODELS[name]
    model = jp.from_linen(module, BATCH["x"][:1]) if isinstance(module, nn.Module) else module
    return model, plain_loop.train(model, module, loss, OPTIMIZER, BATCH)


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=marks_of(name, layout))
        for name in MODELS
        for layout in plain_loop.LAYOUTS
    ],
)  # fmt: skip
def test_it_trains_as_with_optax_alone(name, layout):
    model, reference = alone(name)
    plain_loop.beside(reference, layout, model, loss, OPTIMIZER, BATCH)


def test_a_large_stack_that_is_split_is_refused_once_for_all_of_its_parameters():
    class Wide(nnx.Module):
        def __init__(self, rngs):
            make = lambda: nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (8, 3, 32 * 1024 + 1)))  # noqa: E731
            self.stack, self.head = nnx.Dict(a=make(), b=make()), nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            def layer(x, each):
                return x + jnp.sum(each["a"][...]) + jnp.sum(each["b"][...]), None

            return self.head(jax.lax.scan(layer, x, self.stack)[0])

    step = jp.train_step(jp.compose(Wide, jp.Parallel(fsdp=8)), loss, optax.sgd(0.1))
    with pytest.raises(JaxparError, match="takes dim 0 apart") as refusal:
        step.lower(step.abstract(), BATCH)
    rules = {"stack/a": ("layers", None, None), "stack/b": ("layers", None, None)}
    assert f"paths={rules} in Parallel" in str(refusal.value)
    step = jp.train_step(jp.compose(Wide, jp.Parallel(fsdp=8, paths=rules)), loss, optax.sgd(0.1))
    step.lower(step.abstract(), BATCH)
