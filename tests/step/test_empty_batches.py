"""A batch, a microbatch or a replica in which nothing counts: its gradient is zero, on every layout.

The oracle is optax on one device: by the gradient of the whole batch where something in it counts, else by zeros.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import BATCH, Staged, assert_same_arrays, batches, token_loss

import jaxpar as jp
from jaxpar.exchange.population.population import Pbt
from jaxpar.optim import optax_chain
from jaxpar.optim.optimizer import Optimizer
from jaxpar.train.faults import Faults

OPTIMIZER = optax.adamw(1e-2, eps=1e-4, weight_decay=0.1)
STAGED = partial(Staged, layers=2, tied=False, vocab=16, dim=8, hidden=8)
# one program serves both claims, so that each layout is compiled once
LAYOUTS = {
    "data 8, accumulate 2": ({"data": 8}, 8, {"accumulate": 2}),
    "zero 1, accumulate 2": ({"fsdp": 4, "data": 2, "zero": 1}, 8, {"accumulate": 2}),
    "zero 3": ({"fsdp": 8}, 8, {}),
    "2x2x2, accumulate 2": ({"data": 2, "fsdp": 2, "tensor": 2}, 8, {"accumulate": 2}),
    "pipe": ({"pipe": 2, "data": 2, "pipeline": jp.Pipeline(schedule="gpipe", microbatches=2)}, 4, {}),
    "pipe, spread": ({"pipe": 2, "pipeline": jp.Pipeline(schedule="gpipe", microbatches=2, head="spread")}, 2, {}),
    "bf16 gradients": ({"data": 2, "exchange": jp.Exchange("bf16", smallest=64)}, 2, {"accumulate": 2}),
}


def multiplied(model, batch):
    """Without a `where`: the gradient of 0 * loss / 0 is nan."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def small(count):
    """Yields batches of a vocabulary of 16."""
    for batch in batches(count):
        yield batch | {name: batch[name] % 16 for name in ("inputs", "targets")}


def with_mask(batch, rows):
    """Returns a batch in which only these rows count, as they did."""
    mask = np.zeros_like(batch["mask"])
    mask[rows] = 1.0
    return batch | {"mask": mask}


@jax.jit
def mean_gradients(params, batch):
    def mean(params):
        with nnx.use_eager_sharding(False):
            graph, own, rest = nnx.split(STAGED(nnx.Rngs(0)), nnx.Param, ...)
            nnx.replace_by_pure_dict(own, params)
            total, count = multiplied(nnx.merge(graph, own, rest), batch)
        return total / count

    return jax.grad(mean)(params)


