"""Models whose pieces are of different programs, in a pipeline: equal to Flax and optax alone on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from plain_loop import STEPS, train

import jaxpar as jp

OPTIMIZER = optax.sgd(0.1, momentum=0.9)  # Adam would move what has no gradient, the bias of keys, by rounding errors


class Convolutions(nnx.Module):
    """Convolutions and dense layers of different shapes."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.third = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.dense = nnx.Linear(64, 32, rngs=rngs)
        self.classes = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        def half(x):
            return nnx.max_pool(x, (2, 2), strides=(2, 2))

        pieces = [
            lambda x: half(nnx.relu(self.first(x))),
            lambda x: nnx.relu(self.second(x)),
            lambda x: half(self.norm(nnx.relu(self.third(x)))),
            lambda x: nnx.relu(self.dense(x.reshape(len(x), -1))),
        ]
        return self.classes(jp.pipelined(pieces, images))


class Translator(nnx.Module):
    """A recurrent encoder, whose states a piece of the decoder reads, and an embedding that the head reads again."""

    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(16, 8, rngs=rngs)
        self.encoder = nnx.RNN(nnx.GRUCell(8, 12, rngs=rngs))
        self.narrow = nnx.Linear(12, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=rngs)
        self.decoder = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs))

    def __call__(self, images):
        def attend(x):
            memory, queries, mask = x
            return memory, queries + self.attention(queries, memory, memory, mask=mask[:, None, None, :]), mask

        pieces = [
            lambda x: (self.encoder(x[0]), x[1], x[2]),
            lambda x: (self.narrow(x[0]), x[1], x[2]),
            attend,
            lambda x: self.decoder(x[1]),
        ]
        embedded = self.words(images)
        return self.words.attend(jp.pipelined(pieces, (embedded, embedded, images > 0)))


class Skips(nn.Module):
    """A U-Net in Linen: what the way down leaves rides along to the way up."""

    @nn.compact
    def __call__(self, images):
        layers = [nn.Conv(width, (3, 3), strides=stride) for width, stride in ((4, 1), (8, 2), (16, 2))]
        ups = [nn.ConvTranspose(width, (2, 2), strides=(2, 2)) for width in (8, 4)]

        def down(layer):
            return lambda x: ((*x[0], x[1]), nn.relu(layer(x[1])))

        def up(layer):
            return lambda x: (x[0][:-1], jnp.concatenate([nn.relu(layer(x[1])), x[0][-1]], axis=-1))

        _, x = jp.pipelined([*map(down, layers), *map(up, ups)], ((), images))
        return nn.Conv(10, (1, 1))(x)


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"])
    return losses.sum(), losses.size


def batch_of(kind, rows=16):
    numbers = np.random.default_rng(0)
    if kind is Translator:
        words = numbers.integers(0, 16, (rows, 6))
        return {"images": words.astype(np.int32), "labels": np.roll(words, 1, axis=1).astype(np.int32)}
    images = numbers.normal(size=(rows, 8, 8, 3)).astype(np.float32)
    labels = numbers.integers(0, 10, (rows, 8, 8) if kind is Skips else rows)
    return {"images": images, "labels": labels.astype(np.int32)}


def model_of(kind, batch):
    return jp.from_linen(kind(), batch["images"][:1]) if issubclass(kind, nn.Module) else kind


def trained(kind, batch, parallel, optimizer=OPTIMIZER, steps=STEPS):
    layout = jp.compose(model_of(kind, batch), parallel)
    step = jp.train_step(layout, loss, optimizer)
    state, losses = jp.init_state(layout, optimizer, seed=0), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return step, state, losses


