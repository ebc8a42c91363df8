"""Models of kinds that the other examples leave out: placed as their authors say, and trained as on one device.

T5X         Linen, whose names of dims are sown beside the parameters, in a scan of `flax.linen.partitioning`
Positions   NNX, tables that are attributes and no variables
Slashed     NNX, modules under keys with a "/"
Spectral    NNX, a Fourier neural operator: complex parameters, and a complex entry of the batch
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import partitioning
from pairwise import some
from tiny import assert_same_arrays, on_one_device, train

import jaxpar as jp
from jaxpar.errors import JaxparError

VOCAB, DIM, ROWS, STEPS = 32, 16, 16, 3
ADAM = optax.adam(3e-3, eps=1e-4)


class Dense(nn.Module):
    features: int
    axes: tuple

    @nn.compact
    def __call__(self, x):
        shape, init = (x.shape[-1], self.features), nn.initializers.lecun_normal()
        return x @ partitioning.param_with_axes("kernel", init, shape, jnp.float32, axes=self.axes)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        scale = partitioning.param_with_axes("scale", nn.initializers.ones, (DIM,), jnp.float32, axes=("embed",))
        y = partitioning.with_sharding_constraint(x * scale, ("batch", "length", "embed"))
        y = nn.relu(Dense(2 * DIM, ("embed", "joined_kv"), name="wi")(y))
        return x + Dense(DIM, ("joined_kv", "embed"), name="wo")(y), None


class T5X(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal(1.0)
        table = partitioning.param_with_axes("table", init, (VOCAB, DIM), jnp.float32, axes=("vocab", "embed"))
        layers = partitioning.scan_with_axes(
            partitioning.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            axis_name="layers",
        )
        x, _ = layers(name="layers")(table[tokens], None)
        mean = partitioning.variable_with_axes("seen", "mean", jnp.zeros, (DIM,), axes=("embed",))
        mean.value = 0.9 * mean.value + 0.1 * jax.lax.stop_gradient(x.mean((0, 1)))
        return (x - mean.value) @ table.T / 4


class Positions(nnx.Module):
    def __init__(self, *, rngs):
        self.sines, self.ramp = jnp.sin(jnp.arange(1.0 * DIM)), np.linspace(0, 1, DIM, dtype=np.float32)
        self.embed, self.head = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(jnp.tanh(self.embed(tokens) + self.sines * self.ramp))


class Slashed(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.mlp = nnx.Dict({"up/0": nnx.Linear(DIM, 2 * DIM, rngs=rngs), "down": nnx.Linear(2 * DIM, DIM, rngs=rngs)})

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(x + self.mlp["down"](nnx.gelu(self.mlp["up/0"](x))))


class Spectral(nnx.Module):
    def __init__(self, *, rngs):
        self.into, self.out = nnx.Linear(2, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)
        real, imaginary = jax.random.normal(rngs.params(), (2, 3, DIM, DIM)) / DIM
        self.modes = nnx.Param(real + 1j * imaginary)

    def __call__(self, wave):
        x = self.into(jnp.stack([wave.real, wave.imag], axis=-1))
        low = jnp.einsum("bmi,mio->bmo", jnp.fft.rfft(x, axis=1)[:, :3], self.modes[...])
        return self.out(nnx.gelu(x + jnp.fft.irfft(low, n=x.shape[1], axis=1)))


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return losses.sum(), losses.size


def tokens(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        rows = rng.integers(0, VOCAB, (ROWS, 9)).astype(np.int32)
        yield {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def waves(count):
    rng = np.random.default_rng(0)
    for batch in tokens(count):
        yield {**batch, "inputs": rng.normal(size=(ROWS, 8)) + 1j * rng.normal(size=(ROWS, 8))}


MODELS = {
    "t5x": (jp.from_linen(T5X(), jax.ShapeDtypeStruct((2, 8), jnp.int32)), tokens),
    "positions": (Positions, tokens),
    "slashed": (Slashed, tokens),
    "spectral": (Spectral, waves),
}
LAYOUTS = {"zero1": jp.Parallel(fsdp=8, zero=1), "2x2x2": jp.Parallel(data=2, fsdp=2, tensor=2)}


@cache
def alone(kind):
    model, data = MODELS[kind]
    losses, state, _ = on_one_device(model, loss=loss, data=data, chain=ADAM, steps=STEPS)
    return losses, state


@pytest.mark.nightly
@pytest.mark.parametrize("kind", some(MODELS, [], ["positions", "slashed", "spectral"]))
@pytest.mark.parametrize("layout", ["2x2x2", pytest.param("zero1", marks=pytest.mark.full)])
def test_a_model_of_another_kind_trains_as_on_one_device(kind, layout):
    model, data = MODELS[kind]
    want, expected = alone(kind)
    got, state, step = train(model, LAYOUTS[layout], loss=loss, data=data, chain=ADAM, steps=STEPS)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays((state.params, state.model_state), (expected.params, expected.model_state))
    assert jp.inspect(step, next(data(1))).ledger
    assert "8 x NVIDIA H100" in str(jp.plan(step, next(data(1)), devices=8))


def test_names_that_are_sown_beside_parameters_place_them():
    layout = jp.compose(MODELS["t5x"][0], jp.Parallel(data=4, tensor=2))
    names = {path: place.names for path, place in layout.placements.items()}
    assert names == {
        "table": ("vocab", "embed"),
        "layers/scale": ("layers", "embed"),
        "layers/wi/kernel": ("layers", "embed", "joined_kv"),
        "layers/wo/kernel": ("layers", "joined_kv", "embed"),
    }
    assert layout.describe("layers/wo/kernel") == "f32[layers, joined_kv/tensor, embed]"
    assert layout.other_state["collections/seen/mean"].names == ("embed",)
    assert not [path for path in layout.other_state if "_axes" in path]


def test_arrays_in_attributes_are_state_of_the_model():
    layout = jp.compose(Positions, jp.Parallel(fsdp=8), 8)
    assert {"sines", "ramp"} == {*layout.other_state}
    assert not {"sines", "ramp"} & {*layout.placements}


class Twice(Slashed):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.mlp["up"] = nnx.Dict({"0": nnx.Linear(DIM, DIM, rngs=rngs)})


def test_two_parameters_of_one_path_are_refused():
    with pytest.raises(JaxparError, match="Twice has mlp/up/0/bias twice"):
        jp.compose(Twice, jp.Parallel(data=8))


class Within(Slashed):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.scales = nnx.Dict({"up": nnx.Param(jnp.ones(DIM)), "up/0": nnx.Param(jnp.ones(DIM))})


def test_a_parameter_within_the_path_of_another_is_refused():
    with pytest.raises(JaxparError, match="Within has scales/up, and scales/up/0 within it"):
        jp.compose(Within, jp.Parallel(data=8))


class Plain(nnx.Module, pytree=False):
    def __init__(self, rngs, **arrays):
        self.shape = jax.ShapeDtypeStruct((DIM,), jnp.float32)  # no array, and no harm
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)
        for key, value in arrays.items():
            setattr(self, key, value)


def test_arrays_in_attributes_of_a_module_that_is_no_pytree_are_refused():
    assert {"dense/kernel", "dense/bias"} == {*jp.compose(Plain, jp.Parallel(data=8), 8).placements}
    jp.compose(lambda rngs: Plain(rngs, table=nnx.Variable(jnp.ones(DIM))), jp.Parallel(data=8), 8)
    arrays = {"table": lambda: jnp.ones(DIM), "ramp": lambda: np.ones(DIM), "held": lambda: {"one": jnp.ones(DIM)}}
    for key, make in arrays.items():
        with pytest.raises(JaxparError, match=f"within/{key} of .* holds an array, in a module with pytree=False"):
            jp.compose(lambda rngs, k=key, make=make: Holder(Plain(rngs, **{k: make()})), jp.Parallel(data=8))


class Holder(nnx.Module):
    def __init__(self, within):
        self.within = within
