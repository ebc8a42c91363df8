"""State whose new value is its gradient, Flax's fp8 scales: as plain Flax has it after the same steps.

The oracle is `jax.value_and_grad` of the mean loss by parameters and that collection, on one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some

import jaxpar as jp

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated", "ignore:The function dot_general")
COLLECTION = "_overwrite_with_gradient"
DIM, ROWS, STEPS = 16, 16, 4
OPTIMIZER = optax.adam(1e-2, eps=1e-4)


class Net(nn.Module):
    op: str = "Fp8DirectDotGeneralOp"
    length: int = 8
    scan: bool = False
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        def made():
            return getattr(nn.fp8_ops, self.op)(amax_history_length=self.length)

        if self.scan:
            axes = {"params": 0, COLLECTION: 0}
            layers = nn.scan(_Layer, variable_axes=axes, split_rngs={"params": True}, length=2)
            return layers(made)(x, None)[0]
        x = nn.relu(nn.Dense(DIM, dtype=self.dtype, dot_general_cls=made)(x))
        return nn.Dense(DIM, dtype=self.dtype, dot_general_cls=made)(x).astype(jnp.float32)


class _Layer(nn.Module):
    made: object

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(DIM, dot_general_cls=self.made)(x), None


class Largest(nn.Module):
    """A user's own variable of that kind: the largest input so far, which scales the next."""

    @nn.compact
    def __call__(self, x):
        largest = self.variable(COLLECTION, "largest", jnp.ones, (1,))
        return nn.Dense(DIM)(_scaled(x, largest.value))


@jax.custom_vjp
def _scaled(x, largest):
    return x / largest


_scaled.defvjp(
    lambda x, largest: (x / largest, (x, largest)),
    lambda kept, g: (g / kept[1], jnp.maximum(kept[1], jnp.abs(kept[0]).max())),
)


def loss(model, batch):
    difference = (model(batch["x"]) - batch["y"]) ** 2
    return jnp.sum(difference), difference.size


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x, y = rng.normal(size=(2, ROWS, DIM)).astype(np.float32)
        yield {"x": 1000 * x, "y": y}


def plain(module, params, *, accumulate=1):
    """Returns losses, norms, parameters and the collection of plain Flax: of microbatches the larger values."""
    state = module.init(jax.random.key(0), jnp.zeros([ROWS, DIM]))[COLLECTION]
    held, losses, norms = OPTIMIZER.init(params), [], []

    def mean(params, state, batch):
        return jnp.mean((module.apply({"params": params, COLLECTION: state}, batch["x"]) - batch["y"]) ** 2)

    made = jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))
    for batch in batches():
        each = [made(params, state, {k: v[i::accumulate] for k, v in batch.items()}) for i in range(accumulate)]
        gradients = jax.tree.map(lambda *x: sum(x) / accumulate, *(gradients for _, (gradients, _) in each))
        state = jax.tree.map(lambda *x: jnp.stack(x).max(0), *(new for _, (_, new) in each))
        updates, held = OPTIMIZER.update(gradients, held, params)
        params = optax.apply_updates(params, updates)
        losses.append(np.mean([value for value, _ in each]))
        norms.append(optax.tree.norm(gradients))
    return losses, norms, params, state


def trained(model, sizes, *, loss=loss, **numerics):
    count = int(np.prod([size for axis, size in sizes.items() if axis in ("data", "fsdp", "tensor", "pipe")]))
    layout = jp.compose(model, jp.Parallel(**sizes), jax.devices()[:count])
    state, step = jp.init_state(layout, OPTIMIZER), jp.train_step(layout, loss, OPTIMIZER, **numerics)
    params, losses, norms = jax.device_get(state.params), [], []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return params, losses, norms, state, step


def assert_as_plain(module, sizes, *, accumulate=1, **numerics):
    model = jp.from_linen(module, jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32))
    params, losses, norms, state, step = trained(model, sizes, accumulate=accumulate, **numerics)
    expected = plain(module, params, accumulate=accumulate)
    found = losses, norms, state.params, state.model_state["collections"][COLLECTION]
    assert jax.tree.structure(found[3]) == jax.tree.structure(expected[3])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    assert all((leaf != 1).all() for leaf in jax.tree.leaves(found[3]) if leaf.shape[-1] == 1)
    return state, step


