"""Published architectures in stages of different programs: equal to Flax and optax alone, which run every microbatch.

What a model computes of the rows that it sees together, such as averages of BatchNorm and contrastive losses, is of a
microbatch of one replica. So the loop of Flax alone runs the microbatches of each replica one after the other.
"""

from contextlib import nullcontext
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from unequal_models import MODELS

import jaxpar as jp

OPTIMIZER = optax.sgd(0.03, momentum=0.9)
STEPS = 2


def linen_loop(entry, params, state):
    """Returns (params, averages, microbatch) to (loss sum, (count, averages)), and the averages that a model has."""
    averages = state["collections"]

    class Bound:
        def __init__(self, params, averages):
            self.variables = {"params": params, **averages}

        def __call__(self, *inputs, **options):
            y, self.variables = entry.bare.apply(self.variables, *inputs, mutable=[*averages], **options)
            return y

    def run(params, averages, batch):
        model = Bound(params, averages)
        total, count = entry.loss(model, batch)
        return total, (count, {name: model.variables[name] for name in averages})

    return run, averages


def nnx_loop(entry, params, state):
    graph, own, rest = nnx.split(entry.bare(nnx.Rngs(0)), nnx.Param, ...)

    def run(params, averages, batch):
        nnx.replace_by_pure_dict(own, nnx.restore_int_paths(params))
        model = nnx.merge(graph, own, averages, copy=True)
        total, count = entry.loss(model, batch)
        return total, (count, nnx.state(model, nnx.Not(nnx.Param)))

    return run, rest


