"""What a step promises besides parity: precision, offload, any optimizer, sums divided once, bounded flight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from pairwise import some
from tiny import BATCH, SEQ, VOCAB, assert_same_arrays, batches, models, on_one_device, token_loss, train

import jaxpar as jp
from jaxpar.models.dim_names import get_spec
from jaxpar.models.settings.computing import POLICIES
from jaxpar.parallel.techniques.all_techniques import all_dim_names
from jaxpar.sharding.constrain import activation_names
from jaxpar.step.checks.precision import count_matmuls


class Small(nnx.Module):
    """Compiles quickly: an embedding, a column and a row, an output."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.logits = nnx.Linear(16, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.logits(x + self.down(nnx.relu(self.up(x))))


CUBE = jp.Parallel(data=2, fsdp=2, tensor=2)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
    "lamb": optax.lamb(0.01, eps=1e-4),
    "lars": optax.lars(0.1),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(0.01),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.adam(1e-2, eps=1e-4),
    ),
    "multi": optax.multi_transform(
        {"a": optax.adam(1e-2, eps=1e-4), "b": optax.sgd(0.1)},
        lambda p: {
            key: jax.tree.map(lambda _, key=key: "a" if key == "embed" else "b", value) for key, value in p.items()
        },
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, eps=1e-4),
    "averaged": optax.chain(optax.adam(1e-2, eps=1e-4), optax.ema(0.9)),
    "steps": optax.MultiSteps(optax.adam(1e-2, eps=1e-4), 2).gradient_transformation(),
}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Small.* times its share")  # Muon's matmuls are of whole updates, on every device
@pytest.mark.parametrize("name", some(OPTIMIZERS, ["sgd"], ["lion", "muon"]))
def test_any_optax_chain_equals_one_device_and_is_sharded(name):
    chain = OPTIMIZERS[name]
    want, reference, _ = on_one_device(Small, chain=chain, steps=3)
    got, state, _ = train(Small, CUBE, chain=chain, steps=3)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    # lion takes signs: where a gradient is rounding noise, so is its sign
    assert_same_arrays(state.params, reference.params, tolerance=5e-3 if name == "lion" else 1e-5)
    big = [x for x in jax.tree.leaves(state.optimizer) if hasattr(x, "sharding") and x.size >= 512]
    assert all(x.addressable_shards[0].data.size < x.size for x in big)


@pytest.mark.spread(0)
@pytest.mark.parametrize("kind", some(["annotated", "bare", "linen"], [], ["annotated"]))
def test_bf16_runs_its_products_in_bf16_and_keeps_float32_masters(kind):
    losses, state, step = train(models()[kind], CUBE, precision="bf16", steps=3, loss=float32_loss)
    assert step.compiler.matmuls.share >= 0.95
    assert "matrix products are bf16" in str(step.compiler.matmuls)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    want, _, _ = on_one_device(models()[kind], steps=3, loss=float32_loss)
    np.testing.assert_allclose(losses, want, rtol=2e-2)
    assert not np.array_equal(losses, want)


def float32_loss(model, batch):
    class Upcast:
        training = getattr(model, "training", None)
        module = getattr(model, "module", None)

        def __call__(self, *args, **kwargs):
            return model(*args, **kwargs).astype(jnp.float32)

    if Upcast.module is None:
        del Upcast.module
    return token_loss(Upcast(), batch)


@pytest.mark.nightly
def test_bf16_that_would_silently_be_float32_is_refused():
    class Stubborn(Small):
        def __call__(self, tokens):
            x = self.embed(tokens).astype(jnp.float32)
            for layer in (self.up, self.down, self.logits):
                x = x @ layer.kernel[...].astype(jnp.float32)
            return x

    with pytest.raises(jp.JaxparError, match=r"0 of 9 matrix products are bf16.*\n.*at most 5 %.*\n.*dtype"):
        train(Stubborn, CUBE, precision="bf16", steps=1)


def test_products_are_counted_with_their_weight():
    def two(a, b, c):
        return (a @ b) @ c

    low, high = jnp.zeros((8, 16), jnp.bfloat16), jnp.zeros((8, 8), jnp.float32)
    found = count_matmuls(jax.make_jaxpr(two)(low, low.T, high))
    assert (found.total, found.low) == (2, 1)
    assert found.share == pytest.approx(8 * 8 * 16 / (8 * 8 * 16 + 8 * 8 * 8))
    (kept,) = found.high_precision
    assert (kept.function, kept.operands) == ("two", "bf16[8x8] * f32[8x8]")


def test_ragged_matmuls_are_counted_among_the_others():
    def experts(x, matrices, sizes):
        return jax.lax.ragged_dot(x, matrices, sizes)

    shapes = jnp.zeros((8, 16)), jnp.zeros((4, 16, 8)), jnp.zeros(4, jnp.int32)
    (kept,) = count_matmuls(jax.make_jaxpr(experts)(*shapes)).high_precision
    assert (kept.function, kept.operands) == ("experts", "f32[8x16] * f32[4x16x8]")


@pytest.mark.nightly
def test_offload_keeps_the_optimizer_in_host_memory_and_the_numbers_bitwise():
    want, reference, _ = train(Small, CUBE, steps=3)
    got, state, _ = train(Small, CUBE, steps=3, offload=True)
    assert np.array_equal(got, want)
    assert_same_arrays(state.params, reference.params, tolerance=0)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer) if x.ndim}
    assert kinds == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}


def test_offload_is_refused_where_there_is_no_host_memory(monkeypatch):
    class Bare:
        kind = "device"

    device_type = type(jax.devices()[0])
    monkeypatch.setattr(device_type, "addressable_memories", lambda self: [Bare()], raising=False)
    layout = jp.compose(Small, CUBE)
    with pytest.raises(jp.JaxparError, match="pinned host memory"):
        jp.init_state(layout, optax.sgd(0.1), offload=True)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", some(POLICIES, ["full"], ["dots"]))