def case(kind, pipeline, *, marks=(), **sizes):
    parallel = jp.Parallel(**sizes, pipeline=jp.Pipeline(**pipeline))
    words = [*(f"{axis} {size}" for axis, size in sizes.items()), *(str(value) for value in pipeline.values())]
    return pytest.param(kind, parallel, id=f"{kind.__name__}, {', '.join(words)}", marks=marks)


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        case(Convolutions, {"stages": (1, 1, 1, 1), "schedule": "1f1b"}, pipe=4, data=2),
        case(Translator, {"stages": (2, 2), "schedule": "1f1b_phased"}, pipe=2, fsdp=2, data=2, marks=pytest.mark.slow),
        case(Skips, {"stages": (2, 1, 1, 1), "schedule": "zb_h1"}, pipe=4, fsdp=2, marks=pytest.mark.full),
        case(Skips, {"stages": (3, 2), "schedule": "gpipe"}, pipe=2, fsdp=4, zero=1, marks=pytest.mark.slow),
        case(Convolutions, {"stages": (3, 1), "schedule": "zb_h1"}, pipe=2, fsdp=4, marks=pytest.mark.slow),
        case(Translator, {"stages": (1, 1, 1, 1)}, pipe=4, fsdp=2, zero=2, marks=pytest.mark.slow),
    ],
)
def test_losses_and_parameters_are_those_of_flax_alone(kind, parallel):
    batch = batch_of(kind)
    _, state, losses = trained(kind, batch, parallel)
    of = kind() if issubclass(kind, nn.Module) else kind
    expected = train(model_of(kind, batch), of, loss, OPTIMIZER, batch)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    for value, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(value), other, atol=2e-5)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*times its share:UserWarning")  # Muon's own matmuls, each on all rows of `data`
@pytest.mark.parametrize("optimizer", [optax.contrib.muon(1e-3), optax.lamb(1e-2)], ids=["muon", "lamb"])
def test_an_optimizer_of_parameters_sees_parameters(optimizer):
    """Orthogonal updates, trust ratios and a clipping norm are of whole parameters, wherever their stage is."""
    batch, optimizer = batch_of(Convolutions), optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    parallel = jp.Parallel(pipe=4, data=2, pipeline=jp.Pipeline(stages=(1, 1, 1, 1)))
    _, state, losses = trained(Convolutions, batch, parallel, optimizer)
    expected = train(Convolutions, Convolutions, loss, optimizer, batch)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    for value, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(value), other, atol=2e-5)


@pytest.mark.nightly
def test_evaluation_and_a_step_without_a_pipeline_go_on_from_its_state(tmp_path):
    batch = batch_of(Convolutions)
    step, state, _ = trained(Convolutions, batch, jp.Parallel(pipe=4, data=2, pipeline=jp.Pipeline(stages=(1,) * 4)))
    total, count = step.evaluate(state, batch)["loss"]
    jp.save(tmp_path / "state", state)
    other = jp.train_step(jp.compose(Convolutions, jp.Parallel(fsdp=8)), loss, OPTIMIZER)
    one = jp.restore(tmp_path / "state", other)
    assert float(total / count) == pytest.approx(float(np.divide(*other.evaluate(one, batch)["loss"])), rel=1e-5)
    assert float(step(state, batch)[1]["loss"]) == pytest.approx(float(other(one, batch)[1]["loss"]), rel=1e-5)


