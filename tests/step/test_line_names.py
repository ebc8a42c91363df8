"""Names at lines of source are those of activations: kernels and constants of the same line and rank keep theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models.dim_names import constrain
from jaxpar.step import line_names

SGD = optax.sgd(0.1)
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 16, 16, 3)).astype(np.float32)}
WINDOW = 5  # no axis of the mesh divides it: XLA may compute wrong numbers from a kernel that is split unevenly


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(3, 8, (WINDOW, WINDOW), rngs=rngs)

    def __call__(self, x):
        return self.first(x)


class Patches(nnx.Module):
    """Overlapping windows by a convolution with constants, and a dense layer on each."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(WINDOW, 8, rngs=rngs)

    def __call__(self, x):
        sound = x.reshape(x.shape[0], -1, 1)
        return self.dense(
            jax.lax.conv_general_dilated_patches(sound, [WINDOW], [2], "VALID", dimension_numbers=("NTC", "OIT", "NTC"))
        )


class Recurrence(nnx.Module):
    """A loop whose carry begins as zeros."""

    def __init__(self, rngs):
        self.cell = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        rows = jnp.moveaxis(x.mean(-1), 1, 0)
        return jax.lax.scan(lambda carry, row: (jnp.tanh(self.cell(carry) + row), None), jnp.zeros_like(rows[0]), rows)[
            0
        ]


def squares(model, batch):
    losses = model(batch["x"]) ** 2
    return losses.sum(), jnp.float32(losses.size)


def line(model, offset=0):
    return f"test_line_names.py:{model.__call__.__code__.co_firstlineno + offset}"


CHANNELS = {"rules": {"channels": "tensor"}}
CASES = {
    "kernel": (
        Convolution,
        jp.Parallel(
            fsdp=4, tensor=2, activations={line(Convolution, 1): ("batch", None, None, "channels")}, **CHANNELS
        ),
    ),
    "constant": (Patches, jp.Parallel(data=2, fsdp=4, activations={line(Patches, 2): ("batch", None, None)})),
    "carry": (
        Recurrence,
        jp.Parallel(fsdp=4, tensor=2, activations={line(Recurrence, 2): ("batch", "channels")}, **CHANNELS),
    ),
}  # fmt: skip


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_only_activations_are_named_and_training_is_that_of_one_device(case, monkeypatch):
    (model, parallel), named = CASES[case], []
    monkeypatch.setattr(line_names, "constrain", lambda x, *names: named.append(x.shape) or constrain(x, *names))
    layout = jp.compose(model, parallel)
    state, step = jp.init_state(layout, SGD), jp.train_step(layout, squares, SGD)
    losses = []
    for _ in range(plain_loop.STEPS):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert {shape[0] for shape in named} == {len(BATCH["x"])}
    expected, _ = plain_loop.train(model, model, squares, SGD, BATCH)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_key_with_a_column_names_the_arrays_of_one_expression():
    def product(params, state, x):
        return jnp.sin(x @ params) @ jnp.cos(params)

    line = product.__code__.co_firstlineno + 1
    column = "        return jnp.sin(x @ params) @ jnp.cos(params)".index("x @ params") + 1
    params, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    jaxpr = jax.make_jaxpr(product)(params, {}, x).jaxpr
    file = __file__.rsplit("/", 1)[1]
    inner, any_column = f"{file}:{line}:{column} [..., 8]", f"{file}:{line} [..., 8]"
    missing = f"{file}:{line}:2 [..., 8]"
    given = {inner: ("batch", "mlp"), any_column: ("batch", None), missing: ("batch", "heads")}
    assert line_names.lines_used(jaxpr, 1, given) == {inner, any_column}
    assert line_names.lines_used(jaxpr, 1, {missing: ("batch", "heads")}) == set()
