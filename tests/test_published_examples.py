"""Models after Flax's own examples, unedited: every layout trains them as one device does."""

from functools import cache

import jax
import numpy as np
import pytest
from published import EXAMPLES

import jaxpar as jp

jp.simulate(8)

LAYOUTS = [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]
BY_MODEL = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in EXAMPLES]  # one reference each


def train(name, parallel, devices=None, **numerics):
    """Returns the layout, the losses of three steps on one batch, and the state after them."""
    example = EXAMPLES[name]
    model = jp.linen(example.model, *example.inputs) if example.inputs else example.model
    layout = jp.compose(model, parallel, devices)
    state = jp.create(layout, example.optimizer)
    step = jp.build(layout, example.loss, example.optimizer, **numerics)
    losses = []
    for _ in range(3):
        state, metrics = step(state, example.batch())
        losses.append(float(metrics["loss"]))
    return layout, losses, state


@cache
def on_one_device(name, **numerics):
    _, losses, state = train(name, jp.Parallel(), jax.devices()[:1], **numerics)
    return losses, numbers(state)


def numbers(state):
    """Returns parameters, statistics and random keys by path."""
    flat, _ = jax.tree.flatten_with_path((state.params, state.rest))
    return {
        jax.tree_util.keystr(path): np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for path, x in flat
    }


def equals_one_device(name, parallel, **numerics):
    losses, reference = on_one_device(name, **numerics)
    _, ours, state = train(name, parallel, **numerics)
    np.testing.assert_allclose(ours, losses, rtol=1e-5, atol=1e-5)
    found = numbers(state)
    assert found.keys() == reference.keys()
    for path, value in reference.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-5, err_msg=path)
    assert losses[-1] < losses[0]
    shards = [(x.addressable_shards[0].data.size, x.size) for x in jax.tree.leaves(state.params)]
    assert any(own < whole for own, whole in shards)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", BY_MODEL)
def test_a_published_model_trains_as_on_one_device(name, sizes):
    equals_one_device(name, jp.Parallel(**sizes))