LAYOUTS = {
    "one": {},
    "data 8": {"data": 8},
    "fsdp 8, zero 1": {"fsdp": 8, "zero": 1},
    "fsdp 8, zero 3": {"fsdp": 8},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", some(LAYOUTS, ["2x2x2"], ["fsdp 8, zero 3"]))
def test_scales_of_fp8_are_those_of_plain_flax(layout):
    assert_as_plain(Net(), LAYOUTS[layout])


@pytest.mark.nightly
@pytest.mark.parametrize("op", [pytest.param("Fp8DotGeneralOp", marks=pytest.mark.slow), "NANOOFp8DotGeneralOp"])
def test_each_of_flaxs_fp8_matmuls(op):
    assert_as_plain(Net(op), {"data": 2})


@pytest.mark.nightly
def test_layers_in_a_scan_have_scales_of_their_own():
    assert_as_plain(Net(scan=True), {"data": 2, "fsdp": 2})


@pytest.mark.nightly
def test_a_users_own_variable_of_that_kind():
    assert_as_plain(Largest(), {"data": 2})


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [pytest.param({"data": 4}, marks=pytest.mark.slow), {"fsdp": 8, "zero": 1}], ids=str)
def test_microbatches_leave_the_larger_values(sizes):
    assert_as_plain(Net(), sizes, accumulate=2)


@pytest.mark.nightly
def test_a_large_history_is_kept_in_pieces_and_an_evaluation_leaves_it_alone():
    state, step = assert_as_plain(Net(length=2**14), {"fsdp": 4})
    history = state.model_state["collections"][COLLECTION]["Dense_0"]["Fp8DirectDotGeneralOp_0"]["input_amax_history"]
    assert history.addressable_shards[0].data.size == history.size // 4
    before = jax.device_get(history)
    step.evaluate(state, next(batches()))
    np.testing.assert_array_equal(history, before)


@pytest.mark.nightly
def test_a_loss_with_a_key_and_remat_change_nothing():
    def keyed(model, batch, key):
        total, count = loss(model, batch)
        return total + 0 * jax.random.uniform(key), count

    assert_as_plain(Net(), {"data": 2}, loss=keyed, accumulate=2, remat="full")


@pytest.mark.nightly
def test_bf16_takes_products_of_float8_for_what_they_are():
    model = jp.from_linen(Net(), jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32))
    params, losses, _, _, step = trained(model, {"data": 2}, precision="bf16")
    assert str(step.compiler.matmuls).startswith("6 of 6 matrix products are bf16 or float8 (100.0%")
    np.testing.assert_allclose(losses, plain(Net(dtype=jnp.bfloat16), params)[0], rtol=1e-2)


@pytest.mark.nightly
def test_replicas_that_step_apart_have_scales_of_their_own_rows():
    module = Net()
    model = jp.from_linen(module, jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32))
    *_, state, _ = trained(model, {"data": 2, "exchange": jp.Exchange("local", every=100)})
    ops = state.model_state["collections"][COLLECTION]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    newest = next(reversed(list(batches())))["x"].reshape(2, -1)
    np.testing.assert_allclose(ops["input_amax_history"][:, 0], np.abs(newest).max(1), rtol=1e-6)


@pytest.mark.nightly
def test_a_linen_module_inside_of_nnx():
    class Bridged(nnx.Module):
        def __init__(self, rngs):
            self.net = nnx.bridge.ToNNX(Net(), rngs=rngs).lazy_init(jnp.zeros([ROWS, DIM]))

        def __call__(self, x):
            return self.net(x)

    params, losses, _, state, _ = trained(Bridged, {"data": 2})
    expected = plain(Net(), params["net"])
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    scales = [leaf for leaf in jax.tree.leaves(state.model_state) if leaf.shape == (1,)]
    np.testing.assert_allclose(sorted(scales), sorted(x for x in jax.tree.leaves(expected[3]) if x.shape == (1,)), 1e-5)


def test_a_pipeline_refuses_them_by_name():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            made = lambda: nn.fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=4)  # noqa: E731
            axes = {"params": 0, COLLECTION: 0}
            names = {nn.PARTITION_NAME: "layers"}
            layers = nn.scan(_Layer, variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params=names)
            return layers(made, name="layers")(x, None)[0]

    model = jp.from_linen(Deep(), jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32))
    with pytest.raises(jp.JaxparError, match=r"(?s)_overwrite_with_gradient.*whose new value is its gradient.*pipe=1"):
        trained(model, {"pipe": 2})