def alone(entry, batch, *, data, microbatches, replicas=1):
    """Returns losses, parameters and averages after the steps, by Flax and optax alone.

    Args:
      entry: A model of `MODELS`.
      batch: The batch of all steps.
      data: Number of replicas that have rows of their own.
      microbatches: Number of microbatches.
      replicas: Number of devices of the stage that keeps averages, each of which runs every so many-th microbatch.
    """
    layout = jp.compose(entry.make, jp.Parallel(), jax.devices()[:1])
    state = jp.init_state(layout, OPTIMIZER, seed=0)
    loop = nnx_loop if isinstance(entry.bare, type) else linen_loop
    params, (run, averages) = state.params, loop(entry, state.params, state.model_state)

    def in_turn(leaf):  # [rows] to [data x replicas, microbatches of each, rows]
        own = np.stack([[part[i::microbatches] for i in range(microbatches)] for part in np.split(leaf, data)])
        own = own.reshape(data, microbatches // replicas, replicas, *own.shape[2:]).swapaxes(1, 2)
        return own.reshape(data * replicas, microbatches // replicas, *own.shape[3:])

    turns = jax.tree.map(in_turn, batch)

    @jax.jit
    def step(params, averages, kept):
        def microbatch(params, carry, batch):
            total, (count, averages) = run(params, carry, batch)
            return averages, (total, count)

        def mean(params):
            last, (totals, counts) = jax.lax.map(
                lambda turn: jax.lax.scan(lambda *args: microbatch(params, *args), averages, turn), turns
            )
            return totals.sum() / counts.sum(), jax.tree.map(_mean, last)

        (loss, new), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        updates, kept = OPTIMIZER.update(gradients, kept, params)
        return loss, optax.apply_updates(params, updates), new, kept

    losses, kept = [], OPTIMIZER.init(params)
    for _ in range(STEPS):
        loss, params, averages, kept = step(params, averages, kept)
        losses.append(float(loss))
    return losses, params, averages


def _mean(leaf):
    return leaf.mean(axis=0) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) else leaf[0]


def trained(entry, batch, parallel):
    layout = jp.compose(entry.make, parallel, jax.devices()[: parallel.pipe * parallel.data * parallel.fsdp])
    step, state, losses = jp.train_step(layout, entry.loss, OPTIMIZER), jp.init_state(layout, OPTIMIZER, seed=0), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def even(pieces, parts):
    """Returns as equal numbers of pieces as possible."""
    return tuple(end - start for start, end in pairwise(pieces * i // parts for i in range(parts + 1)))


def numbers(tree):
    """Returns the arrays of averages, in the order of their names, without counts and keys."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    words = lambda keys: [str(getattr(key, "key", getattr(key, "name", key))) for key in keys]  # noqa: E731
    arrays = {"/".join(words(keys)).removesuffix("/value"): leaf for keys, leaf in flat if leaf.ndim}
    return [np.asarray(array) for _, array in sorted(arrays.items())]


def assert_alike(entry, parallel, *, microbatches, replicas=1):
    batch = entry.batch(2 * microbatches * parallel.data * parallel.fsdp)
    losses, state = trained(entry, batch, parallel)
    data = parallel.data * parallel.fsdp
    expected, params, averages = alone(entry, batch, data=data, microbatches=microbatches, replicas=replicas)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for value, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(np.asarray(value), other, atol=1e-5)
    found = numbers(state.model_state.get("collections", state.model_state))
    assert len(found) == len(numbers(averages))
    for value, other in zip(found, numbers(averages), strict=True):
        np.testing.assert_allclose(value, other, atol=1e-5)


def case(name, schedule, *, marks=(), chunks=1, keep="inputs", **sizes):
    words = [name, schedule, keep, *(f"{axis} {size}" for axis, size in sizes.items())]
    return pytest.param(
        name, {"schedule": schedule, "chunks": chunks, "keep": keep}, sizes, id=", ".join(words), marks=marks
    )


@pytest.mark.spread(4)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        case("batch_norm", "gpipe", pipe=4),
        *(
            case(*row, marks=pytest.mark.slow, **sizes)
            for row, sizes in [
                (("alexnet", "1f1b"), {"pipe": 8, "keep": "residuals"}),
                (("vgg16", "interleaved"), {"pipe": 4, "chunks": 2}),
                (("resnet", "1f1b"), {"pipe": 4, "data": 2, "keep": "residuals"}),
                (("unet", "1f1b"), {"pipe": 4, "data": 2, "keep": "residuals"}),
                (("resnet", "zb_h1"), {"pipe": 2, "fsdp": 2}),
                (("gnmt", "1f1b_phased"), {"pipe": 4, "data": 2}),
                (("two_towers", "zb_h1"), {"pipe": 4, "data": 2}),
                (("captioner", "1f1b"), {"pipe": 8}),
            ]
        ),
        *(
            case(*row, marks=pytest.mark.full, **sizes)
            for row, sizes in [
                (("alexnet", "interleaved"), {"pipe": 2, "data": 2, "chunks": 2}),
                (("alexnet", "gpipe"), {"pipe": 4, "data": 2}),
                (("vgg16", "zb_h1"), {"pipe": 8}),
                (("vgg16", "1f1b"), {"pipe": 2, "data": 2, "keep": "residuals"}),
                (("resnet", "interleaved"), {"pipe": 4, "data": 2, "chunks": 2}),
                (("resnet", "gpipe"), {"pipe": 8}),
                (("batch_norm", "1f1b"), {"pipe": 2, "data": 2}),
                (("gnmt", "gpipe"), {"pipe": 2, "keep": "residuals"}),
                (("gnmt", "interleaved"), {"pipe": 4, "data": 2, "chunks": 2}),
                (("gnmt", "zb_h1"), {"pipe": 8}),
                (("t5", "zb_v"), {"pipe": 2, "data": 2, "chunks": 2}),
                (("t5", "gpipe"), {"pipe": 8, "keep": "residuals"}),
                (("t5", "1f1b"), {"pipe": 4, "data": 2}),
                (("unet", "interleaved"), {"pipe": 2, "data": 2, "chunks": 2}),
                (("unet", "gpipe"), {"pipe": 2}),
                (("unet", "zb_h1"), {"pipe": 4}),
                (("two_towers", "1f1b"), {"pipe": 8, "keep": "residuals"}),
                (("two_towers", "interleaved"), {"pipe": 4, "chunks": 2}),
                (("captioner", "interleaved"), {"pipe": 4, "data": 2, "chunks": 2}),
                (("captioner", "zb_h1"), {"pipe": 2, "data": 2, "keep": "residuals"}),
            ]
        ),
    ],
)
def test_losses_parameters_and_averages_are_those_of_flax_alone(name, options, sizes):
    entry, microbatches = MODELS[name], max(4, sizes["pipe"])
    stages = even(entry.pieces, sizes["pipe"] * options["chunks"])
    pipeline = jp.Pipeline(stages=stages, microbatches=microbatches, **options)
    contrastive = name == "two_towers"  # of a microbatch, as in the loss that it is compared with
    with pytest.warns(UserWarning, match="pairs the rows of a batch") if contrastive else nullcontext():
        assert_alike(entry, jp.Parallel(**sizes, pipeline=pipeline), microbatches=microbatches)


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("name", "replicas", "sizes"),
    [
        pytest.param("resnet", (3, 1), {"pipe": 4}, id="resnet, 3-1", marks=pytest.mark.slow),
        pytest.param("vgg16", (4, 2, 2), {"pipe": 8}, id="vgg16, 4-2-2", marks=pytest.mark.slow),
        pytest.param("t5", (1, 2, 1), {"pipe": 4, "data": 2}, id="t5, 1-2-1, data 2", marks=pytest.mark.slow),
        pytest.param("gnmt", (3, 2, 1), {"pipe": 6}, id="gnmt, 3-2-1", marks=pytest.mark.full),
        pytest.param("alexnet", (7, 1), {"pipe": 8}, id="alexnet, 7-1", marks=pytest.mark.full),
    ],
)
def test_replicated_stages_are_those_of_flax_alone(name, replicas, sizes):
    entry = MODELS[name]
    pipeline = jp.Pipeline(stages=even(entry.pieces, len(replicas)), replicas=replicas)
    microbatches = 2 * len(replicas) * pipeline.group
    if name == "resnet":  # all averages on the stage of three devices
        pipeline = jp.Pipeline(stages=(7, 1), replicas=replicas)
    parallel = jp.Parallel(**sizes, pipeline=pipeline)
    assert_alike(entry, parallel, microbatches=microbatches, replicas=3 if name == "resnet" else 1)