@pytest.mark.nightly
def test_in_bf16_losses_are_near_those_of_float32():
    batch = batch_of(Convolutions)
    layout = jp.compose(Convolutions, jp.Parallel(pipe=2, fsdp=4, pipeline=jp.Pipeline(stages=(2, 2))))
    step, state = jp.train_step(layout, loss, OPTIMIZER, precision="bf16"), jp.init_state(layout, OPTIMIZER, seed=0)
    one = jp.compose(Convolutions, jp.Parallel(), jax.devices()[:1])
    alone, expected = jp.train_step(one, loss, OPTIMIZER, precision="bf16"), jp.init_state(one, OPTIMIZER, seed=0)
    for _ in range(3):
        (state, metrics), (expected, others) = step(state, batch), alone(expected, batch)
        assert float(metrics["loss"]) == pytest.approx(float(others["loss"]), rel=5e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_parameters_in_float16_are_refused():
    class Half(Convolutions):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.classes = nnx.Linear(32, 10, param_dtype=jnp.float16, rngs=rngs)

    with pytest.raises(jp.JaxparError, match=r"in float16 with pipeline\.stages"):
        trained(Half, batch_of(Convolutions), jp.Parallel(pipe=2, data=4, pipeline=jp.Pipeline(stages=(2, 2))), steps=1)


class Dropped(nnx.Module):
    """Dropout in two pieces, of one stream of keys."""

    def __init__(self, rngs: nnx.Rngs):
        self.wide, self.narrow = nnx.Linear(192, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, images):
        x = images.reshape(len(images), -1)
        return jp.pipelined([lambda x: self.dropout(nnx.relu(self.wide(x))), lambda x: self.dropout(self.narrow(x))], x)


@pytest.mark.nightly
def test_a_piece_draws_the_keys_that_it_draws_on_one_device():
    batch = batch_of(Dropped)
    options = {"schedule": "gpipe", "microbatches": 4}
    layout = jp.compose(Dropped, jp.Parallel(pipe=2, pipeline=jp.Pipeline(stages=(1, 1), **options)), jax.devices()[:2])
    step = jp.train_step(layout, loss, OPTIMIZER)
    one = jp.compose(Dropped, jp.Parallel(), jax.devices()[:1])
    alone = jp.train_step(one, loss, OPTIMIZER, accumulate=4)
    states = jp.init_state(layout, OPTIMIZER, seed=0), jp.init_state(one, OPTIMIZER, seed=0)
    for _ in range(2):
        states, metrics = zip(
            *[run(state, batch) for run, state in zip((step, alone), states, strict=True)], strict=True
        )
        assert float(metrics[0]["loss"]) == pytest.approx(float(metrics[1]["loss"]), rel=1e-5)


# Stages that are found.


class Plain(Convolutions):
    """The same network, whose author knows of no pipeline."""

    def __call__(self, images):
        x = nnx.max_pool(nnx.relu(self.first(images)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.third(nnx.relu(self.second(x))))
        x = nnx.max_pool(self.norm(x), (2, 2), strides=(2, 2))
        return self.classes(nnx.relu(self.dense(x.reshape(len(x), -1))))


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Plain, pytest.param(Convolutions, marks=pytest.mark.slow)])
def test_found_stages_are_said_and_train_as_flax_alone(kind):
    batch = batch_of(kind)
    parallel = jp.Parallel(pipe=4, data=2, pipeline=jp.Pipeline(stages="found"))
    step, state, losses = trained(kind, batch, parallel)
    expected = train(kind, kind, loss, OPTIMIZER, batch)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    for value, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(value), other, atol=2e-5)
    (note,) = step.gradients.notes
    assert "pieces, chosen by a roofline of NVIDIA H100 SXM: the slowest stage takes" in note
    assert re.search(
        r"; devices wait \d+% of the time in 1f1b, and each holds .* of parameters, .* of gradients and .* of messages",
        note,
    )


