"""Frozen parameters have no gradients, no reductions and no optimizer state; what is trained is as in plain optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import Staged, assert_same_arrays, token_loss, train
from tiny import batches as tokens

import jaxpar as jp
from jaxpar.mesh.target import missing_plugin
from jaxpar.parallel.layout import replica_messages
from jaxpar.sharding.names import Compute
from jaxpar.units import show_bytes

DIM, ROWS, RANK = 64, 16, 4
absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")


class Tuned(nnx.Module):
    """A pretrained layer with a low-rank correction, and a head."""

    def __init__(self, rngs, dim=DIM):
        self.base = nnx.Linear(dim, dim, rngs=rngs)
        self.tuned = nnx.LoRA(dim, RANK, dim, base_module=nnx.Linear(dim, dim, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(dim, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.tuned(jnp.tanh(self.base(x)))))


def squares(model, batch):
    errors = jnp.square(model(batch["inputs"]).mean(axis=-1) - batch["labels"])
    return jnp.sum(errors), jnp.float32(errors.size)


def is_base(params):
    return jax.tree_util.tree_map_with_path(lambda keys, _: "base" in jax.tree_util.keystr(keys), params)


def labels(params):
    return jax.tree.map(lambda frozen: "frozen" if frozen else "trained", is_base(params))


ADAM = optax.adamw(1e-2, eps=1e-4)
CLIP = optax.clip_by_global_norm(0.1)
CHAINS = {
    "multi_transform": optax.multi_transform({"trained": ADAM, "frozen": optax.set_to_zero()}, labels),
    "masked": optax.chain(
        optax.masked(ADAM, lambda params: jax.tree.map(lambda frozen: not frozen, is_base(params))),
        optax.masked(optax.set_to_zero(), is_base),
    ),
    "clipped inside": optax.multi_transform(
        {"trained": optax.chain(CLIP, ADAM), "frozen": optax.set_to_zero()}, labels
    ),
    "clipped outside": optax.chain(
        CLIP, optax.multi_transform({"trained": ADAM, "frozen": optax.set_to_zero()}, labels)
    ),
}
BASE = {"base/kernel", "base/bias", "tuned/base_module/kernel", "tuned/base_module/bias"}


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {
            "inputs": rng.normal(size=(ROWS, DIM)).astype(np.float32),
            "labels": rng.normal(size=ROWS).astype(np.float32),
        }


def plain(chain, steps):
    """Returns losses, parameters and norms of the trained gradients of a loop of plain optax."""
    model = jp.compose(Tuned, jp.Parallel(), jax.devices()[:1]).blueprint
    params, rest = model.init(jax.random.key(1))
    state, losses, norms = chain.init(params), [], []

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            total, count = squares(model.bind(params, rest, lambda path, value: value, Compute()), batch)
            return total / count

        return jax.value_and_grad(loss)(params)

    for batch in batches(steps):
        loss, gradients = gradient(params, batch)
        updates, state = chain.update(gradients, state, params)
        trained = jax.tree.map(lambda g, frozen: 0.0 * g if frozen else g, gradients, is_base(gradients))
        losses.append(float(loss))
        norms.append([float(optax.tree.norm(trained)), float(optax.tree.norm(gradients))])
        params = optax.apply_updates(params, updates)
    return losses, params, norms


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("chain", "layout", "accumulate"),
    [
        pytest.param("multi_transform", jp.Parallel(fsdp=8), 1, marks=pytest.mark.full),
        pytest.param("masked", jp.Parallel(fsdp=4, data=2, zero=2), 2, marks=pytest.mark.full),
        pytest.param("clipped inside", jp.Parallel(data=8), 1, marks=pytest.mark.full),
        pytest.param("clipped outside", jp.Parallel(fsdp=8, zero=1), 1, marks=pytest.mark.slow),
    ],
)
def test_training_equals_a_loop_of_plain_optax(chain, layout, accumulate):
    losses, params, norms = plain(CHAINS[chain], 3)
    made = jp.compose(Tuned, layout)
    step = jp.train_step(made, squares, CHAINS[chain], accumulate=accumulate)
    state = jp.init_state(made, CHAINS[chain], seed=1)
    for batch, loss, (of_trained, of_all) in zip(batches(3), losses, norms, strict=True):
        state, metrics = step(state, batch)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(of_all if chain == "clipped outside" else of_trained, rel=1e-4)
    assert_same_arrays(state.params, params)
    assert step.gradients.frozen == (set() if chain == "clipped outside" else BASE)
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    trained = [place.leaf for path, place in made.placements.items() if path not in BASE]
    assert sorted(leaf.shape for leaf in moments) == sorted(2 * [leaf.shape for leaf in trained])


def reduced(layout, chain, **numerics):
    """Returns the bytes of gradients that travel in a step, as compiled for GPUs that are not there."""
    made = jp.compose(lambda rngs: Tuned(rngs, dim=512), layout, jp.target_devices("h100:1x8"))
    step = jp.train_step(made, squares, CHAINS[chain], **numerics)
    rows = {"inputs": jax.ShapeDtypeStruct((512, 512), "float32"), "labels": jax.ShapeDtypeStruct((512,), "float32")}
    ledger = jp.inspect(step, rows).ledger
    return sum(entry.step_payload for entry in ledger if entry.kind in ("all-reduce", "reduce-scatter"))


TRAINED = 4 * (2 * 512 * RANK + 8 * 512 + 8)


@pytest.mark.nightly
@absent
@pytest.mark.parametrize(
    ("layout", "numerics"),
    [
        pytest.param(jp.Parallel(data=8), {}, marks=pytest.mark.full),
        (jp.Parallel(fsdp=8), {"remat": "full"}),
        pytest.param(jp.Parallel(fsdp=8, zero=2), {"accumulate": 2}, marks=pytest.mark.full),
    ],
    ids=["data", "ZeRO-3", "ZeRO-2, accumulated"],
)
def test_on_gpus_no_gradient_of_a_frozen_parameter_travels(layout, numerics):
    assert reduced(layout, "multi_transform", **numerics) == pytest.approx(
        numerics.get("accumulate", 1) * TRAINED, rel=0.01
    )


@absent
def test_replicas_that_step_apart_say_that_they_send_no_frozen_parameter():
    composed = jp.compose(Tuned, jp.Parallel(data=8, exchange=jp.Exchange("local", every=2)))
    layout = jp.train_step(composed, squares, CHAINS["multi_transform"]).layout
    sent = {path for each in replica_messages(layout) for path in each.collective.parameters}
    assert sent == layout.placements.keys() - BASE
    share = 4 * sum(layout.placements[path].leaf.size for path in sent) * 2 * 7 / 8  # of an all-reduce over eight
    assert f"send {show_bytes(share)} a device every 2 steps" in layout.explain()


@pytest.mark.nightly
def test_a_clip_over_all_parameters_reads_the_gradients_of_frozen_ones():
    assert reduced(jp.Parallel(data=8), "clipped outside") > 4 * 2 * 512 * 512


@pytest.mark.nightly
@absent
def test_where_weights_change_between_ticks_no_gradient_of_a_frozen_parameter_is_reduced():
    def sent(names):
        chain = optax.multi_transform(
            {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()},
            lambda params: jax.tree_util.tree_map_with_path(
                lambda keys, _: "frozen" if jax.tree_util.keystr(keys).startswith(names) else "trained", params
            ),
        )
        pipeline = jp.Pipeline(schedule="1f1b", microbatches=2, weights="stash")
        layout = jp.compose(
            lambda rngs: Staged(rngs, layers=2, tied=False),
            jp.Parallel(pipe=2, data=4, pipeline=pipeline),
            jp.target_devices("h100:1x8"),
        )
        ledger = jp.inspect(jp.train_step(layout, token_loss, chain), next(tokens(1))).ledger
        sizes = {path: place.leaf.bytes for path, place in layout.placements.items()}
        return sum(entry.step_payload for entry in ledger if entry.kind == "all-reduce"), sizes

    (every, sizes), (fewer, _), ticks = sent(("['none']",)), sent(("['blocks']", "['embed']")), 6
    frozen = sum(size // (2 if path.startswith("blocks") else 1) for path, size in sizes.items() if "head" not in path)
    assert every - fewer >= ticks * frozen


@pytest.mark.nightly
def test_in_a_pipeline_frozen_layers_stay_as_on_one_device():
    def frozen(params):
        return jax.tree_util.tree_map_with_path(lambda keys, _: "blocks" in jax.tree_util.keystr(keys), params)

    chain = optax.chain(optax.masked(optax.set_to_zero(), frozen), optax.sgd(0.1))
    runs = [
        train(Staged, layout, devices, chain=chain, steps=2, loss=token_loss)
        for layout, devices in ((jp.Parallel(pipe=4, data=2), None), (jp.Parallel(), jax.devices()[:1]))
    ]
    (got, state, _), (want, expected, _) = runs
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, expected.params)
