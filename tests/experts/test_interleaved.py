"""Experts in some layers, dense ones before and between them: one device, plain loops, a KV cache, pipelines."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models.auxiliary import collect_sums
from jaxpar.models.settings.experts import ExpertsConfig

SHAPE = {"vocab": 32, "seq": 16, "dim": 16, "heads": 2, "hidden": 32}
EXPERTS = {"count": 4, "per_token": 2, "hidden": 8, "capacity": 0.0, "router_z": 1e-3}


def numbers_of(layers, dense_layers, every):
    """The rule of transformers: `mlp_only_layers` and `decoder_sparse_step` of Qwen3-MoE."""
    return [i for i in range(layers) if i >= dense_layers and (i + 1) % every == 0]


def settings_of(layers, dense_layers=0, every=1, experts=(), **settings):
    experts = EXPERTS | {"dense_layers": dense_layers, "every": every} | dict(experts)
    return jp.DecoderConfig(**SHAPE | settings, layers=layers, experts=experts)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("dense_layers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("layers", [5, 8, 11])
def test_the_layers_with_experts_are_those_of_transformers(layers, dense_layers, every):
    found = ExpertsConfig(count=4, dense_layers=dense_layers, every=every).layers_with_experts(layers)
    assert list(found) == numbers_of(layers, dense_layers, every)
    assert not ExpertsConfig(dense_layers=dense_layers, every=every).layers_with_experts(layers)


def in_a_loop(model, tokens, settings):
    """Logits of a decoder by a Python loop over its layers, and the losses and choices of its routers."""
    e, kinds = settings.experts, model.kinds
    numbers = numbers_of(settings.layers, e.dense_layers, e.every)
    x, losses, made = model.embed[...][tokens], 0, 0
    dense = [] if model.dense_blocks is None else unstacked(model.dense_blocks)
    dense, experts = iter([*(model.first_blocks or []), *dense]), iter(unstacked(model.blocks))
    for i in range(settings.layers):
        kind = kinds[i % len(kinds)]
        if i not in numbers:
            x = next(dense)(x, None, kind=kind)
            continue
        block = next(experts)
        x = x + block.attention(block.norm_attention(x), kind=kind)
        y, sums = block.mlp(block.norm_mlp(x))
        x, losses, made = x + y, losses + sums.losses, made + 1
    assert next(dense, None) is next(experts, None) is None
    assert made == len(numbers)
    return model.norm(x) @ model.head[...], (losses / len(numbers)) @ jnp.array([e.balance, e.router_z])


def unstacked(blocks):
    graph, params = nnx.split(blocks)
    count = jax.tree.leaves(params)[0].shape[0]
    return [nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], params)) for i in range(count)]


# by layers, dense ones first, every, and what is special: kinds that repeat every 2 or 4 layers, layers left over
ORDERS = [
    pytest.param((5, 2, 1, {"windows": (3, 0)}), id="2 dense first, windows"),
    pytest.param((7, 1, 2, {"windows": (3, 0, 5, 0)}), id="every 2nd, 4 kinds, one left over"),
    pytest.param((11, 3, 3, {"rope_bases": (1e4, 0.0)}), id="3 dense first, every 3rd, 2 left over"),
    pytest.param((4, 0, 2, {"scan": False}), id="every 2nd, unrolled"),
]


@pytest.fixture(scope="module", params=ORDERS)
def model(request):
    layers, dense_layers, every, more = request.param
    settings = settings_of(layers, dense_layers, every, **more)
    with nnx.use_eager_sharding(False):
        return jp.Decoder(settings, rngs=nnx.Rngs(0)), settings


@pytest.mark.spread(1)
@pytest.mark.nightly
def test_logits_and_losses_are_those_of_a_loop(model):
    decoder, settings = model
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 32)
    logits, losses = in_a_loop(decoder, tokens, settings)
    with collect_sums() as sums:
        np.testing.assert_allclose(decoder(tokens), logits, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(sums.loss[0], losses, rtol=1e-5)
    e, means = settings.experts, {name: float(total / count) for name, (total, count) in sums.measures.items()}
    assert e.balance * means["balance"] + e.router_z * means["router_z"] == pytest.approx(
        float(losses.mean()), rel=1e-5
    )
    assert float(sums.measures["dropped"][1]) == 2 * 16 * 2 * len(settings.layers_with_experts)


@pytest.mark.spread(1)
@pytest.mark.nightly
def test_decoding_goes_on_as_whole_rows(model):
    decoder, _ = model
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 32)
    _, cache = decoder.decode(tokens[:, :6], decoder.cache(2, 8), jnp.array([6, 6]))
    logits, _ = decoder.decode(tokens[:, 6:], cache)
    np.testing.assert_allclose(logits, decoder(tokens)[:, -1], rtol=2e-4, atol=2e-5)


def trained(settings, parallel, devices=None):
    layout = jp.compose(partial(jp.Decoder, settings), parallel, devices)
    step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.3), remat="full")
    state, words = jp.init_state(layout, optax.sgd(0.3), seed=0), np.random.default_rng(0).integers(0, 32, (16, 17))
    batch = {"inputs": words[:, :-1].astype(np.int32), "targets": words[:, 1:].astype(np.int32)}
    state, metrics = step(state, batch)
    return {name: float(value) for name, value in metrics.items() if name != "load_max"}, state


LAYOUTS = [
    pytest.param({"every": 2, "dense_layers": 2}, 6, {"pipe": 2, "expert": 2, "fsdp": 2}, id="first, and every 2nd"),
    pytest.param({"dense_layers": 1}, 3, {"pipe": 2, "expert": 2, "data": 2}, id="first", marks=pytest.mark.slow),
    pytest.param({"every": 2, "balance_rate": 0.01}, 4, {"expert": 4, "fsdp": 2}, id="bias", marks=pytest.mark.slow),
    pytest.param({"every": 3}, 6, {"pipe": 2, "expert": 2, "tensor": 2}, id="every 3rd", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize(("experts", "layers", "sizes"), LAYOUTS)
def test_dense_layers_and_experts_train_as_on_one_device(experts, layers, sizes):
    settings = settings_of(layers, experts=experts | {"capacity": 1.0})
    row, state = trained(settings, jp.Parallel(**sizes))
    other, expected = trained(settings, jp.Parallel(), jax.devices()[:1])
    assert row == pytest.approx(other, rel=1e-5)
    for tree, theirs in ((state.params, expected.params), (state.model_state, expected.model_state)):
        for value, reference in zip(jax.tree.leaves(tree), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(np.asarray(value), np.asarray(reference), atol=2e-6)


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("got", "settings", "pipe"),
    [
        ("a stage of 2 layers whose kinds repeat every 4", {"layers": 4, "every": 2, "windows": (3, 0, 5, 0)}, 2),
        ("layers with experts and 10 dense ones, experts.every = 3", {"layers": 14, "every": 3}, 2),
    ],
)
def test_stages_that_would_differ_are_refused(got, settings, pipe):
    with pytest.raises(jp.JaxparError, match=got):
        trained(settings_of(**settings), jp.Parallel(pipe=pipe), jax.devices()[:pipe])


def test_a_decoder_without_a_layer_with_experts_is_refused():
    with pytest.raises(jp.JaxparError, match=r"dense_layers = 3, every = 2 of 3 layers") as caught:
        settings_of(3, 3, 2)
    assert "layers = 4 or more" in str(caught.value)