class Complex(nnx.Module):
    """A complex matrix between real ones, and a complex vector that no axis splits."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.classes = nnx.Linear(192, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)
        self.turn = nnx.Param(0.1 * jax.random.normal(rngs.params(), (16, 16), jnp.complex64))
        self.shift = nnx.Param(jnp.full(3, 1j))

    def __call__(self, images):
        x = self.first(images.reshape(len(images), -1)).astype(jnp.complex64) @ self.turn[...]
        return self.classes(jnp.abs(x + self.shift[...].sum()))


def test_stages_with_complex_parameters_train_as_flax_alone():
    batch = batch_of(Complex)
    parallel = jp.Parallel(pipe=2, data=4, pipeline=jp.Pipeline(stages="found", microbatches=2))
    optimizer = optax.sgd(0.1)
    _, state, losses = trained(Complex, batch, parallel, optimizer)
    expected = train(Complex, Complex, loss, optimizer, batch)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-5), state.params, expected[1])


@pytest.mark.parametrize("weights", ["stash", "2bw"])
def test_complex_parameters_of_asynchronous_stages_keep_their_imaginary_parts(weights):
    parallel = jp.Parallel(pipe=2, data=4, pipeline=jp.Pipeline(stages="found", microbatches=2, weights=weights))
    optimizer = optax.sgd(0.0)
    layout = jp.compose(Complex, parallel, jax.devices()[:8])
    state = jp.init_state(layout, optimizer)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = jp.train_step(layout, loss, optimizer)(state, batch_of(Complex))
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.tree.map(np.asarray, state.params), before))
    assert float(metrics["grad_norm"]) > 0


class NormalizedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(16)(x))), None


class NormalizedStack(nn.Module):
    """Layers in one scan, each with averages that only evaluations read."""

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True}
        x, _ = nn.scan(NormalizedLayer, variable_axes=axes, split_rngs=rngs, length=3)()(nn.Dense(16)(x), None)
        return nn.Dense(8)(nn.relu(nn.Dense(16)(x)))


def test_averages_of_a_scan_of_layers_are_those_of_flax_alone():
    """A scan counted as reading all of its state, so that a stack with BatchNorm was refused."""
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(16, 8)).astype("float32") for name in ("x", "y")}
    model, sgd, microbatches = NormalizedStack(), optax.sgd(0.1), 2
    parallel = jp.Parallel(pipe=2, pipeline=jp.Pipeline(stages="found", microbatches=microbatches))
    layout = jp.compose(jp.from_linen(model, batch["x"][:1]), parallel, jax.devices()[:2])
    step = jp.train_step(layout, lambda m, b: (jnp.sum((m(b["x"]) - b["y"]) ** 2), b["y"].size), sgd)
    state = jp.init_state(layout, sgd)
    start = state.params, state.model_state["collections"]["batch_stats"]
    params, averages = jax.tree.map(lambda value: jnp.array(np.asarray(value)), start)

    @jax.jit
    def gradient(params, averages, x, y):
        def mean(params):
            out, after = model.apply({"params": params, "batch_stats": averages}, x, mutable=["batch_stats"])
            return jnp.sum((out - y) ** 2) / y.size, after["batch_stats"]

        return jax.value_and_grad(mean, has_aux=True)(params)

    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses, slopes = [], []
        for number in range(microbatches):
            rows = (batch[name][number::microbatches] for name in ("x", "y"))
            (value, averages), slope = gradient(params, averages, *rows)
            losses.append(value)
            slopes.append(slope)
        params = jax.tree.map(lambda value, *each: value - 0.1 * sum(each) / microbatches, params, *slopes)
        assert float(metrics["loss"]) == pytest.approx(float(np.mean(losses)), rel=1e-5)
    found = state.params, state.model_state["collections"]["batch_stats"]
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-5), found, (params, averages))


@pytest.mark.nightly
def test_more_stages_than_pieces_are_refused():
    with pytest.raises(jp.JaxparError, match="4 pieces in 8 stages"):
        trained(
            Convolutions, batch_of(Convolutions), jp.Parallel(pipe=8, pipeline=jp.Pipeline(stages="found")), steps=1
        )


# What a device holds and sends, as compiled for GPUs that are absent.


# FLOP of a forward of one row: of the first convolution, of all else, and of the last piece and the head
FIRST, OTHERS = 2 * 8 * 8 * 8 * 27, 2 * (16 * 16 * 72 + 16 * 16 * 144 + 64 * 32 + 32 * 10)
LAST = 2 * (64 * 32 + 32 * 10)  # its loss is computed in the backward alone


@pytest.mark.nightly
def test_a_device_stores_its_share_and_messages_have_the_bytes_of_what_passes():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    batch = batch_of(Convolutions, rows=16)
    parallel = jp.Parallel(pipe=4, data=2, pipeline=jp.Pipeline(stages=(1, 1, 1, 1), microbatches=8))
    layout = jp.compose(Convolutions, parallel, jp.target_devices("h100:1x8"))
    arrays = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
    report = jp.inspect(jp.train_step(layout, loss, OPTIMIZER), arrays)
    permutes = [entry for entry in report.ledger if entry.kind == "collective-permute"]
    rows = 16 // 2 // 8
    message = [rows * size * 4 for size in (4 * 4 * 8, 4 * 4 * 16, 2 * 2 * 16)]  # forwards; backwards as much
    ticks = len(layout.schedule.cells)
    assert sum(entry.payload * entry.times for entry in permutes) == ticks * 2 * sum(message)
    assert {entry.payload for entry in permutes} == {*message}
    assert not [entry for entry in report.ledger if entry.kind == "all-gather"]
    assert sum(entry.times for entry in report.ledger if entry.kind == "all-to-all") == 2
    # of M microbatches a forward, again in the backward, and both gradients (of the first images none), on P stages
    flop = 8 / 4 * (3 * FIRST + 4 * OTHERS - LAST)
    assert report.flop.total == pytest.approx(flop, rel=0.05)


def compiled(microbatches, keep, rows):
    """Returns a step of four stages for absent GPUs, lowered for a batch, and the batch."""
    pipeline = jp.Pipeline(stages=(1, 1, 1, 1), microbatches=microbatches, keep=keep)
    layout = jp.compose(Convolutions, jp.Parallel(pipe=4, pipeline=pipeline), jp.target_devices("h100:1x4"))
    batch = batch_of(Convolutions, rows=rows)
    arrays = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()}
    return jp.train_step(layout, loss, OPTIMIZER), arrays


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("keep", ["inputs", "residuals"])
def test_temporary_memory_does_not_grow_with_microbatches(keep):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    held = []
    for microbatches in (8, 32):
        step, arrays = compiled(microbatches, keep, rows=4 * microbatches)
        held.append(sum(share.bytes for share in jp.inspect(step, arrays).memory if share.how == "compiled"))
    assert held[1] == pytest.approx(held[0], rel=0.01)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize(("keep", "again"), [("residuals", 0), ("inputs", FIRST + OTHERS - LAST)])
def test_kept_residuals_are_not_computed_again(keep, again):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    step, arrays = compiled(8, keep, rows=32)
    one = jp.compose(Convolutions, jp.Parallel(), jp.target_devices("h100:1x1"))
    alone = jp.inspect(jp.train_step(one, loss, OPTIMIZER), arrays).flop.total
    assert 4 * jp.inspect(step, arrays).flop.total / alone == pytest.approx(
        1 + again / (2 * FIRST + 3 * OTHERS), rel=0.01
    )


# What is refused.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "pipeline", "message"),
    [
        ({"pipe": 4, "data": 2}, {"stages": (1, 1)}, r"stages=\(1, 1\) for pipe=4"),
        (
            {"pipe": 2, "data": 4},
            {"stages": (1, 1), "schedule": "interleaved"},
            r"stages=\(1, 1\) for pipe=2 x chunks=2",
        ),
        ({"pipe": 4, "data": 2}, {"stages": (2, 2), "replicas": (2, 1)}, r"replicas=\(2, 1\) on pipe=4"),
        ({"pipe": 4, "data": 2}, {"stages": (4,), "replicas": (3, 1)}, r"stages=\(4,\) for 2 stages"),
        ({"pipe": 4, "data": 2}, {"stages": (2, 2), "replicas": (3, 1), "microbatches": 4}, "microbatches=6"),
        ({"pipe": 4, "data": 2}, {"replicas": (3, 1)}, r"replicas=\(3, 1\) without stages"),
        ({"pipe": 2, "data": 4}, {"stages": (2, 0)}, r"stages=\(2, 0\)"),
        ({"pipe": 2, "data": 4}, {"stages": (2, 2), "gather": "tick"}, r"stages=\(2, 2\) with gather"),
        ({"pipe": 2, "data": 4}, {"stages": (2, 2), "layers": (2, 2)}, r"stages=\(2, 2\) with layers"),
        ({"pipe": 2, "data": 4}, {"stages": (3, 2)}, "gives jp.pipelined 4 pieces, and pipeline.stages cuts 5"),
        ({"pipe": 2, "tensor": 2, "data": 2}, {"stages": (2, 2)}, r"stages=\(2, 2\) with tensor=2"),
    ],
    ids=str,
)
def test_wrong_numbers_are_refused(sizes, pipeline, message):
    with pytest.raises(jp.JaxparError, match=message):
        trained(Convolutions, batch_of(Convolutions), jp.Parallel(**sizes, pipeline=jp.Pipeline(**pipeline)), steps=1)


class Centered(nnx.Module):
    """Subtracts a running mean from what it computes, also while it trains."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(192, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(32))

    def __call__(self, images):
        def center(x):
            centered = x - self.mean[...]
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(axis=0)
            return centered

        x = images.reshape(len(images), -1)
        return jp.pipelined([lambda x: center(self.first(x)), self.second], x)


def test_state_that_training_reads_again_is_refused():
    with pytest.raises(jp.JaxparError, match="computes with state that follows from earlier examples"):
        trained(Centered, batch_of(Centered), jp.Parallel(pipe=2, data=4, pipeline=jp.Pipeline(stages=(1, 1))), steps=1)


class Looped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(192, 10, rngs=rngs), nnx.Linear(10, 10, rngs=rngs)

    def __call__(self, images):
        x = self.first(images.reshape(len(images), -1))
        return jax.lax.fori_loop(0, 2, lambda i, x: jp.pipelined([self.second, jnp.tanh], x), x)


def test_pieces_in_a_loop_are_refused():
    with pytest.raises(jp.JaxparError, match=r"calls jp\.pipelined inside of a loop"):
        trained(Looped, batch_of(Looped), jp.Parallel(pipe=2, data=4, pipeline=jp.Pipeline(stages=(1, 1))), steps=1)
