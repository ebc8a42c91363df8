"""Batches that the user put on devices, and batches with more than arrays in them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import some

import jaxpar as jp
from jaxpar.errors import JaxparError

DIM = 8
X, Y = np.random.default_rng(0).normal(size=(2, 16, DIM)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def squares(model, batch):
    losses = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(losses), losses.size


def views(model, batch):
    losses = (model(batch["views_0"]) - model(batch["views_1"])) ** 2
    return jnp.sum(losses), losses.size


def trained(batch, loss=squares, sizes=None, devices=None, **numerics):
    """Returns the loss of a step and of an evaluation."""
    layout, optimizer = jp.compose(Net, jp.Parallel(**(sizes or {})), devices), optax.sgd(0.1)
    step = jp.train_step(layout, loss, optimizer, **numerics)
    total, count = step.evaluate(jp.init_state(layout, optimizer), batch)["loss"]
    _, metrics = step(jp.init_state(layout, optimizer), batch)
    return float(metrics["loss"]), float(total) / float(count)


def on(mesh, spec, rows=16):
    return {name: jax.device_put(value[:rows], NamedSharding(mesh, spec)) for name, value in (("x", X), ("y", Y))}


def reversed_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("rows",))


MESHES = {
    "explicit": lambda: (jax.make_mesh((8,), ("batch",)), P("batch")),
    "explicit, two axes": lambda: (jax.make_mesh((2, 4), ("a", "b")), P("b")),
    "explicit, whole": lambda: (jax.make_mesh((8,), ("batch",)), P()),
    "auto": lambda: (jax.sharding.Mesh(np.array(jax.devices()), ("x",)), P("x")),
    "in another order": lambda: (reversed_mesh(), P("rows")),
}


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("name", some(MESHES, ["explicit, whole"]))
@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_batch_on_another_mesh_of_the_same_devices_is_placed(name, sizes):
    mesh, spec = MESHES[name]()
    wanted = trained({"x": X, "y": Y}, devices=jax.devices()[:1])
    np.testing.assert_allclose(trained(on(mesh, spec), sizes=sizes), wanted, rtol=1e-5)


def test_microbatches_divide_the_examples_of_a_placed_batch_too():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    layout, optimizer = jp.compose(Net, jp.Parallel(data=8)), optax.sgd(0.1)
    step = jp.train_step(layout, squares, optimizer, accumulate=2)
    with pytest.raises(JaxparError, match="x \\[11, 8\\] in the batch has 11 examples; data=8 x accumulate=2"):
        step(jp.init_state(layout, optimizer), on(mesh, P(), 11))
    with pytest.raises(JaxparError, match="8 examples; data=8 x accumulate=2 needs a multiple of 16"):
        step(jp.init_state(layout, optimizer), on(layout.device_mesh, P("data"), 8))
    # how an array of one's own lies on the mesh of the layout stays as it is
    own = {"x": jax.device_put(X, layout.sharding(P())), "y": jax.device_put(Y, layout.sharding(P("data")))}
    assert step.put(own)["x"] is own["x"]


def test_random_keys_on_another_mesh_are_refused():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), NamedSharding(jax.make_mesh((8,), ("b",)), P("b")))
    with pytest.raises(JaxparError, match="x in the batch has random keys"):
        trained({"x": keys, "y": Y}, sizes={"data": 8})


def sums(model, batch):
    """The squares of graphs, each the sum of its nodes: nodes of all graphs in one array."""
    owner = jnp.repeat(jnp.arange(len(batch["size"])), batch["size"], total_repeat_length=len(batch["x"]))
    losses = jax.ops.segment_sum(model(batch["x"]), owner, num_segments=len(batch["size"])) ** 2
    return jnp.sum(losses), losses.size


GRAPHS = {"x": X, "size": np.array([5, 1, 2, 3, 1, 1, 1, 2])}


def test_several_graphs_in_one_array_train_as_on_one_device():
    wanted = trained(GRAPHS, sums, devices=jax.devices()[:1])
    np.testing.assert_allclose(trained(GRAPHS, sums, sizes={"data": 4, "fsdp": 2}), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "numerics", "shown"),
    [
        ({"data": 4}, {"accumulate": 2}, "accumulate=2"),
        ({"data": 8, "exchange": jp.Exchange("diloco")}, {}, "replicas that step apart=8"),
    ],
    ids=["accumulation", "replicas"],
)
def test_slices_of_arrays_of_several_first_dims_are_refused(sizes, numerics, shown):
    layout, optimizer = jp.compose(Net, jp.Parallel(**sizes), jax.devices()[: sizes["data"]]), optax.sgd(0.1)
    step, state = jp.train_step(layout, sums, optimizer, **numerics), jp.init_state(layout, optimizer)
    for act in (lambda: step(state, GRAPHS), lambda: step.lower(step.abstract(), GRAPHS)):
        with pytest.raises(JaxparError) as caught:
            act()
        (problem,) = caught.value.problems
        assert problem.got == f"x [16, 8], size [8] in the batch, of which {shown} takes slices"
        assert "rows grouped per example as x.reshape(examples, -1, ...)" in problem.fix


LISTS = {
    "beside another array": {"views": [X, Y], "labels": np.arange(16)},
    "alone": {"views": (X, Y)},
    "of several sizes": {"views": [X, Y[:, :4]]},
    "arrays of JAX": {"views": [jnp.asarray(X), jnp.asarray(Y)], "labels": np.arange(16)},
    "as many as divide": {"views": [X] * 8, "labels": np.arange(16)},
}


@pytest.mark.parametrize("name", some(LISTS, ["alone", "of several sizes"]))
def test_a_list_of_views_is_refused_with_a_batch_without_it(name):
    with pytest.raises(JaxparError) as error:
        trained(LISTS[name], views, sizes={"data": 2, "fsdp": 2, "tensor": 2})
    assert f"views in the batch is a {type(LISTS[name]['views']).__name__} of" in str(error.value)
    assert 'f"views_{i}": x for i, x in enumerate(batch["views"])' in str(error.value)
    step = jp.train_step(jp.compose(Net, jp.Parallel(data=8)), views, optax.sgd(0.1))
    with pytest.raises(JaxparError, match="views in the batch is a"):
        jp.fit(step, [LISTS[name]], steps=1, batch=16)


@pytest.mark.nightly
def test_the_batch_that_the_message_names_trains():
    batch = {"views": [X, Y]}
    flat = {f"views_{i}": x for i, x in enumerate(batch["views"])}
    wanted = trained(flat, views, devices=jax.devices()[:1])
    np.testing.assert_allclose(trained(flat, views, sizes={"data": 2, "fsdp": 4}, accumulate=2), wanted, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "batch",
    [
        pytest.param({"x": list(X), "y": list(Y)}, marks=pytest.mark.slow),
        pytest.param({"x": list(X), "y": Y}, marks=pytest.mark.slow),
        {"x": X.tolist(), "y": Y},
    ],
)
def test_a_list_of_rows_is_an_array(batch):
    assert trained(batch, sizes={"data": 8}) == trained({"x": X, "y": Y}, sizes={"data": 8})
