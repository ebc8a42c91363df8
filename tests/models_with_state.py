"""Models with state that no gradient changes, as their authors write them.

Adapted    NNX, a frozen base in a variable of its own, and a low-rank correction that is trained
Averaged   NNX, an exponential moving average of a matrix, written in each step
Recurrent  Linen, a frozen base in a collection of its own, read in each of two calls, and a cache that is written
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jaxpar as jp

DIM, RANK, BATCH = 128, 4, 16  # a float32 matrix of 64 KiB


class Base(nnx.Variable):
    """What is there and is not trained."""


class Adapted(nnx.Module):
    def __init__(self, rngs, dim=DIM):
        self.base = Base(jax.random.normal(rngs.params(), (dim, dim)) / dim**0.5)
        self.scale = Base(jnp.ones((dim,)))
        self.correction = nnx.LoRA(dim, RANK, dim, rngs=rngs)
        self.head = nnx.Linear(dim, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh((x @ self.base[...] + self.correction(x)) * self.scale[...]))


class Averaged(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(DIM, DIM, rngs=rngs)
        self.mean = nnx.Variable(jnp.zeros((DIM, DIM)))
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(self.layer.kernel[...])
        return self.norm(self.layer(x)) + x @ self.mean[...]


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        base = self.variable(
            "base", "kernel", lambda: nn.initializers.lecun_normal()(self.make_rng("params"), (DIM,) * 2)
        )
        last = self.variable("cache", "last", jnp.zeros, (DIM, DIM))
        y = nn.Dense(DIM)(jnp.tanh(x @ base.value)) + x @ last.value
        last.value = 0.5 * last.value + 0.5 * base.value
        return y


def twice(model, batch):
    return squares(lambda x: model(model(x)), batch)


def squares(model, batch):
    errors = jnp.square(model(batch["inputs"]).mean(axis=-1) - batch["labels"])
    return jnp.sum(errors), jnp.float32(errors.size)


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {
            "inputs": rng.normal(size=(BATCH, DIM)).astype(np.float32),
            "labels": rng.normal(size=BATCH).astype(np.float32),
        }


MODELS = {
    "adapted": (Adapted, squares),
    "averaged": (Averaged, squares),
    "recurrent": (jp.from_linen(Recurrent(), jax.ShapeDtypeStruct((2, DIM), jnp.float32)), twice),
}
