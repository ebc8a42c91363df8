"""A module whose dtype is its class's default computes in what a step asks for; one that was told keeps its word."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx, struct

import jaxpar as jp

DIM = 16


class Defaulted(nn.Module):
    """As many Linen modules are written: float32 is the default of the class, and handed on."""

    dtype: Any = jnp.float32
    told: Any = None

    def setup(self):
        self.first = nn.Dense(DIM, dtype=self.dtype)

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dtype=self.told or self.dtype)(nn.tanh(self.first(x)))


@struct.dataclass
class Config:
    """As Flax's language models have it."""

    dim: int = DIM
    dtype: Any = jnp.float32


class Configured(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dtype=self.config.dtype)(nn.tanh(nn.Dense(self.config.dim, dtype=self.config.dtype)(x)))


class Handed(nnx.Module):
    def __init__(self, dim=DIM, *, dtype=jnp.float32, told=None, rngs):
        self.dtype = dtype
        self.first = nnx.Linear(dim, dim, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(dim, 8, dtype=told or dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)).astype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Settings:
    dim: int = DIM
    dtype: Any = jnp.float32


class Set(nnx.Module):
    def __init__(self, settings, rngs):
        self.settings = settings
        self.first = nnx.Linear(settings.dim, settings.dim, dtype=settings.dtype, rngs=rngs)
        self.last = nnx.Linear(settings.dim, 8, dtype=settings.dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)).astype(self.settings.dtype))


INPUT = jax.ShapeDtypeStruct((8, DIM), jnp.float32)
MODELS = {
    "a field of Linen's": jp.linen(Defaulted(), INPUT),
    "a config of Linen's": jp.linen(Configured(Config()), INPUT),
    "an argument of NNX's": lambda rngs: Handed(rngs=rngs),
    "a config of NNX's": lambda rngs: Set(Settings(), rngs),
}


def squares(model, batch):
    errors = jnp.square(model(batch["inputs"]).astype(jnp.float32).mean(axis=-1))
    return jnp.sum(errors), jnp.float32(errors.size)


def lowered(model):
    step = jp.train_step(jp.compose(model, jp.Parallel(), jax.devices()[:1]), squares, optax.sgd(0.1), precision="bf16")
    step.lower(step.abstract(), {"inputs": INPUT})
    return step.products


@pytest.mark.parametrize("name", MODELS)
def test_a_default_is_open(name):
    assert lowered(MODELS[name]).share == 1


@pytest.mark.parametrize(
    "model",
    [jp.linen(Defaulted(told=jnp.float16), INPUT), lambda rngs: Handed(told=jnp.float16, rngs=rngs)],
    ids=["linen", "nnx"],
)
def test_the_word_of_an_author_is_kept(model):
    with pytest.raises(jp.JaxparError, match=r"matrix products are bf16[\s\S]*f16\["):
        lowered(model)
