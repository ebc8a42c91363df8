"""The norm of all gradients is one sum over devices, which an optimizer that clips by it takes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.step.gradient_norm import with_norm

GRADIENTS = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
MODEL = partial(jp.Decoder, jp.DecoderConfig(vocab=32, seq=16, layers=2, dim=16, heads=2, hidden=32))


def updated(optimizer, norm):
    return with_norm(lambda x: optimizer.update(x, optimizer.init(x), x)[0], GRADIENTS, jnp.float32(norm))


@pytest.mark.spread(0)
@pytest.mark.parametrize("rest", [optax.identity(), pytest.param(optax.scale_by_trust_ratio(), marks=pytest.mark.slow)])
def test_an_optimizer_that_clips_takes_the_norm_that_is_there(rest):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), rest)
    for norm in (10.0, 1000.0):
        scaled = jax.tree.map(lambda x, norm=norm: x / norm, GRADIENTS)
        expected = rest.update(scaled, rest.init(scaled), GRADIENTS)[0]
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), updated(optimizer, norm), expected)


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.adamw(1e-3), marks=pytest.mark.slow),
        pytest.param(optax.chain(optax.scale(2.0), optax.clip_by_global_norm(1.0)), marks=pytest.mark.slow),
        optax.masked(optax.clip_by_global_norm(1.0), {"a": True, "b": False}),
    ],
)
def test_another_norm_and_another_optimizer_are_left_as_they_are(optimizer):
    plain = optimizer.update(GRADIENTS, optimizer.init(GRADIENTS), GRADIENTS)[0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), updated(optimizer, 1000.0), plain)


def test_a_norm_that_is_computed_twice_is_taken_twice():
    kept = optax.GradientTransformation(lambda _: jnp.zeros(()), lambda x, *_: (x, optax.tree.norm(x)))
    update = optax.chain(kept, optax.clip_by_global_norm(1.0)).update
    made = jax.make_jaxpr(lambda x, norm: with_norm(lambda x: update(x, (None, optax.EmptyState())), x, norm))
    assert "sqrt" not in str(made(GRADIENTS, jnp.float32(10)))


def test_what_an_optimizer_prints_is_still_made(capsys):
    """What `jax.debug.print` reads is read by nothing else."""

    def update(gradients):
        jax.debug.print("largest {}", jnp.max(gradients["a"]))
        return optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())[0]

    jax.block_until_ready(with_norm(update, GRADIENTS, jnp.float32(10)))
    jax.effects_barrier()
    assert "largest 5.0" in capsys.readouterr().out


@pytest.mark.nightly
def test_what_travels_for_norm_and_clipping_is_one_number():
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    layout = jp.compose(MODEL, jp.Parallel(data=2, fsdp=2, tensor=2), jax.devices())
    step, state = jp.train_step(layout, jp.next_token_loss, optimizer), jp.init_state(layout, optimizer)
    batch = {name: np.arange(128, dtype=np.int32).reshape(8, 16) % 32 for name in ("inputs", "targets")}
    gradients = step.compute_gradients(state.params, state.model_state, step.put(batch))[0]
    text = step.lower(state, batch).compile().as_text()
    sent = re.findall(r"= (\S.*?) all-reduce(?:-start)?\(", text)
    assert sum(each.count("f32[]") for each in sent) == 2, "the loss, and the norm"
    np.testing.assert_allclose(step(state, batch)[1]["grad_norm"], optax.tree.norm(gradients), rtol=1e-6)


@pytest.mark.nightly
def test_gradients_of_16_bits_wait_for_the_norm_in_16_bits():
    """A barrier stores what it waits for; in float32 that would be a copy of all gradients."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    layout = jp.compose(MODEL, jp.Parallel(fsdp=8), jax.devices())
    step, state = (
        jp.train_step(layout, jp.next_token_loss, optimizer, precision="bf16"),
        jp.init_state(layout, optimizer),
    )
    batch = {name: np.zeros((8, 16), np.int32) for name in ("inputs", "targets")}
    barriers = re.findall(r"optimization_barrier [^\n]*: ([^\n]*)", step.lower(state, batch).as_text())
    last = max(barriers, key=lambda types: types.count("tensor"))
    assert last.count("bf16>") == last.count("tensor") == len(jax.tree.leaves(state.params))
    gradients = step.compute_gradients(state.params, state.model_state, step.put(batch))[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
