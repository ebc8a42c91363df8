"""Stages of different programs that update their weights in the middle of a step, beside a replay on one device.

The replay takes the microbatches one by one. It keeps every version of the weights of each stage, and differentiates a
microbatch at the versions that the table says; each stage has its own optimizer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_unequal_stages import Convolutions, Translator, batch_of, loss

import jaxpar as jp
from jaxpar.pipeline.run.asynchronous import history

STEPS, PIECES = 2, 4
PIECE = {"first": 0, "second": 1, "third": 2, "norm": 2, "dense": 3, "classes": 3}
CHAINS = {
    "sgd": optax.sgd(0.05),
    "adamw": optax.chain(optax.clip_by_global_norm(0.2), optax.adamw(3e-3, eps=1e-3, weight_decay=1e-2)),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(1e-2), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
        optax.sgd(optax.linear_schedule(0.05, 0.0, 4), momentum=0.9),
    ),
}


def of_stage(tree, stage, stage_of):
    """Returns a tree in which the parameters of other stages have no elements."""

    def one(keys, leaf):
        piece = next((PIECE[name] for key in keys if (name := str(getattr(key, "key", ""))) in PIECE), None)
        return leaf if piece is None or stage_of[piece] == stage or not leaf.ndim else leaf[:0]

    return jax.tree_util.tree_map_with_path(one, tree)


def replayed(layout, optimizer, batch, *, stages, microbatches, group, weights, data):
    """Returns the losses of the steps, and the parameters after them."""
    stage_of = [stage for stage, count in enumerate(stages) for _ in range(count)]
    start = jp.init_state(jp.compose(Convolutions, jp.Parallel(), jax.devices()[:1]), optimizer, seed=0)
    graph, params, rest = nnx.split(Convolutions(nnx.Rngs(0)), nnx.Param, ...)
    seen = history(layout.schedule, weights)
    per_update = {"2bw": len(stages)}.get(weights, 1)

    @jax.jit
    def gradient(values, microbatch):
        def total(values):
            nnx.replace_by_pure_dict(params, values)
            return loss(nnx.merge(graph, params, rest, copy=True), microbatch)[0]

        return jax.value_and_grad(total)(values)

    @jax.jit
    def update(gradients, state, values):
        updates, state = optimizer.update(gradients, state, values)
        return optax.apply_updates(values, updates), state

    def joined(trees):
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves) if leaves[0].ndim else leaves[0], *trees)

    rows = [jax.tree.map(lambda leaf, i=i: np.split(leaf, data)[i], batch) for i in range(data)]
    versions = [[of_stage(start.params, stage, stage_of)] for stage in range(len(stages))]
    states = [of_stage(start.optimizer, stage, stage_of) for stage in range(len(stages))]
    losses = []
    for _ in range(STEPS):
        first, total = [len(each) - 1 for each in versions], 0.0
        kept = states
        for end in range(per_update, microbatches // group + 1, per_update):
            sums, count = None, 0
            for number in range(end - per_update, end):
                used = joined([each[first[s] + seen[s, number]] for s, each in enumerate(versions)])
                for i in range(number * group, (number + 1) * group):
                    for part in rows:
                        microbatch = jax.tree.map(lambda leaf, i=i: leaf[i::microbatches], part)
                        value, gradients = gradient(used, microbatch)
                        total, count = total + value, count + len(microbatch["labels"])
                        sums = gradients if sums is None else jax.tree.map(jnp.add, sums, gradients)
            mean = jax.tree.map(lambda leaf, count=count: leaf / count, sums)
            changed = [
                update(of_stage(mean, stage, stage_of), kept[stage], each[-1]) for stage, each in enumerate(versions)
            ]
            # a schedule counts steps, and not the updates of one
            kept = [_with_counts(state, before) for (_, state), before in zip(changed, kept, strict=True)]
            for each, (values, _) in zip(versions, changed, strict=True):
                each.append(values)
        states = [_next_step(state) for state in kept]
        losses.append(float(total) / len(batch["labels"]))
    return losses, joined([each[-1] for each in versions])


def _schedules(change, *states):
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    return jax.tree.map(
        lambda *nodes: change(*nodes) if is_schedule(nodes[0]) else nodes[0], *states, is_leaf=is_schedule
    )


def _with_counts(state, before):
    return _schedules(lambda _, old: old, state, before)


def _next_step(state):
    return _schedules(lambda node: optax.ScaleByScheduleState(node.count + 1), state)


def case(weights, chain, pipeline, *, marks=(), **sizes):
    words = [weights, chain, *(f"{axis} {size}" for axis, size in sizes.items()), *map(str, pipeline.values())]
    return pytest.param(weights, chain, pipeline, sizes, id=", ".join(words), marks=marks)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("weights", "chain", "pipeline", "sizes"),
    [
        case("stash", "adamw", {"stages": (2, 2)}, pipe=2, data=2),
        case("2bw", "sgd", {"stages": (1, 1, 1, 1)}, pipe=4, marks=pytest.mark.slow),
        case("vertical", "masked", {"stages": (1, 1, 2)}, pipe=3, marks=pytest.mark.slow),
        case("stash", "masked", {"stages": (3, 1), "replicas": (3, 1)}, pipe=4, marks=pytest.mark.slow),
        case("2bw", "adamw", {"stages": (2, 2), "keep": "residuals"}, pipe=2, data=2, marks=pytest.mark.slow),
        case("vertical", "adamw", {"stages": (2, 1, 1), "replicas": (2, 1, 1)}, pipe=4, data=2, marks=pytest.mark.full),
    ],
)
def test_a_step_is_its_replay(weights, chain, pipeline, sizes):
    replicas = pipeline.get("replicas", (1,) * len(pipeline["stages"]))
    group = int(np.lcm.reduce(replicas))
    microbatches, data = 2 * len(replicas) * group, sizes.get("data", 1)
    batch = batch_of(Convolutions, rows=2 * microbatches * data)
    parallel = jp.Parallel(
        **sizes, pipeline=jp.Pipeline(schedule="1f1b", microbatches=microbatches, weights=weights, **pipeline)
    )
    layout = jp.compose(Convolutions, parallel, jax.devices()[: sizes["pipe"] * data])
    step, state = jp.train_step(layout, loss, CHAINS[chain]), jp.init_state(layout, CHAINS[chain], seed=0)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    expected = replayed(
        layout, CHAINS[chain], batch, stages=pipeline["stages"], microbatches=microbatches, group=group,
        weights=weights, data=data,
    )  # fmt: skip
    np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
    for value, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(value), other, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "sizes", "pipeline", "over_pipe", "over_data"),
    [
        # 4 groups of 7 microbatches: the stage of 7 devices updates after each of them, that of one device needs no sum
        ("stash", {"pipe": 8}, {"stages": (1, 3), "replicas": (7, 1)}, 4, 0),
        # 4 groups, an update for 2 of them: two updates of each stage, in ticks of their own
        pytest.param(
            "2bw", {"pipe": 4, "data": 2}, {"stages": (1, 3), "replicas": (3, 1)}, 2, 4, marks=pytest.mark.full
        ),
    ],
)
def test_gradients_are_summed_over_replicas_only_where_these_update(weights, sizes, pipeline, over_pipe, over_data):
    microbatches = 4 * pipeline["replicas"][0]
    batch = batch_of(Convolutions, rows=microbatches * sizes.get("data", 1))
    parallel = jp.Parallel(
        **sizes, pipeline=jp.Pipeline(schedule="1f1b", microbatches=microbatches, weights=weights, **pipeline)
    )
    layout = jp.compose(Convolutions, parallel, jax.devices()[: parallel.pipe * parallel.data])
    ledger = jp.inspect(jp.train_step(layout, loss, CHAINS["sgd"]), batch).ledger
    reduced = [entry for entry in ledger if entry.kind == "all-reduce" and entry.loop]
    replicas = pipeline["replicas"][0]
    of_replicas = [entry for entry in reduced if entry.axes == ("~pipe",)]
    assert {entry.loop for entry in of_replicas} == {(over_pipe,)}
    assert {(entry.group, entry.senders) for entry in of_replicas} == {(replicas, replicas / parallel.pipe)}
    # of the buffers only what the stage with replicas has: its convolution of 3 x 3 x 3 x 8 and its bias
    assert sum(entry.step_payload for entry in of_replicas) == over_pipe * 4 * (3 * 3 * 3 * 8 + 8)
    of_batch = [entry for entry in reduced if entry.axes == ("data",)]
    assert {entry.loop for entry in of_batch} == ({(over_data,)} if over_data else set())


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer", "sizes", "message"),
    [
        (Convolutions, optax.sgd(0.1), {"pipe": 2, "fsdp": 2}, "weights='stash' with fsdp=2"),
        (Translator, optax.sgd(0.1), {"pipe": 2}, "words/embedding is read by stages 0 and 1"),
        (Convolutions, optax.adafactor(0.1, min_dim_size_to_factor=8), {"pipe": 2}, "an optimizer that keeps"),
    ],
    ids=["fsdp", "tied", "adafactor"],
)
def test_what_a_stage_cannot_update_alone_is_refused(kind, optimizer, sizes, message):
    parallel = jp.Parallel(**sizes, pipeline=jp.Pipeline(schedule="1f1b", stages=(2, 2), weights="stash"))
    layout = jp.compose(kind, parallel, jax.devices()[: parallel.pipe * parallel.fsdp])
    with pytest.raises(jp.JaxparError, match=message):
        jp.train_step(layout, loss, optimizer)(jp.init_state(layout, optimizer, seed=0), batch_of(kind))
