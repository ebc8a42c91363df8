"""`jp.model` gives the user's own model back: its outputs are those of plain Flax with the same arrays."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import Bare, Linen, batches, models, token_loss

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.optim.eval_params import ema_params

TOKENS = next(batches(1))["inputs"]
ADAM = optax.adam(1e-2)


def decoder(rngs):
    return jp.Decoder(jp.DecoderConfig(vocab=32, layers=4, dim=16, heads=4, seq=8, dropout=0.5), rngs=rngs)


def moved(state):
    """Returns a state whose numbers are none of the initial ones: statistics are no longer 0 and 1."""

    def one(keys, x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        shift = 0.02 + 0.01 * (len(jax.tree_util.keystr(keys)) % 7)
        return jax.device_put(x * 1.2 + shift, x.sharding)

    parts = {part: jax.tree_util.tree_map_with_path(one, getattr(state, part)) for part in ("params", "model_state")}
    return dataclasses.replace(state, **parts)


def on_host(tree):
    """Returns the arrays of a nested dict by path; random keys as they are."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {tuple(key.key for key in keys): x if is_key(x) else np.asarray(x) for keys, x in leaves}


def plain_nnx(factory, params, model_state):
    """Returns the module that Flax alone makes, with these arrays."""
    with nnx.use_eager_sharding(False):  # the names of a decoder's dims are none of a mesh
        graph, state = nnx.split(factory(nnx.Rngs(7)))
    values = on_host(params) | on_host(model_state)
    flat = nnx.to_flat_state(state)
    assert {tuple(map(str, path)) for path, _ in flat} == values.keys()
    merged = nnx.from_flat_state([(path, each.replace(values[tuple(map(str, path))])) for path, each in flat])
    model = nnx.merge(graph, merged)
    model.eval()
    return model


def logits(model, **kwargs):
    if isinstance(model, nnx.Module):
        return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS))
    module, variables = model.unbind()
    return np.asarray(jax.jit(partial(module.apply, **kwargs))(variables, TOKENS))


def check_close(values, expected):
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=5e-5)


NNX = {
    "statistics, one device": (Bare, {}),
    "statistics, 2 x 2 x 2": (Bare, {"data": 2, "fsdp": 2, "tensor": 2}),
    "pipeline, 2 x 2 x 2": (decoder, {"pipe": 2, "fsdp": 2, "tensor": 2}),
}


def composed(model, sizes, **kwargs):
    return jp.compose(model, jp.Parallel(**sizes, **kwargs), jax.devices()[: int(np.prod([*sizes.values(), 1]))])


@pytest.mark.nightly
@pytest.mark.parametrize("case", NNX)
def test_an_nnx_model_predicts_as_in_plain_flax(case):
    factory, sizes = NNX[case]
    layout = composed(factory, sizes)
    state = moved(jp.init_state(layout, ADAM))
    model, expected = jp.model(layout, state), logits(plain_nnx(factory, state.params, state.model_state))
    assert isinstance(model, Bare if factory is Bare else jp.Decoder)
    check_close(logits(model), expected)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        place = layout.placements["/".join(map(str, path))]
        assert variable[...].sharding.is_equivalent_to(layout.sharding(place.stored), variable[...].ndim)
    alone = jp.model(layout, state, device=jax.devices()[3])
    assert {x.device for x in jax.tree.leaves(nnx.state(alone, nnx.Param))} == {jax.devices()[3]}
    check_close(logits(alone), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_linen_model_is_bound_and_predicts_as_in_plain_flax(sizes):
    layout = composed(models()["linen"], sizes)
    state = moved(jp.init_state(layout, ADAM))
    variables = {"params": state.params, **state.model_state["collections"]}
    expected = Linen().apply(jax.tree.map(np.asarray, variables), TOKENS, train=False)
    model = jp.model(layout, state)
    check_close(logits(model, train=False), expected)
    module, unbound = model.unbind()
    assert isinstance(module, Linen)
    assert on_host(unbound).keys() == on_host(variables).keys()


@cache
def trained(exchange=None, optimizer=ADAM, steps=3):
    """Returns layout, step, states after each step (on the host) and the last state, of `Bare` on 2 x 2 x 2."""
    layout = composed(Bare, {"data": 2, "fsdp": 2, "tensor": 2}, exchange=exchange)
    step, state, history = jp.train_step(layout, token_loss, optimizer), jp.init_state(layout, optimizer), []
    for batch in batches(steps):
        state, _ = step(state, batch)
        history.append(jax.tree.map(np.asarray, state.params))
    return layout, step, history, state


@pytest.mark.nightly
def test_the_model_of_averaged_parameters_is_the_evaluated_one():
    layout, step, history, state = trained(optimizer=optax.chain(ADAM, ema_params(0.5)))
    weights = np.array([0.25, 0.5, 1.0]) / 1.75  # decay 0.5, without the initial parameters
    mean = jax.tree.map(lambda *values: sum(w * x for w, x in zip(weights, values, strict=True)), *history)
    model, batch = jp.model(layout, state), next(batches(1))
    expected = logits(plain_nnx(Bare, mean, state.model_state))
    total, count = step.evaluate(state, batch)["loss"]
    check_close(logits(model), expected)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(model), batch["targets"]) * batch["mask"]
    np.testing.assert_allclose(losses.sum() / batch["mask"].sum(), total / count, rtol=1e-5)


