"""Parts of different programs, shapes and parameters in one table, beside `jax.grad` on one device."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.jaxprs.dataflow import Traced, inline_calls, split_groups
from jaxpar.jaxprs.part_programs import Inputs, JaxprCut
from jaxpar.pipeline.run.branch_table import BranchTable
from jaxpar.pipeline.run.edges import decode, encode
from jaxpar.pipeline.run.shard_exchange import ParameterShards, ShardExchange
from jaxpar.pipeline.run.stage_buffers import StageBuffers, load, stage_bytes
from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.pipeline.tables import library

STAGES, MICROBATCHES = 4, 8


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.2, jnp.float32)


def conv(images, kernel, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(jax.lax.conv_general_dilated(images, kernel, (stride,) * 2, "SAME", dimension_numbers=numbers))


# A network of convolutions and dense layers: messages of three shapes, one that passes by two parts, integers of the
# batch, a parameter of two parts, and an average that a part keeps.


def network(params, average, batch):
    labels = batch["labels"]
    with jax.named_scope("part 0"):
        x = images = conv(batch["images"], params["first"])
    with jax.named_scope("part 1"):
        x = conv(x, params["second"], 2) * params["scale"]
        average = 0.9 * average + 0.1 * x.mean()
    with jax.named_scope("part 2"):
        x = conv(x, params["third"], 2)
    with jax.named_scope("part 3"):
        x = x * params["scale"] + images.mean(axis=(1, 2, 3))[:, None, None, None]
        hidden = jax.nn.relu(x.reshape(len(x), -1) @ params["dense"])
        losses = -jax.nn.log_softmax(hidden @ params["classes"])[jnp.arange(len(x)), labels]
        return average, {"loss": (losses.sum(), jnp.float32(losses.size)), "hits": (losses.max(), jnp.float32(1))}


READS = (("first",), ("second", "scale"), ("third",), ("dense", "classes", "scale"))
PARAMS = {
    "first": normal(0, 3, 3, 3, 8),
    "second": normal(1, 3, 3, 8, 16),
    "third": normal(2, 3, 3, 16, 16),
    "dense": normal(3, 64, 32),
    "classes": normal(4, 32, 10),
    "scale": normal(5, 16),
}
SPECS = {
    "first": PartitionSpec(None, None, None, "pipe"),
    "second": PartitionSpec(None, None, ("fsdp", "pipe")),
    "third": PartitionSpec(None, None, "pipe", "fsdp"),
    "dense": PartitionSpec(("pipe", "fsdp")),
    "classes": PartitionSpec("fsdp"),
    "scale": PartitionSpec("pipe"),
}


def microbatches(rows=4, count=MICROBATCHES):
    labels = np.random.default_rng(6).integers(0, 10, (count, rows))
    return {"images": normal(7, count, rows, 8, 8, 3), "labels": jnp.asarray(labels)}


def traced_parts(batch, stages, *, rows, train=True):
    """Returns the parts of the network on so many stages, and the index of its loss."""
    one = {name: jax.ShapeDtypeStruct((rows, *leaf.shape[2:]), leaf.dtype) for name, leaf in batch.items()}
    params = dict(sorted(PARAMS.items()))
    traced = Traced(network, params, jnp.float32(0), one).closed
    closed = inline_calls(jaxpr_as_fun(traced), traced.in_avals, ["jit", "pjit"])
    ins = split_groups(closed.jaxpr.invars, [len(PARAMS), 1, len(batch)])
    kept = ins[1] if train else []
    cut = JaxprCut(closed, Inputs(params=ins[0], data=[*([] if train else ins[1]), *ins[2]], state=kept))
    found = [re.search(r"part (\d)", str(eqn.source_info.name_stack)) for eqn in closed.jaxpr.eqns]
    part_of = np.maximum.accumulate([min(int(match[1]), stages - 1) if match else 0 for match in found])
    average, *outs = closed.jaxpr.outvars
    return cut.parts(part_of, outs, {0: average} if train else {}, count=stages), 2  # hits come before the loss


def test_parts_read_and_send_what_they_need():
    parts, _ = traced_parts(microbatches(), 4, rows=2)
    paths = sorted(PARAMS)
    assert [sorted(paths[i] for i in part.params) for part in parts] == [sorted(reads) for reads in READS]
    assert [[*part.receives] for part in parts] == [[], [0], [1], [0, 2]]  # labels and keys are not sent
    assert [part.state for part in parts] == [(), (0,), (), ()]
    image = parts[3].receives[0][0].aval
    assert image.shape == (2, 8, 8, 8)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "replicas", "chunks", "keep"),
    [
        ("1f1b", (1, 1, 1, 1), 1, "inputs"),
        ("1f1b", (3, 1), 1, "residuals"),
        pytest.param("gpipe", (1, 1, 1, 1), 1, "residuals", marks=pytest.mark.slow),
        pytest.param("1f1b_phased", (2, 1, 1), 1, "inputs", marks=pytest.mark.slow),
        pytest.param("zb_h1", (1, 1, 1, 1), 1, "residuals", marks=pytest.mark.slow),
        pytest.param("interleaved", (2, 2), 2, "residuals", marks=pytest.mark.slow),
        pytest.param("zb_v", (1, 3), 2, "inputs", marks=pytest.mark.slow),
    ],
)
def test_sums_and_gradients_are_those_of_one_device(name, replicas, chunks, keep):
    replicas, rows = StageReplicas(replicas), 4
    count = 4 * replicas.group
    batch = microbatches(rows, count)
    mesh = Mesh(np.array(jax.devices()).reshape(STAGES, 2), ("pipe", "fsdp"))
    parts, loss = traced_parts(batch, len(replicas.counts) * chunks, rows=rows // 2)
    schedule = library.schedule(name, stages=len(replicas.counts), microbatches=4, chunks=chunks)
    table = BranchTable(
        schedule, replicas, parts, shapes(dict(sorted(PARAMS.items()))), loss=loss, train=True, keep=keep
    )
    exchange = ShardExchange(table.buffers, replicas, SPECS, dict(mesh.shape))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(SPECS, PartitionSpec(None, "fsdp")),
        out_specs=(PartitionSpec(), SPECS, PartitionSpec()), check_vma=False,
    )  # fmt: skip
    def run(params, batch):
        outs, gradients, state = table.run(
            exchange.send_params(params), partial(load, jax.tree.leaves(batch)), {0: jnp.float32(1)}
        )
        sums = jax.lax.psum(outs, ("pipe", "fsdp"))
        return sums, exchange.send_gradients(gradients, ["fsdp"]), table.mean_state(state, ["fsdp"])

    sums, gradients, state = run(PARAMS, batch)

    def alone(params):
        def one(average, batch):
            average, sums = network(params, average, batch)
            return average, sums["loss"][0]

        # a replica runs every R-th microbatch of its rows, and its average begins where that of the others does
        runs = replicas.counts[min(1, len(replicas.counts) - 1)]
        halves = [jax.tree.map(lambda leaf, h=half, r=r: leaf[r::runs, h * 2 : h * 2 + 2], batch)
                  for half in range(2) for r in range(runs)]  # fmt: skip
        averages, losses = zip(*[jax.lax.scan(one, jnp.float32(1), half) for half in halves], strict=True)
        return sum(loss.sum() for loss in losses), jnp.mean(jnp.stack(averages))

    (total, average), expected = jax.value_and_grad(alone, has_aux=True)(PARAMS)
    np.testing.assert_allclose(sums[loss : loss + 2], [total, count * rows], rtol=1e-5)
    np.testing.assert_allclose(state[0], average, rtol=1e-5)
    for path, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[path]), gradient.ndim)
        np.testing.assert_allclose(gradient, expected[path], atol=1e-5 * float(jnp.abs(expected[path]).max()))


@pytest.mark.nightly
def test_an_evaluation_runs_the_forwards_alone():
    batch = microbatches()
    mesh = Mesh(np.array(jax.devices()).reshape(STAGES, 2), ("pipe", "fsdp"))
    parts, loss = traced_parts(batch, STAGES, rows=2, train=False)
    schedule, replicas = (
        library.schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES),
        StageReplicas((1,) * STAGES),
    )
    table = BranchTable(schedule, replicas, parts, shapes(dict(sorted(PARAMS.items()))), loss=loss, train=False)
    exchange = ShardExchange(table.buffers, replicas, SPECS, dict(mesh.shape))

    def run(params, batch):
        data = [jnp.ones(MICROBATCHES), *jax.tree.leaves(batch)]
        return jax.lax.psum(table.run(exchange.send_params(params), partial(load, data), {})[0], ("pipe", "fsdp"))

    specs = (SPECS, PartitionSpec(None, "fsdp"))
    sums = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))(
        PARAMS, batch
    )
    total = jax.vmap(lambda one: network(PARAMS, jnp.float32(1), one)[1]["loss"][0])(batch).sum()
    assert float(sums[loss]) == pytest.approx(float(total), rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(1, 6), min_size=2, max_size=3))
def test_each_microbatch_goes_from_its_replica_to_its_replica_once(counts):
    replicas = StageReplicas(tuple(counts))
    rounds = list(replicas.rounds(0, 1))
    for messages in rounds:
        assert len({message[0] for message in messages}) == len({message[2] for message in messages}) == len(messages)
    sent = sorted(message for messages in rounds for message in messages)
    expected = [
        (i % counts[0], i // counts[0], counts[0] + i % counts[1], i // counts[1]) for i in range(replicas.group)
    ]
    assert sent == sorted(expected)
    assert len(rounds) == max(replicas.share(0), replicas.share(1))


@pytest.mark.nightly
@settings(deadline=None, max_examples=40)
@given(
    stages=st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1),
        min_size=2, max_size=4,
    )
)  # fmt: skip
def test_a_device_has_the_bytes_of_the_fullest_stage_and_what_did_not_fit(stages):
    numbers = np.random.default_rng(0)
    trees = [{f"{path}{i}": numbers.normal(size=shape).astype(np.float32) for path, shape in stage.items()}
             for i, stage in enumerate(stages)]  # fmt: skip
    buffers = StageBuffers([shapes(tree) for tree in trees])
    fullest = max(map(stage_bytes, buffers.stages))
    assert sum(buffer.size * 4 for buffer in buffers.buffers) >= fullest
    first_fit = max(range(len(trees)), key=lambda stage: stage_bytes(buffers.stages[stage]))
    assert len({region.buffer for region in buffers.regions[first_fit].values()}) == len(trees[first_fit])
    for stage, tree in enumerate(trees):
        filled = buffers.fill(stage, tree)
        assert [array.shape for array in filled] == [buffer.shape for buffer in buffers.buffers]
        for path, value in buffers.read(filled, stage).items():
            np.testing.assert_array_equal(value, tree[path])
        twice = buffers.read(buffers.add(buffers.add(buffers.zeros(), stage, tree), stage, tree), stage)
        for path, value in twice.items():
            np.testing.assert_array_equal(value, 2 * tree[path])


@pytest.mark.parametrize("axes", [((), ("pipe",)), (("fsdp", "pipe"), ()), (("pipe",), ("fsdp",)), (("fsdp",), ())])
def test_shards_that_are_split_are_joined(axes):
    shards = ParameterShards(axes, (8, 16), {"pipe": 4, "fsdp": 2})
    whole = np.arange(128).reshape(8, 16)
    parts = shards.split(whole)
    assert parts.shape == (*({"pipe": 4, "fsdp": 2}[axis] for axis in shards.split_axes), *shards.shard_shape)
    np.testing.assert_array_equal(shards.join(parts), whole)


@pytest.mark.nightly
def test_a_message_holds_arrays_of_any_dtype():
    tree = {
        "ids": jnp.arange(6).reshape(2, 3),
        "mask": jnp.array([True, False, True]),
        "half": jnp.ones((3,), jnp.bfloat16),
        "bytes": jnp.arange(5, dtype=jnp.uint8),
        "key": jax.random.key(3),
        "number": jnp.float32(0.5),
    }
    back = decode(encode(tree, 100), jax.eval_shape(lambda: tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for path, value in tree.items():
        assert back[path].dtype == value.dtype
        data = jax.random.key_data if path == "key" else np.asarray
        np.testing.assert_array_equal(data(back[path]), data(value))
