"""A number that is set by hand in a state, as optax documents it for a rate, is taken wherever the state comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError

DIM = 8
VALUES = {
    "float": lambda: 0.01,
    "numpy": lambda: np.float32(0.01),
    "numpy, 64 bits": lambda: np.float64(0.01),
    "array": lambda: jnp.asarray(0.01),
    "array on another device": lambda: jax.device_put(0.01, jax.devices()[3]),
    "array in float16": lambda: jnp.asarray(0.01, jnp.float16),
}


def injected():
    return optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


CHAINS = {  # with the path of the rate in the state
    "sgd": (injected, lambda state: state),
    "in a chain": (lambda: optax.chain(optax.clip(1.0), injected()), lambda state: state[1]),
    "in MultiSteps": (lambda: optax.MultiSteps(injected(), 1).gradient_transformation(), lambda s: s.inner_opt_state),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def squares(model, batch):
    losses = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(losses), losses.size


BATCH = dict(zip("xy", np.random.default_rng(0).normal(size=(2, 16, DIM)).astype(np.float32), strict=True))


def step_of(optimizer):
    return jp.train_step(jp.compose(Net, jp.Parallel(fsdp=8)), squares, optimizer)


def by_optax(rates):
    """Returns the parameters after steps of these rates in a loop of optax alone."""
    params = jp.init_state(jp.compose(Net, jp.Parallel(), jax.devices()[:1]), optax.sgd(0.1)).params
    for rate in rates:
        gradients = jax.grad(
            lambda p: jnp.mean((BATCH["x"] @ p["dense"]["kernel"] + p["dense"]["bias"] - BATCH["y"]) ** 2)
        )(params)
        params = jax.tree.map(lambda p, g, rate=rate: p - rate * g, params, gradients)
    return params


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "value", some(VALUES, ["array in float16"], ["numpy", "numpy, 64 bits", "array", "array on another device"])
)
def test_a_rate_set_by_hand_is_taken_after_a_restore_and_in_a_loop(value, tmp_path):
    step = step_of(injected())
    state, _ = step(jp.init_state(step.layout, step.optimizer), BATCH)
    state.optimizer.hyperparams["learning_rate"] = VALUES[value]()
    before = step.evaluate(state, BATCH)["loss"]
    if "float16" in value:  # a checkpoint keeps the dtype
        state.optimizer.hyperparams["learning_rate"] = 0.01
    jp.save(tmp_path / "one", state)
    state.optimizer.hyperparams["learning_rate"] = VALUES[value]()
    state, _ = step(state, BATCH)  # of a program that is compiled
    wanted = by_optax([0.1, float(np.float16(0.01)) if "float16" in value else 0.01])
    assert_same_arrays(state.params, wanted, 1e-5)

    again = step_of(injected())
    state = jp.restore(tmp_path / "one", again)
    state.optimizer.hyperparams["learning_rate"] = VALUES[value]()
    assert again.evaluate(state, BATCH)["loss"] == before  # evaluated first: no program is compiled yet
    state, _ = again(state, BATCH)
    assert state.optimizer.hyperparams["learning_rate"].sharding.is_fully_replicated
    assert_same_arrays(state.params, wanted, 1e-5)


@pytest.mark.spread(0)
@pytest.mark.parametrize("chain", some(CHAINS, ["sgd"]))
def test_a_rate_inside_of_other_transformations_is_taken_before_the_first_step(chain):
    make, of = CHAINS[chain]
    step = step_of(make())
    state = jp.init_state(step.layout, step.optimizer)
    of(state.optimizer).hyperparams["learning_rate"] = 0.01
    if chain == "sgd":
        state, _ = step(state, BATCH)
        state.optimizer.hyperparams["learning_rate"] = 1  # a whole number
        state, _ = step(state, BATCH)
        assert_same_arrays(state.params, by_optax([0.01, 1.0]))
    else:
        assert step(state, BATCH)[0].params is not None
        state = jp.init_state(step.layout, step.optimizer)
        of(state.optimizer).hyperparams["learning_rate"] = jax.device_put(0.01, jax.devices()[1])
        state, _ = step(state, BATCH)
        if chain == "in MultiSteps":
            assert_same_arrays(state.params, by_optax([0.01]))


def test_jp_fit_takes_a_state_with_a_rate_set_by_hand(tmp_path):
    step = step_of(injected())
    state = jp.init_state(step.layout, step.optimizer)
    state.optimizer.hyperparams["learning_rate"] = 0.01
    outcome = jp.fit(step, [BATCH], steps=1, batch=16, state=state, run=tmp_path / "run")
    assert_same_arrays(outcome.state.params, by_optax([0.01]))


WRONG = {
    "a fraction as a count": (lambda s: s._replace(count=1.5), "count of the state is a float", "a number of int32"),
    "a rate with a dim": (
        lambda s: s._replace(hyperparams={"learning_rate": jnp.ones(1)}),
        "is [1], the step's is []",
        "jp.init_state",
    ),
    "another dtype": (
        lambda s: s._replace(count=jnp.asarray(1.0)),
        "count of the state is float32, the step's is int32",
        "astype('int32')",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_such_number_stays_refused(name):
    change, got, fix = WRONG[name]
    step = step_of(injected())
    state = jp.init_state(step.layout, step.optimizer)
    state = type(state)(state.step, state.params, change(state.optimizer), state.model_state)
    with pytest.raises(JaxparError) as error:
        step(state, BATCH)
    assert got in str(error.value)
    assert fix in str(error.value)


def test_an_array_of_another_layout_stays_refused():
    step = step_of(injected())
    state = jp.init_state(jp.compose(Net, jp.Parallel(data=8)), step.optimizer)
    state.optimizer.hyperparams["learning_rate"] = 0.01
    with pytest.raises(JaxparError, match="a state of another layout: params/dense/"):
        step(state, BATCH)