@pytest.mark.nightly
def test_adapters_come_back_merged():
    scale, rank, layers, dim, heads = 8 / 2, 2, 4, 16, 4
    adapted = jp.add_lora(decoder, rank=rank, alpha=8, paths=["blocks/attention/query"])
    layout = composed(adapted, {"data": 2, "fsdp": 2, "tensor": 2})
    state = moved(jp.init_state(layout, ADAM))
    params = jax.tree.map(np.asarray, state.params)
    first, second = (params["adapters"]["blocks"]["attention"]["query"][part] for part in ("first", "second"))
    attention = params["blocks"]["attention"]
    attention["query"] = attention["query"] + scale * np.einsum("lir,lrhd->lihd", first, second)
    assert attention["query"].shape == (layers, dim, heads, dim // heads)
    expected = plain_nnx(decoder, {key: params[key] for key in params if key != "adapters"}, state.model_state)
    check_close(logits(jp.model(layout, state)), logits(expected))


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "settings"), [("local", {"every": 2}), ("diloco", {"every": 2})])
def test_replicas_come_back_as_their_global_model_or_one_by_one(name, settings):
    layout, step, _, state = trained(jp.Exchange(name, **settings))
    params = jax.tree.map(np.asarray, state.params)
    assert np.ptp(params["logits"]["kernel"], axis=0).max() > 1e-4  # after step 3 the two replicas differ
    shared = state.exchange["anchor"] if name == "diloco" else jax.tree.map(lambda x: x.mean(axis=0), params)
    statistics = jax.tree.map(lambda x: x.mean(axis=0), state.model_state)
    check_close(logits(jp.model(layout, state)), logits(plain_nnx(Bare, shared, statistics)))
    second = plain_nnx(Bare, *jax.tree.map(lambda x: np.asarray(x)[1], (params, state.model_state)))
    check_close(logits(jp.model(step.layout, state, replica=1)), logits(second))


@pytest.mark.slow
def test_what_is_no_state_of_the_layout_is_refused_with_a_way_out():
    layout, _, _, state = trained()
    other = composed(Bare, {"data": 8})
    deep = composed(decoder, {"data": 8})
    ensemble = composed(Bare, {"data": 2}, exchange=jp.Exchange("ensemble"))
    for call, message in (
        (lambda: jp.model(Bare, state), "jp.model(step.layout, state)"),
        (lambda: jp.model(layout, state.params), "a state that is a dict"),
        (lambda: jp.model(other, state), "a state of another layout: params/"),
        (lambda: jp.model(deep, state), "a state of another model: params/"),
        (lambda: jp.model(layout, jax.device_get(state)), "of the state is a ndarray"),
        (lambda: jp.model(layout, state, device="cpu"), "device=jax.devices()[0]"),
        (lambda: jp.model(layout, state, replica=0), "replicas here have equal parameters"),
        (lambda: jp.model(ensemble, jp.init_state(ensemble, ADAM)), "replica=0, or another number below 2"),
        (lambda: jp.model(ensemble, jp.init_state(ensemble, ADAM), replica=2), "a number from 0 to 1"),
    ):
        with pytest.raises(JaxparError) as error:
            call()
        assert message in str(error.value)


@pytest.mark.slow
def test_a_model_outlives_its_state():
    layout, step, _, state = trained()
    donated = jax.tree.map(jnp.copy, state)
    model, alone = jp.model(layout, donated), jp.model(layout, donated, device=jax.devices()[0])
    expected = logits(plain_nnx(Bare, state.params, state.model_state))
    step(donated, next(batches(1)))
    assert donated.params["logits"]["kernel"].is_deleted()
    check_close(logits(model), expected)
    check_close(logits(alone), expected)
    with pytest.raises(JaxparError, match="already passed to a step"):
        jp.model(layout, donated)