def test_every_remat_policy_gives_the_same_losses_bitwise_in_order(policy):
    want, _, _ = on_one_device(models()["annotated"], steps=2)
    got, _, _ = train(models()["annotated"], CUBE, steps=2, remat=policy)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.nightly
def test_full_remat_of_a_scanned_decoder_needs_less_memory():
    def temporary(policy):
        settings = jp.DecoderConfig(vocab=32, seq=64, layers=8, dim=32, heads=2)
        layout = jp.compose(lambda rngs: jp.Decoder(settings, rngs=rngs), jp.Parallel(fsdp=8))
        chain = optax.sgd(0.1)
        step = jp.train_step(layout, jp.next_token_loss, chain, remat=policy)
        tokens = np.zeros((8, 64), np.int32)
        lowered = step.lower(jp.init_state(layout, chain), step.put({"inputs": tokens, "targets": tokens}))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary("full") < 0.6 * temporary("none")


def test_the_reported_loss_is_the_sum_over_tokens_divided_once():
    """Rows with one token must not weigh as much as rows with eight: by hand, in numpy."""
    batch = next(iter(batches(1)))
    model_logits = {}

    def loss(model, batch):
        logits = model(batch["inputs"])
        model_logits["shape"] = logits.shape
        return token_loss(model, batch)

    layout = jp.compose(Small, CUBE)
    state = jp.init_state(layout, optax.sgd(0.0))
    params = jax.device_get(state.params)
    x = params["embed"]["embedding"][batch["inputs"]]
    h = np.maximum(x @ params["up"]["kernel"] + params["up"]["bias"], 0)
    logits = (x + h @ params["down"]["kernel"] + params["down"]["bias"]) @ params["logits"]["kernel"]
    logits = logits + params["logits"]["bias"]
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    want = (nll * batch["mask"]).sum() / batch["mask"].sum()
    for accumulate in (1, 2, 4):
        step = jp.train_step(layout, loss, optax.sgd(0.0), accumulate=accumulate)
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(want, rel=1e-6)
        assert float(metrics["tokens"]) == batch["mask"].sum()
    assert model_logits["shape"][1:] == (SEQ, VOCAB)
    evaluated = jax.device_get(step.evaluate(state, batch))["loss"]
    assert evaluated[0] / evaluated[1] == pytest.approx(want, rel=1e-6)


@pytest.mark.nightly
def test_global_norm_clipping_sees_the_whole_gradient():
    chain = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    before = jp.init_state(jp.compose(Small, CUBE), chain, seed=1).params
    _, state, _ = train(Small, CUBE, chain=chain, steps=1)
    moved = jax.tree.map(
        lambda a, b: np.asarray(a) - np.asarray(b), jax.device_get(state.params), jax.device_get(before)
    )
    assert float(optax.tree.norm(moved)) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.nightly
def test_a_hundred_unblocked_steps_do_not_deadlock_the_simulated_mesh():
    layout = jp.compose(Small, CUBE)
    chain = optax.sgd(0.1)
    state, step = jp.init_state(layout, chain), jp.train_step(layout, token_loss, chain)
    batch = step.put(next(iter(batches(1))))
    for _ in range(100):
        state, metrics = step(state, batch)
    assert int(state.step) == 100
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.nightly
def test_no_device_and_no_host_buffer_ever_holds_the_whole_model():
    """The initial program's own buffers, as compiled: nothing on a device is as large as the model."""
    from jaxpar.step.state import abstract, initializer, shardings

    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(512, 512, use_bias=False, rngs=rngs) for _ in range(8)])

        def __call__(self, x):
            return x

    chain = optax.adam(1e-3)
    layout = jp.compose(Wide, jp.Parallel(fsdp=8))
    placed = shardings(layout, abstract(layout, chain))
    made = (
        jax.jit(initializer(layout, chain), out_shardings=placed).lower(jax.random.key(0)).compile().memory_analysis()
    )
    whole = 8 * 512 * 512 * 4
    assert made.output_size_in_bytes <= 3 * whole / 8 + 4096
    assert made.temp_size_in_bytes < whole / 4


@pytest.mark.nightly
def test_state_born_sharded_has_the_same_numbers_on_every_layout():
    want = jp.init_state(jp.compose(Small, jp.Parallel(), jax.devices()[:1]), optax.sgd(0.1), seed=3).params
    for parallel in (jp.Parallel(data=8), jp.Parallel(fsdp=8), CUBE):
        got = jp.init_state(jp.compose(Small, parallel), optax.sgd(0.1), seed=3).params
        assert_same_arrays(got, want, tolerance=1e-6)


def test_the_batch_is_split_over_data_and_fsdp():
    layout = jp.compose(Small, jp.Parallel(data=2, fsdp=4))
    step = jp.train_step(layout, token_loss, optax.sgd(0.1))
    placed = step.put(next(iter(batches(1))))["inputs"]
    assert placed.addressable_shards[0].data.shape == (BATCH // 8, SEQ)


def test_under_sequence_parallelism_heads_and_mlp_keep_the_axis_that_the_stream_may_have():
    parallel = jp.Parallel(data=4, tensor=2, sequence=True)
    with activation_names(all_dim_names(parallel), parallel.sizes):
        assert get_spec(("batch", "seq", "embed")) == PartitionSpec("data", "tensor", None)
        assert get_spec(("batch", "seq", "heads", "head_dim")) == PartitionSpec("data", None, "tensor", None)
        assert get_spec(("batch", "seq", "mlp")) == PartitionSpec("data", None, "tensor")
