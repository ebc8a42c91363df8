"""What an optimizer keeps of a parameter in another form than an array of its shape is cut as the parameter is."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from layouts import on_device
from pairwise import some
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.step.state import abstract, specs

DIM, WIDE, BLOCK = 64, 1024, 256
LAYOUTS = {
    "zero 1": ({"fsdp": 8, "zero": 1}, {}),
    "zero 3, accumulate": ({"fsdp": 8}, {"accumulate": 2}),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "tensor": ({"tensor": 8}, {}),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        named = lambda *names: nnx.with_partitioning(nnx.initializers.lecun_normal(), names)  # noqa: E731
        self.up = nnx.Linear(DIM, WIDE, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(WIDE, DIM, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def squares(model, batch):
    losses = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(losses), losses.size


class Codes(NamedTuple):
    codes: Any
    scales: Any


def in_rows(x):
    """Returns codes of 8 bits of the shape of x, and a scale per row."""
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127 + 1e-12
    return Codes(jnp.round(x / scales).astype(jnp.int8), scales)


def in_blocks(x):
    return in_rows(x.reshape(-1, BLOCK))


def flat(x):
    """Returns codes of 8 bits, as bytes, in one dim."""
    return tuple(in_rows(x.reshape(1, -1))._replace(codes=(in_rows(x.reshape(1, -1)).codes + 128).astype(jnp.uint8)[0]))


def factored(x):
    """Returns the signs, and the means of squares over rows and columns."""
    return {"signs": x > 0, "row": jnp.mean(x**2, axis=-1), "column": jnp.mean(x**2, axis=0)}


def numbers(kept, like):
    """Returns about the numbers that were kept in one of these forms."""
    if isinstance(kept, dict):
        return jnp.where(kept["signs"], 1, -1) * jnp.sqrt(kept["row"][:, None])
    codes, scales = kept
    codes = codes.astype(jnp.float32) - (128 if codes.dtype == jnp.uint8 else 0)
    return (codes * scales).reshape(like.shape)


def keeping(form):
    """Returns momentum that is kept in such a form, a value of its own for each parameter."""

    def init(params):
        return jax.tree.map(lambda x: form(jnp.zeros_like(x)), params)

    def update(updates, state, params=None):
        moments = jax.tree.map(lambda g, kept: g + 0.5 * numbers(kept, g), updates, state)
        return jax.tree.map(lambda m: -0.1 * m, moments), jax.tree.map(form, moments)

    return optax.GradientTransformation(init, update)


def in_a_list(form):
    """Returns the same for the leaves of all parameters in a list, as some optimizers are written."""

    def init(params):
        return [form(jnp.zeros_like(x)) for x in jax.tree.leaves(params)]

    def update(updates, state, params=None):
        leaves, tree = jax.tree.flatten(updates)
        moments = [g + 0.5 * numbers(kept, g) for g, kept in zip(leaves, state, strict=True)]
        return jax.tree.unflatten(tree, [-0.1 * m for m in moments]), [form(m) for m in moments]

    return optax.GradientTransformation(init, update)


FORMS = {
    "codes of its shape": keeping(in_rows),
    "codes in blocks": keeping(in_blocks),
    "codes in one dim": keeping(flat),
    "signs in a dict": keeping(factored),
    "a list for all": in_a_list(in_blocks),
    "in a chain": optax.chain(
        optax.clip_by_global_norm(10.0), optax.masked(keeping(in_blocks), {"up": True, "down": False})
    ),
}
BATCH = dict(zip("xy", np.random.default_rng(0).normal(size=(2, 16, DIM)).astype(np.float32), strict=True))


def trained(optimizer, sizes, numerics, devices=None, steps=2):
    layout = jp.compose(Net, jp.Parallel(**sizes), devices)
    step = jp.train_step(layout, squares, optimizer, **numerics)
    state, losses = jp.init_state(layout, optimizer), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return step, state, losses


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(FORMS, ["a list for all"], ["in a chain"]))
def test_state_in_another_form_is_cut_and_its_numbers_are_those_of_one_device(name):
    _, alone, wanted = trained(FORMS[name], {}, {}, jax.devices()[:1])
    whole = sum(x.nbytes for x in jax.tree.leaves(alone.optimizer))
    layouts = (
        LAYOUTS if name == "codes in blocks" else ["zero 1", "2x2x2"] if name == "codes of its shape" else ["zero 1"]
    )
    for layout in layouts:
        sizes, numerics = LAYOUTS[layout]
        _, state, losses = trained(FORMS[name], sizes, numerics)
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        assert_same_arrays(state.params, alone.params)
        for ours, theirs in zip(jax.tree.leaves(state.optimizer), jax.tree.leaves(alone.optimizer), strict=True):
            if theirs.dtype in (jnp.int8, jnp.uint8):  # a sum in another order may round to the next code
                assert np.max(np.abs(np.asarray(ours, np.int32) - np.asarray(theirs, np.int32))) <= 1
        ways = 4 if layout == "2x2x2" else 8
        small = sum(x.nbytes for x in jax.tree.leaves(alone.optimizer) if x.nbytes < 64 * 1024)
        assert on_device(state.optimizer) <= (whole - small) // ways + small
        assert all(len(x.sharding.spec) for x in jax.tree.leaves(state.optimizer) if x.nbytes >= 64 * 1024)


@pytest.mark.slow
def test_in_stage_0_it_is_whole_and_small_counts_stay_whole():
    layout = jp.compose(Net, jp.Parallel(fsdp=8, zero=0))
    state = jp.init_state(layout, FORMS["codes in blocks"])
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.optimizer))
    counts = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: (jnp.zeros((64,), jnp.int32), jnp.zeros((64,))), params),
        optax.sgd(0.1).update,
    )
    state = jp.init_state(jp.compose(Net, jp.Parallel(fsdp=8)), counts)
    for count, mean in (state.optimizer["up"]["kernel"], state.optimizer["down"]["kernel"]):
        assert count.sharding.is_fully_replicated
        assert not mean.sharding.is_fully_replicated  # of floating point, as Adafactor's are


@pytest.mark.nightly
def test_a_checkpoint_of_it_is_restored_on_another_layout(tmp_path):
    optimizer = FORMS["codes in blocks"]
    step, state, _ = trained(optimizer, *LAYOUTS["zero 1"])
    jp.save(tmp_path / "state", state)
    wanted, _ = step(state, BATCH)
    for sizes, devices in (LAYOUTS["2x2x2"][0], None), ({}, jax.devices()[:1]):
        other = jp.train_step(jp.compose(Net, jp.Parallel(**sizes), devices), squares, optimizer)
        again, _ = other(jp.restore(tmp_path / "state", other), BATCH)
        assert_same_arrays(again.params, wanted.params)


def test_a_large_array_that_no_axis_divides_is_refused_or_allowed():
    statistics = optax.GradientTransformation(
        lambda params: {"statistics": jax.tree.map(lambda x: jnp.zeros((1031, 1031)), params)}, optax.sgd(0.1).update
    )
    layout = jp.compose(Net, jp.Parallel(fsdp=4, zero=1), 4)
    with pytest.raises(jp.JaxparError) as error:
        jp.train_step(layout, squares, statistics)
    assert [problem.got for problem in error.value.problems] == [
        f"statistics/{name}/kernel of [1031, 1031] (4.055 MiB) stays whole on all 4 devices of fsdp"
        for name in ("down", "up")
    ]
    assert error.value.problems[0].fix.endswith("replicate_above = 4251844")
    allowed = jp.compose(Net, jp.Parallel(fsdp=4, zero=1, replicate_above=4251844), jax.devices()[:4])
    state = jp.init_state(allowed, statistics)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.optimizer))
    jp.init_state(jp.compose(Net, jp.Parallel(data=4), jax.devices()[:4]), statistics)  # nothing shards the state here


def refusals(optimizer, **sizes):
    try:
        jp.train_step(jp.compose(Net, jp.Parallel(fsdp=8, zero=1, **sizes)), squares, optimizer)
    except jp.JaxparError as error:
        return [problem.got.split()[0] for problem in error.problems]
    return []


def holding(leaf_of):
    return optax.GradientTransformation(lambda params: jax.tree.map(leaf_of, params), optax.sgd(0.1).update)


def test_scalars_and_small_codes_are_whole_by_intent():
    assert not refusals(optax.adam(1e-3), replicate_above=0)
    assert not refusals(holding(lambda x: jnp.zeros((32, 32), jnp.int8)), replicate_above=100)


def test_an_array_is_measured_by_its_own_bytes_also_where_it_has_the_shape_of_its_parameter():
    odd = holding(lambda x: jnp.zeros((3, 1001, 1001)) if x.shape == (DIM, WIDE) else jnp.zeros(x.shape))
    assert refusals(odd) == ["up/kernel"]
    history = optax.GradientTransformation(
        lambda params: {"history": jax.tree.map(lambda x: jnp.zeros((3, *x.shape)), params)}, optax.sgd(0.1).update
    )
    assert not refusals(history)  # 8 divides a dim


LLAMA = dict(vocab=32003, seq=2048, dim=4096, layers=32, heads=32, hidden=11008)  # 7 B, with three added tokens
GPT2 = dict(vocab=50257, seq=1024, dim=768, layers=12, heads=12, hidden=3072, tied=True, position="learned")
OPTIMIZERS = {
    **{name: getattr(optax, name) for name in ("adabelief", "adafactor", "adamw", "lamb", "lion", "novograd", "sm3")},
    **{
        name: getattr(optax.contrib, name)
        for name in ("ademamix", "cocob", "galore", "muon", "prodigy", "schedule_free_adamw")
    },
    "MultiSteps": lambda rate: optax.MultiSteps(optax.adamw(rate), 4).gradient_transformation(),
    "one vector": lambda rate: optax.flatten(optax.adamw(rate)),
    "history": lambda rate: optax.scale_by_lbfgs(),
}


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("sizes", [dict(fsdp=8), dict(fsdp=8, zero=1), dict(fsdp=64)], ids=str)
def test_no_optimizer_of_optax_has_a_large_array_that_zero_does_not_shard(model, sizes):
    layout = jp.compose(
        lambda rngs: jp.Decoder(jp.DecoderConfig(**model), rngs=rngs), jp.Parallel(**sizes), sizes["fsdp"]
    )
    for make in OPTIMIZERS.values():
        state = abstract(layout, make(1e-3))
        specs(layout, state)  # refuses such arrays
