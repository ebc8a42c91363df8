"""Chains that take other extra arguments than the loss train as in a loop of optax alone, or are refused by name."""

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

DIM, STEPS = 8, 5
LAYOUTS = {
    "zero 1": ({"fsdp": 8, "zero": 1}, {}),
    "zero 3, accumulate": ({"fsdp": 8}, {"accumulate": 2}),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.down = nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def squares(model, batch):
    losses = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(losses), losses.size


def sam(**settings):
    return optax.contrib.sam(optax.adam(0.02, eps=1e-3), optax.sgd(0.05), **settings)


def refusing():
    """Returns a transformation that takes an extra argument of its own name, and no other."""

    def update(updates, state, params=None, *, scale=0.5):
        return jax.tree.map(lambda x: scale * x, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def labels(params):
    return {name: jax.tree.map(lambda _, name=name: name, tree) for name, tree in params.items()}


CHAINS = {
    "sam": lambda: sam(),
    "sam, three steps": lambda: sam(sync_period=3, reset_state=False),
    "sam in a chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), sam()),
    "a rate in sam": lambda: optax.inject_hyperparams(lambda rate: optax.contrib.sam(optax.sgd(rate), optax.sgd(0.05)))(
        rate=optax.linear_schedule(0.1, 0.05, 5)
    ),
    "sam every second step": lambda: optax.MultiSteps(sam(), 2).gradient_transformation(),
    "sam of one part": lambda: optax.partition({"up": sam(), "down": optax.adam(0.02, eps=1e-3)}, labels),
    "another name": lambda: optax.chain(refusing(), optax.sgd(0.1)),
    "the loss beside": lambda: optax.chain(
        optax.GradientTransformation(sam().init, sam().update), optax.contrib.reduce_on_plateau(0.5, 1)
    ),
}


def batch():
    x, y = np.random.default_rng(0).normal(size=(2, 16, DIM)).astype(np.float32)
    return {"x": x, "y": y}


def plain(optimizer, *, value):
    """Returns losses and parameters of a loop of optax alone."""
    start = jp.init_state(jp.compose(Net, jp.Parallel(), jax.devices()[:1]), optimizer).params
    graph, own = nnx.split(Net(nnx.Rngs(0)))

    def mean(params):
        nnx.replace_by_pure_dict(own, params)
        total, count = squares(nnx.merge(graph, own, copy=True), batch())
        return total / count

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradients, state, params, **({"value": loss} if value else {}))
        return loss, optax.apply_updates(params, updates), state

    params, state, losses = start, optimizer.init(start), []
    for _ in range(STEPS):
        loss, params, state = step(params, state)
        losses.append(float(loss))
    return losses, params


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(CHAINS, ["another name"], ["sam, three steps"]))
def test_a_chain_without_value_trains_as_in_a_loop_of_optax(name):
    wanted, params = plain(CHAINS[name](), value=name == "the loss beside")
    layouts = LAYOUTS if name == "sam" else ["zero 1"]
    for sizes, numerics in (LAYOUTS[layout] for layout in layouts):
        optimizer = CHAINS[name]()
        layout = jp.compose(Net, jp.Parallel(**sizes))
        state, step = jp.init_state(layout, optimizer), jp.train_step(layout, squares, optimizer, **numerics)
        losses = []
        for _ in range(STEPS):
            state, metrics = step(state, batch())
            losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        assert_same_arrays(state.params, params)


REFUSED = {
    "opaque": (lambda: sam(opaque_mode=True), "grad_fn must be provided", "opaque_mode=False"),
    "a line search": (optax.lbfgs, "'grad' and 'value_fn'", "optax.adamw(3e-4)"),
    "second derivatives": (lambda: optax.contrib.sophia(1e-3), "obj_fn must be provided", "optax.adamw(3e-4)"),
    "one takes it, one does not": (
        lambda: optax.chain(sam(), optax.contrib.reduce_on_plateau()),
        "another transformation of the chain has no argument `value`",
        "optax.GradientTransformation(member.init, member.update)",
    ),
}


@pytest.mark.spread(0)
@pytest.mark.parametrize("name", some(REFUSED, ["opaque"]))
def test_a_chain_that_needs_more_is_refused_with_a_way_out(name):
    make, got, fix = REFUSED[name]
    optimizer = make()
    layout = jp.compose(Net, jp.Parallel(data=8))
    state, step = jp.init_state(layout, optimizer), jp.train_step(layout, squares, optimizer)
    with pytest.raises(JaxparError) as error:
        step(state, batch())
    assert got in str(error.value)
    assert fix in str(error.value)


def test_an_optimizer_of_a_pair_of_trees_is_refused_before_it_has_a_state():
    optimizer = optax.chain(optax.clip(1.0), optax.lookahead(optax.adam(1e-3), 5, 0.5))
    with pytest.raises(JaxparError, match=r"optax.lookahead(.|\n)*fix:  optax.contrib.schedule_free_adamw"):
        jp.init_state(jp.compose(Net, jp.Parallel(data=8)), optimizer)


def by_rate(rate, nesterov):
    return optax.sgd(rate, 0.9, nesterov=True) if nesterov > 0.5 else optax.sgd(rate)


def in_update(rate, power):
    scaled = optax.stateless(lambda updates, _: jax.tree.map(lambda x: x if power > 1 else 2 * x, updates))
    return optax.chain(optax.sgd(rate), scaled)


def in_a_loop(rate, times):
    return optax.chain(*[optax.sgd(rate) for _ in range(times)])


READ = {
    "an optimizer of optax": (optax.adafactor, {"learning_rate": 0.1}, "min_dim_size_to_factor"),
    "a factory": (by_rate, {"rate": 0.1, "nesterov": 1.0}, "nesterov"),
    "an update": (in_update, {"rate": 0.1, "power": 2.0}, "power"),
    "a loop": (in_a_loop, {"rate": 0.1, "times": 2}, "times"),
}


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", some(READ, ["a factory"]))
def test_an_injected_setting_that_python_reads_is_named_as_a_static_argument(name):
    factory, settings, static = READ[name]
    layout = jp.compose(Net, jp.Parallel(data=8))

    def loss_of_a_step(optimizer):
        state, step = jp.init_state(layout, optimizer), jp.train_step(layout, squares, optimizer)
        return float(step(state, batch())[1]["loss"])

    with pytest.raises(JaxparError) as error:
        loss_of_a_step(optax.inject_hyperparams(factory)(**settings))
    assert f'static_args=("{static}",)' in str(error.value)
    assert np.isfinite(loss_of_a_step(optax.inject_hyperparams(factory, static_args=(static,))(**settings)))
