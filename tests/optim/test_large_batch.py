"""Rates and warm-ups follow the global batch, and nothing else: no mesh changes them."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import JaxparError
from jaxpar.job.build import rates
from jaxpar.job.file.parse import loads
from jaxpar.optim import optax_chain
from jaxpar.optim.optimizer import Optimizer

JOB = """
model = {{ name = "decoder" }}
parallel = {{ {axes} }}
mesh.simulate = 8
train = {{ global_batch = {batch}, accumulate = {accumulate}, steps = 100 }}
optimizer = {{ learning_rate = 0.001, warmup = 40, decay = "constant", reference_batch = 16, scaling = "{scaling}" }}
"""


def rate(axes="data = 8", batch=64, accumulate=1, scaling="linear"):
    job = loads(JOB.format(axes=axes, batch=batch, accumulate=accumulate, scaling=scaling))
    return rates(job.optimizer.for_batch(job.train.global_batch), job.train.steps)


def test_a_rate_grows_with_the_batch_and_its_warm_up_takes_as_many_examples():
    small, large, root = rate(batch=16), rate(batch=64), rate(batch=64, scaling="sqrt")
    assert (small(0), large(0), root(0)) == (0, 0, 0)
    assert (small(40), large(10), root(10)) == pytest.approx((1e-3, 4e-3, 2e-3))
    assert small(39) < small(40) == small(99)
    assert large(9) < large(10) == large(99)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param("data = 8", marks=pytest.mark.slow),
        pytest.param("fsdp = 8", marks=pytest.mark.slow),
        pytest.param("data = 2, tensor = 4", marks=pytest.mark.slow),
        "pipe = 2, data = 4",
    ],
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_no_mesh_changes_a_rate(axes, accumulate):
    if "pipe" in axes and accumulate > 1:
        axes, accumulate = axes + ", pipeline = { microbatches = 4 }", 1
    one, other = rate(), rate(axes, accumulate=accumulate)
    assert [one(step) for step in range(20)] == [other(step) for step in range(20)]


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(0, 10**5), st.sampled_from(["linear", "sqrt"]))
def test_a_warm_up_is_over_after_as_many_examples_to_a_step(batch, reference, warmup, scaling):
    spec = Optimizer(warmup=warmup, reference_batch=reference, scaling=scaling)
    if -(-warmup * reference // batch) >= 2**31:  # steps are counted in int32
        with pytest.raises(JaxparError, match=r"optimizer\.warmup = \d{10}"):
            spec.for_batch(batch)
        return
    here = spec.for_batch(batch)
    assert warmup * reference <= here.warmup * batch < warmup * reference + batch
    assert here.for_batch(7) == here  # what was scaled is not scaled again
    assert spec.for_batch(reference) == here.__class__(warmup=warmup, scaling=scaling)
    times = {"linear": batch / reference, "sqrt": math.sqrt(batch / reference)}[scaling]
    assert here.learning_rate == pytest.approx(spec.learning_rate * times)


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "eta", [pytest.param(0.04, marks=pytest.mark.slow), pytest.param(0.02, marks=pytest.mark.slow), 0.01]
)
def test_so_many_small_steps_are_one_large_step_to_the_square_of_the_rate(eta):
    """Goyal et al. 2017, equations 3 and 4: on a linear model, of 4 steps of 8 examples and 1 of 32."""
    moments = np.random.default_rng(0)
    x, y = (jnp.asarray(moments.normal(size=shape), jnp.float32) for shape in ((32, 5), (32,)))

    def trained(batch):
        spec = Optimizer(name="sgd", beta1=0, clip=0, decay="constant", learning_rate=eta, reference_batch=8)
        optimizer, w = optax_chain.build(spec.for_batch(batch), 4), jnp.zeros(5)
        state = optimizer.init(w)
        for part in range(0, 32, batch):
            gradient = x[part : part + batch].T @ (x[part : part + batch] @ w - y[part : part + batch]) / batch
            updates, state = optimizer.update(gradient, state, w)
            w = optax.apply_updates(w, updates)
        return w

    far = float(jnp.linalg.norm(trained(8) - trained(32)))
    moved = float(jnp.linalg.norm(trained(32)))
    assert 0.2 * eta < far / moved < 8 * eta  # the distance of the two is of second order in the rate


def test_a_batch_for_nothing_is_refused():
    with pytest.raises(JaxparError, match=r"optimizer.reference_batch = -1"):
        loads("optimizer.reference_batch = -1")
    with pytest.raises(JaxparError, match="scaling"):
        loads('optimizer.scaling = "cubic"')
