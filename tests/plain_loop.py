"""The loop that users of optax write, and models of others trained beside it.

LAYOUTS  the declarations that each such model is trained under
train    three steps of `jax.value_and_grad`, optax and `jax.jit` alone, on one device
beside   the same three steps by jaxpar: losses and parameters must be the same
"""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp

LAYOUTS = {
    "data 8": {"data": 8},
    **{f"fsdp 8, zero {stage}": {"fsdp": 8, "zero": stage} for stage in (1, 2, 3)},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}
STEPS = 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def each(groups, *, zero_3, rarely=()):
    """Returns the mark of a test of (name, layout): in CI most on 2x2x2, and some under ZeRO-3; the rest is full.

    Args:
      groups: Names of models, and of the groups whose tests run in one worker.
      zero_3: Those that run under ZeRO-3 in CI.
      rarely: Those that take so long that CI leaves them out.
    """
    often = {(name, "2x2x2") for name in groups if name not in rarely} | {(name, "fsdp 8, zero 3") for name in zero_3}
    marks = lambda name, layout: [pytest.mark.full] * ((name, layout) not in often)  # noqa: E731
    return pytest.mark.parametrize(
        ("name", "layout"),
        [
            pytest.param(name, layout, marks=[pytest.mark.xdist_group(group), *marks(name, layout)])
            for name, group in groups.items()
            for layout in LAYOUTS
        ],
    )


class WithParameters:
    """A Linen module with its parameters, which is called as jaxpar's is."""

    def __init__(self, module, params):
        self.module, self.params = module, params

    def __call__(self, *args, **kwargs):
        return self.module.apply({"params": self.params}, *args, **kwargs)


def train(model, of, loss, optimizer, batch):
    """Returns losses, and parameters after the last step.

    Args:
      model: As `jp.compose` takes it: it begins with the parameters of jaxpar's seed 0.
      of: The Linen module itself, or the factory of the NNX module.
      loss: Of (model, batch): a mean, or a sum and a count, or a dict with such a "loss".
      optimizer: An optax chain.
      batch: The one batch of every step.
    """
    params = jp.init_state(jp.compose(model, jp.Parallel(), jax.devices()[:1]), optimizer, seed=0).params
    if isinstance(of, nn.Module):
        made = lambda params: WithParameters(of, params)  # noqa: E731
    else:
        graph, own, rest = nnx.split(of(nnx.Rngs(0)), nnx.Param, ...)

        def made(params):
            nnx.replace_by_pure_dict(own, nnx.restore_int_paths(params))
            return nnx.merge(graph, own, rest, copy=True)

    def mean(params):
        found = loss(made(params), batch)
        found = found["loss"] if isinstance(found, dict) else found
        return found[0] / found[1] if isinstance(found, tuple) else found

    @jax.jit
    def step(params, kept):
        value, gradients = jax.value_and_grad(mean)(params)
        updates, kept = optimizer.update(gradients, kept, params)
        return value, optax.apply_updates(params, updates), kept

    losses, kept = [], optimizer.init(params)
    for _ in range(STEPS):
        value, params, kept = step(params, kept)
        losses.append(float(value))
    return losses, jax.device_get(params)


def steps(layout, loss, optimizer, batch):
    """Returns losses, and parameters after the last step, by jaxpar under a layout, as `train` returns them."""
    state, step, losses = jp.init_state(layout, optimizer, seed=0), jp.train_step(layout, loss, optimizer), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state.params


def assert_alike(result, expected):
    """Asserts that losses and parameters are equal to 1e-5."""
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5), result[1], expected[1])


def beside(reference, layout, model, loss, optimizer, batch):
    """Asserts that under a layout the model has the losses and parameters that `train` returned."""
    losses, params = steps(jp.compose(model, jp.Parallel(**LAYOUTS[layout])), loss, optimizer, batch)
    np.testing.assert_allclose(losses, reference[0], **CLOSE)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, **CLOSE), params, reference[1])
    assert losses[-1] < losses[0]