def plain(params, state, batch):
    """Returns parameters and state after one update of optax, by zeros where nothing counts."""
    gradients = mean_gradients(params, batch) if batch["mask"].any() else jax.tree.map(jnp.zeros_like, params)
    updates, state = jax.jit(OPTIMIZER.update)(gradients, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Staged. each device computes")
@pytest.mark.parametrize("layout", some(LAYOUTS, ["2x2x2, accumulate 2"], ["zero 3", "pipe", "bf16 gradients"]))
def test_what_does_not_count_has_no_gradient(layout):
    sizes, count, numerics = LAYOUTS[layout]
    layout = jp.compose(STAGED, jp.Parallel(**sizes), jax.devices()[:count])
    state, step = jp.init_state(layout, OPTIMIZER), jp.train_step(layout, multiplied, OPTIMIZER, **numerics)
    params = jax.device_get(state.params)
    held = OPTIMIZER.init(params)
    # rows i, i + 2, ... are microbatch i; the first half of the rows is that of the first replica
    for batch, rows in zip(small(4), ([], slice(None, None, 2), [], slice(1, BATCH // 2, 2)), strict=True):
        batch = with_mask(batch, rows)
        state, metrics = step(state, batch)
        params, held = plain(params, held, batch)
        assert metrics["tokens"] == batch["mask"].sum()
        assert np.isnan(metrics["loss"]) == (not batch["mask"].any())
        assert metrics["grad_norm"] == 0 if not batch["mask"].any() else metrics["grad_norm"] > 0
        if "exchange" not in sizes:
            assert_same_arrays((state.params, state.optimizer), (params, held))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params)))
    assert int(state.optimizer[0].count) == 4


@pytest.mark.nightly
def test_an_update_of_a_pipeline_without_a_flush_is_by_zeros_where_nothing_counts():
    how = jp.Pipeline(schedule="1f1b", microbatches=4, weights="stash")
    layout = jp.compose(STAGED, jp.Parallel(pipe=2, pipeline=how), jax.devices()[:2])
    decays = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    state, step = jp.init_state(layout, decays), jp.train_step(layout, multiplied, decays)
    before = jax.device_get(state.params)
    state, metrics = step(state, with_mask(next(small(1)), []))
    assert metrics["tokens"] == metrics["grad_norm"] == 0
    assert_same_arrays(state.params, jax.tree.map(lambda x: x * 0.99**4, before))


@pytest.mark.nightly
def test_a_replica_in_which_nothing_counts_stays_where_it_is():
    """Between two meetings each steps by its own rows."""
    layout = jp.compose(STAGED, jp.Parallel(data=2, exchange=jp.Exchange("local", every=8)), jax.devices()[:2])
    sgd = optax.sgd(0.1)
    state, step = jp.init_state(layout, sgd), jp.train_step(layout, multiplied, sgd, accumulate=2)
    before = jax.device_get(state.params)
    state, _ = step(state, with_mask(next(small(1)), slice(0, BATCH // 2, 2)))
    after = jax.device_get(state.params)
    assert_same_arrays(jax.tree.map(lambda x: x[1], after), jax.tree.map(lambda x: x[1], before))
    assert all((a[0] != b[0]).any() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_microbatches_of_float16_in_which_nothing_counts():
    model = partial(nnx.Linear, 4, 4, use_bias=False, param_dtype=jnp.float16)

    def loss(model, batch):
        mask = batch["mask"][:, None].astype(jnp.float32)
        return jnp.sum(model(batch["x"]).astype(jnp.float32) * mask), jnp.sum(mask)

    layout = jp.compose(lambda rngs: model(rngs=rngs), jp.Parallel(), jax.devices()[:1])
    state, step = jp.init_state(layout, optax.sgd(1.0)), jp.train_step(layout, loss, optax.sgd(1.0), accumulate=2)
    before, x = jax.device_get(state.params["kernel"]), np.ones((8, 4), np.float16)
    state, metrics = step(state, {"x": x, "mask": np.arange(8) % 2})
    np.testing.assert_allclose(before - jax.device_get(state.params["kernel"]), np.ones((4, 4)), rtol=2e-3)
    assert metrics["grad_norm"] == 4


@pytest.mark.nightly
def test_members_of_a_population_remember_no_loss_of_nothing():
    values = {"learning_rate": (0.1, 0.2)}
    exchange = Pbt(values=values, every=8)
    optimizer = optax_chain.build(Optimizer(name="sgd"), 8, values)
    layout = jp.compose(STAGED, jp.Parallel(data=2, exchange=exchange), jax.devices()[:2])
    state, step = jp.init_state(layout, optimizer), jp.train_step(layout, multiplied, optimizer)
    first, nothing = small(2)
    state, _ = step(state, first)
    losses = jax.device_get(state.exchange["each"]["losses"])
    assert np.isfinite(losses).all()
    state, metrics = step(state, with_mask(nothing, []))
    assert np.isnan(metrics["loss"])
    np.testing.assert_array_equal(state.exchange["each"]["losses"], losses)


@pytest.mark.nightly
def test_a_step_that_guards_leaves_the_state_bit_for_bit_and_fit_goes_on(capsys):
    layout = jp.compose(STAGED, jp.Parallel(data=2), jax.devices()[:2])
    step = jp.train_step(layout, token_loss, OPTIMIZER, guard=True)
    first, nothing, last = small(3)
    data = [first, with_mask(nothing, []), with_mask(nothing, []), last]
    done = jp.fit(step, data, steps=4, batch=BATCH, faults=Faults(on_bad_step="skip", skips=1))
    assert np.isfinite(done.last["loss"])
    assert int(done.state.optimizer[0].count) == 2
    assert capsys.readouterr().out.count("no example of its batch counts") == 2
