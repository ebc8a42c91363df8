"""Parts of different programs, shapes and parameters in one table, beside `jax.grad` on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.pipeline.run.branch_table import BranchTable
from jaxpar.pipeline.run.edges import decode, encode
from jaxpar.pipeline.run.shard_exchange import ParameterShards, ShardExchange
from jaxpar.pipeline.run.stage_buffers import StageBuffers, stage_bytes
from jaxpar.pipeline.tables import library

STAGES, MICROBATCHES = 4, 8


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.2, jnp.float32)


def conv(images, kernel, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(jax.lax.conv_general_dilated(images, kernel, (stride,) * 2, "SAME", dimension_numbers=numbers))


# A network of convolutions and dense layers: messages of three shapes, integers in them, and a parameter of two parts.


def first(params, batch, x):
    return conv(batch["images"], params["first"])


def second(params, batch, x):
    return {"images": conv(x, params["second"], 2) * params["scale"], "labels": batch["labels"]}


def third(params, batch, x):
    return {"images": conv(x["images"], params["third"], 2), "labels": x["labels"]}


def head(params, batch, x):
    images = x["images"] * params["scale"]
    hidden = jax.nn.relu(images.reshape(len(images), -1) @ params["dense"])
    losses = -jax.nn.log_softmax(hidden @ params["classes"])[jnp.arange(len(images)), x["labels"]]
    return {"loss": (losses.sum(), jnp.float32(losses.size))}


PARTS = (first, second, third, head)
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


def microbatches(rows=4):
    labels = np.random.default_rng(6).integers(0, 10, (MICROBATCHES, rows))
    return {"images": normal(7, MICROBATCHES, rows, 8, 8, 3), "labels": jnp.asarray(labels)}


def alone(params, batch):
    x = ()
    for part in PARTS:
        x = part(params, batch, x)
    return x["loss"][0]


def table_of(schedule, batch, *, train=True):
    reads = [shapes({path: PARAMS[path] for path in paths}) for paths in READS]
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[1] // 2, *leaf.shape[2:]), leaf.dtype), batch)
    return BranchTable(schedule, PARTS, reads, one, train=train)


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        pytest.param("gpipe", marks=pytest.mark.slow),
        pytest.param("1f1b_phased", marks=pytest.mark.slow),
        pytest.param("zb_h1", marks=pytest.mark.slow),
    ],
)
def test_sums_and_gradients_are_those_of_one_device(name):
    batch = microbatches()
    mesh = Mesh(np.array(jax.devices()).reshape(STAGES, 2), ("pipe", "fsdp"))
    table = table_of(library.schedule(name, stages=STAGES, microbatches=MICROBATCHES, chunks=None), batch)
    exchange = ShardExchange(table.buffers, SPECS, dict(mesh.shape))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(None, "pipe"), SPECS, PartitionSpec(None, "fsdp")),
        out_specs=(PartitionSpec(), SPECS), check_vma=False,
    )  # fmt: skip
    def run(rows, params, batch):
        sums, gradients = table.run(rows[:, 0], exchange.to_stages(params), batch)
        return jax.lax.psum(sums, ("pipe", "fsdp")), exchange.to_storage(gradients, ["fsdp"])

    def mean_free(params):
        return jax.vmap(lambda one: alone(params, one))(batch).sum()

    sums, gradients = run(table.rows, PARAMS, batch)
    loss, expected = jax.value_and_grad(mean_free)(PARAMS)
    np.testing.assert_allclose(sums["loss"], [loss, MICROBATCHES * 4], rtol=1e-5)
    for path, gradient in gradients.items():
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[path]), gradient.ndim)
        np.testing.assert_allclose(gradient, expected[path], atol=1e-5 * float(jnp.abs(expected[path]).max()))


def test_an_evaluation_runs_the_forwards_alone():
    batch = microbatches()
    mesh = Mesh(np.array(jax.devices()).reshape(STAGES, 2), ("pipe", "fsdp"))
    table = table_of(
        library.schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES, chunks=None), batch, train=False
    )
    exchange = ShardExchange(table.buffers, SPECS, dict(mesh.shape))

    def run(rows, params, batch):
        return jax.lax.psum(table.run(rows[:, 0], exchange.to_stages(params), batch)[0], ("pipe", "fsdp"))

    specs = (PartitionSpec(None, "pipe"), SPECS, PartitionSpec(None, "fsdp"))
    sums = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))(
        table.rows, PARAMS, batch
    )
    losses = [float(alone(PARAMS, jax.tree.map(lambda leaf, i=i: leaf[i], batch))) for i in range(MICROBATCHES)]
    assert float(sums["loss"][0]) == pytest.approx(sum(losses), rel=1e-5)


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
    assert parts.shape == (*({"pipe": 4, "fsdp": 2}[axis] for axis in shards.over), *shards.local)
    np.testing.assert_array_equal(shards.join(parts), whole)


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
