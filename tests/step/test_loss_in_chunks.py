"""The loss of the next token in chunks: sums and gradients of the one on whole logits, in a fraction of its memory."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import SingleDeviceSharding
from pairwise import some
from tiny import assert_same_arrays, named

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.target import missing_plugin
from jaxpar.models.custom_gradients import logits
from jaxpar.models.settings.computing import LARGEST, Logits
from jaxpar.parallel.layout import with_logits
from jaxpar.sharding.names import Compute
from jaxpar.step.head.chunks import Chunks, sum_of_losses
from jaxpar.step.head.token_sharding import TokenSharding
from jaxpar.step.losses import cross_entropy

absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
VOCAB, SEQ, ROWS, DIM = 64, 16, 16, 16
SMALL = partial(jp.next_token_loss, largest=2000)  # bytes: so that a tiny model has too many logits
TINY = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=2, dim=DIM, heads=4, hidden=32)


def batches(count=3):
    for key in jax.random.split(jax.random.key(0), count):
        tokens = np.array(jax.random.randint(key, (ROWS, SEQ + 1), 0, VOCAB))
        mask = np.float32(tokens[:, 1:] % 5 > 0)  # rows differ in how many tokens count
        yield {"inputs": tokens[:, :-1], "targets": np.where(mask > 0, tokens[:, 1:], -100), "mask": mask}


def loss_of(how, labels, weights):
    if how is None:
        return lambda x, head: jnp.sum(
            jnp.where(weights == 0, 0.0, weights * cross_entropy(jnp.einsum("bsd,dv->bsv", x, head), labels))
        )
    return lambda x, head: sum_of_losses(how, x, head.T if how.table else head, labels, weights)


@pytest.mark.nightly
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(
    "chunks", [pytest.param(1, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full), 5]
)  # of 20 tokens; of 21, where 5 leave some that weigh nothing
def test_sums_and_gradients_are_those_of_whole_logits(table, chunks):
    keys = jax.random.split(jax.random.key(chunks), 4)
    x, head = jax.random.normal(keys[0], (3, 7, 8)), jax.random.normal(keys[1], (8, 11))
    weights = jax.random.uniform(keys[2], (3, 7)) * (jax.random.uniform(keys[3], (3, 7)) > 0.3)
    labels = jnp.where(weights == 0, -100, jax.random.randint(keys[3], (3, 7), 0, 11))
    both = jax.jit(
        lambda x, head: [
            (loss(x, head), *jax.vjp(loss, x, head)[1](jnp.float32(0.5)))
            for loss in (
                loss_of(Chunks(TokenSharding(), chunks, table, 11), labels, weights),
                loss_of(None, labels, weights),
            )
        ]
    )
    got, want = both(x, head)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
def test_a_label_that_is_none_is_nan_where_it_counts_and_weights_have_their_gradient():
    x, head, labels = jnp.ones((1, 2, 4)), jnp.eye(4, 6), jnp.array([[1, 9]])
    loss = partial(sum_of_losses, Chunks(TokenSharding(), 2, False, 6), x, head, labels)
    assert np.isnan(loss(jnp.ones((1, 2))))
    value, slope = jax.value_and_grad(loss)(jnp.array([[2.0, 0.0]]))
    np.testing.assert_allclose([value, *slope[0]], [value, value / 2, 0.0])


@cache
def trained(loss, tied=False, devices=None, steps=3, **sizes):
    settings = jp.DecoderConfig(**{**vars(TINY), "tied": tied})
    told = {key: sizes.pop(key) for key in ("accumulate", "precision") if key in sizes}
    if sizes.get("pipe"):
        sizes["pipeline"] = jp.Pipeline(microbatches=4, head=sizes.pop("head"))
    on = () if devices is None else (jax.devices()[:devices],)
    layout, optimizer = jp.compose(partial(jp.Decoder, settings), jp.Parallel(**sizes), *on), optax.adamw(3e-3)
    state, step = jp.init_state(layout, optimizer), jp.train_step(layout, loss, optimizer, **told)
    losses = []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state.params, step


LAYOUTS = {
    "2 x 2 x 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence, tied": {"tensor": 4, "data": 2, "sequence": True, "tied": True},
    "context": {"context": 2, "fsdp": 2, "tensor": 2},
    "ZeRO-1, tied, microbatches": {"fsdp": 8, "zero": 1, "tied": True, "accumulate": 2},
    "pipeline": {"pipe": 2, "fsdp": 2, "tensor": 2, "head": "last"},
    "pipeline, head spread, tied": {"pipe": 2, "data": 2, "tensor": 2, "head": "spread", "tied": True},
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", some(LAYOUTS, ["ZeRO-1, tied, microbatches"], ["context", "pipeline"]))
def test_every_layout_trains_as_one_device_does_on_whole_logits(case):
    sizes = LAYOUTS[case]
    losses, params, step = trained(SMALL, **sizes)
    want, expected, _ = trained(jp.next_token_loss, tied=sizes.get("tied", False), devices=1)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    assert_same_arrays(params, expected)
    assert any("chunks of" in note for note in step.layout.notes)


@pytest.mark.nightly
def test_few_logits_are_made_by_the_program_that_knows_no_chunks():
    def plain(model, batch):
        targets, made = batch["targets"], model(batch["inputs"])
        losses = cross_entropy(made.reshape(-1, made.shape[-1]), targets.reshape(-1)).reshape(targets.shape)
        return jnp.sum(losses), jnp.float32(targets.size)

    layout = jp.compose(partial(jp.Decoder, TINY), jp.Parallel(fsdp=4, tensor=2))
    batch = {name: np.zeros((8, SEQ), np.int32) for name in ("inputs", "targets")}
    steps = [jp.train_step(layout, loss, optax.sgd(1.0)) for loss in (jp.next_token_loss, plain)]
    ours, theirs = (step.lower(step.abstract(), batch).as_text() for step in steps)
    assert ours == theirs
    assert "logits: whole; a device's 32 x 32 in float32 would be 4 KiB, not more than 4 GiB" in (
        steps[0].layout.explain()
    )
    assert not any("logits" in note for note in steps[1].layout.notes)


class Own(nnx.Module):
    """By a user, with a head of its own."""

    head_name = "lm_head/kernel"

    def __init__(self, rngs, use_bias=False, vocab=VOCAB):
        self.embed = nnx.Embed(vocab, DIM, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.lm_head = nnx.Linear(DIM, vocab, use_bias=use_bias, rngs=rngs)

    def hidden(self, tokens):
        return jnp.tanh(self.embed(tokens))

    def __call__(self, tokens):
        return self.lm_head(self.hidden(tokens))


class Tied(Own):
    head_name = "embed/embedding"

    def __call__(self, tokens):
        return self.embed.attend(self.hidden(tokens))


class Linen(nn.Module):
    head_name = "lm_head/kernel"

    def setup(self):
        self.embed, self.lm_head = nn.Embed(VOCAB, DIM), nn.Dense(VOCAB, use_bias=False)

    def hidden(self, tokens):
        return jnp.tanh(self.embed(tokens))

    def __call__(self, tokens):
        return self.lm_head(self.hidden(tokens))


MODELS = {
    "own": lambda: Own,
    "tied": lambda: Tied,
    "linen": lambda: jp.from_linen(Linen(), jnp.zeros((1, SEQ), jnp.int32)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("model", some(MODELS, ["tied"], ["linen"]))
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_model_of_a_user_offers_a_method_and_a_name(model, precision):
    layout, optimizer = jp.compose(MODELS[model](), jp.Parallel(fsdp=8)), optax.sgd(1.0)
    batch, found = next(batches()), []
    for loss in (SMALL, jp.next_token_loss):
        step = jp.train_step(layout, loss, optimizer, precision=precision)
        state, metrics = step(jp.init_state(layout, optimizer), batch)
        found.append(([metrics[key] for key in ("loss", "tokens", "grad_norm")], state.params))
    rtol = 1e-6 if precision == "fp32" else 1e-2
    np.testing.assert_allclose(*(numbers for numbers, _ in found), rtol=rtol)
    if precision == "fp32":
        assert_same_arrays(*(params for _, params in found))


class Capped(Own):
    """Inherits what is offered, and makes something else of it."""

    def __call__(self, tokens):
        return 3 * jnp.tanh(super().__call__(tokens))


class Holder(nnx.Module):
    """Has a model within, whose head is no path of its own."""

    def __init__(self, rngs):
        self.module = Own(rngs)

    def __call__(self, tokens):
        return self.module(tokens)


@pytest.mark.parametrize("model", [pytest.param(Capped, marks=pytest.mark.slow), Holder])
def test_what_does_not_offer_itself_is_asked_for_its_logits(model):
    step = jp.train_step(jp.compose(model, jp.Parallel(fsdp=8)), SMALL, optax.sgd(1.0))
    step.lower(step.abstract(), next(batches()))
    assert not any("logits" in note for note in step.layout.notes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model",
    ["tied", pytest.param("linen", marks=pytest.mark.slow), pytest.param("decoder", marks=pytest.mark.full)],
)
def test_a_head_with_an_adapter_is_a_head(model):
    made = partial(jp.Decoder, TINY) if model == "decoder" else MODELS[model]()
    layout = jp.compose(jp.add_lora(made, rank=2, paths=["*"]), jp.Parallel(), 1)
    params, rest = layout.blueprint.init(jax.random.key(0))
    params["adapters"] = jax.tree.map(lambda x: x + 0.1, params["adapters"])
    batch = {name: jnp.asarray(value) for name, value in next(batches()).items()}

    def mean(params, loss):
        total, count = loss(layout.blueprint.bind(params, rest, lambda _, x: x, Compute()), batch)["loss"]
        return total / count

    got, want = (jax.jit(jax.value_and_grad(partial(mean, loss=loss)))(params) for loss in (SMALL, jp.next_token_loss))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


WRONG = {
    "a bias": (partial(Own, use_bias=True), "beside a bias"),
    "no such parameter": (type("Lost", (Own,), {"head_name": "lm_head/weights"}), "there is no such parameter"),
    "a square": (partial(Own, vocab=DIM), "which of its dims is the vocabulary"),
    "no matrix": (type("Whole", (Own,), {"head_name": "embed"}), "there is no such parameter"),
    "another dim": (type("Wide", (Own,), {"hidden": lambda self, x: jnp.zeros((*x.shape, 9))}), "hidden returns"),
}


@pytest.mark.parametrize("case", some(WRONG, ["a square", "no matrix", "another dim"]))
def test_what_is_no_head_is_refused(case):
    model, said = WRONG[case]
    with nnx.use_eager_sharding(False), pytest.raises(jp.JaxparError, match=said):
        jp.next_token_loss(model(rngs=nnx.Rngs(0)), next(batches()), largest=0)


@pytest.mark.slow
def test_the_size_of_logits_decides_and_check_says_so(capsys, tmp_path):
    assert not Logits(2**13, 2**17).is_chunked  # 4 GiB to the byte
    long = Logits(131072, 128256)
    assert (long.is_chunked, long.chunks, 131072 % long.chunks) == (True, 64, 0)
    assert long.part(16).bytes < LARGEST
    job = ["check", "configs/quickstart.toml", "model.vocab=128256", "train.global_batch=256"]
    job += ["data.tokenizer=bpe", "data.vocab=128256", f"run.dir={tmp_path}"]
    assert main([*job, "data.seq=4096", "model.seq=4096"]) == 0
    assert "logits: 64 chunks of 4,096 tokens; a device's 262,144 x 64,128" in capsys.readouterr().out
    assert main([*job, "data.seq=128"]) == 0
    assert "logits: whole; a device's 8,192 x 64,128 in float32 would be 1.957 GiB" in capsys.readouterr().out
    assert main([*job, "data.seq=128", "train.accumulate=4"]) == 0
    assert "logits" not in capsys.readouterr().out  # half a GiB


@pytest.mark.parametrize(("tokens", "shown"), [(2**12, False), (2**13, True), (2**17, True)])
def test_a_layout_notes_large_logits_and_explains_all_of_them(tokens, shown):
    size = Logits(tokens, 2**15 + 1)  # of half a GiB, 1 GiB, and more than are computed at once
    layout = with_logits(jp.compose(partial(jp.Decoder, TINY), jp.Parallel(), devices=1), size)
    assert (str(size) in layout.notes) == shown
    assert layout.explain().count(str(size)) == 1
    assert with_logits(layout, size) is layout


@pytest.mark.nightly
@absent
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_sequences_need_a_fifteenth_of_the_memory_of_whole_logits_on_a_gpu(dtype):
    device, tokens, dim, vocab = jp.target_devices("h100:1x8")[0], 131_072, 4096, 128_256
    shapes = [((1, tokens, dim), dtype), ((dim, vocab), dtype), ((1, tokens), jnp.int32)]
    given = [jax.ShapeDtypeStruct(*each, sharding=SingleDeviceSharding(device)) for each in shapes]

    def whole(x, head, labels):
        return jnp.sum(cross_entropy(logits(x, head).astype(jnp.float32), labels))

    def chunked(x, head, labels):
        how = Chunks(TokenSharding(), Logits(tokens, vocab).chunks, table=False, vocab=vocab)
        return sum_of_losses(how, x, head, labels, jnp.ones(labels.shape))

    took = [
        compile_program(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given), [device]).temporary
        for loss in (chunked, whole)
    ]
    assert took[0] <= took[1] / 15, took


def payloads(parallel, loss, **numerics):
    settings = jp.DecoderConfig(vocab=1024, seq=128, layers=1, dim=256, heads=8, hidden=512)
    layout = jp.compose(partial(jp.Decoder, settings), parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, loss, optax.adamw(1e-3), **numerics)
    sums = {}
    for entry in jp.inspect(
        step, {name: jax.ShapeDtypeStruct((16, 128), jnp.int32) for name in ("inputs", "targets")}
    ).ledger:
        if entry.payload > 64:
            key = (entry.axis, entry.kind, entry.dtype)
            sums[key] = sums.get(key, 0) + entry.step_payload
    assert any("chunks" in note for note in step.layout.notes) == (loss is not jp.next_token_loss)
    return sums


@pytest.mark.nightly
@absent
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"fsdp": 2, "data": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param({"tensor": 8, "sequence": True}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4, "context": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_chunks_send_what_whole_logits_send_on_a_gpu(sizes):
    """The head is gathered once, its gradient reduced once, in the same dtypes; over `tensor` in pieces, of as much."""
    both = [
        payloads(jp.Parallel(**sizes), loss)
        for loss in (partial(jp.next_token_loss, largest=2**17), jp.next_token_loss)
    ]
    assert both[0] == both[1]
