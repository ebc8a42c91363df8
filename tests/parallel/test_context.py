"""Context parallelism: sequences in pieces, keys and values gathered, the same losses and parameters as one device."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some
from tiny import SEQ, VOCAB, assert_same_arrays, batches, models, on_one_device, token_loss, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.mesh.target import missing_plugin
from jaxpar.models import islands
from jaxpar.parallel.techniques.attention_gather import in_16_bits

gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
LAYOUTS = {
    "context 8": {"context": 8},
    "data 2 x context 4": {"data": 2, "context": 4},
    "fsdp 4 x context 2": {"fsdp": 4, "context": 2},
    **{f"data 2 x fsdp 2 x context 2, zero {z}": {"data": 2, "fsdp": 2, "context": 2, "zero": z} for z in (0, 1, 2)},
    "fsdp 2 x context 2 x tensor 2": {"fsdp": 2, "context": 2, "tensor": 2},
    "context 4 x tensor 2, sequence": {"context": 4, "tensor": 2, "sequence": True},
    "context 2 x tensor 4, sequence": {"context": 2, "tensor": 4, "sequence": True},  # fewer heads of keys than tensor
    "pipe 2 x data 2 x context 2": {"pipe": 2, "data": 2, "context": 2},
    "pipe 2 x fsdp 2 x context 2": {"pipe": 2, "fsdp": 2, "context": 2},
    "pipe 2 x context 2 x tensor 2": {"pipe": 2, "context": 2, "tensor": 2},
    "pipe 2 x context 2 x tensor 2, sequence": {"pipe": 2, "context": 2, "tensor": 2, "sequence": True},
}
LLAMA = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=4, dim=32, heads=4, kv_heads=4, hidden=32)
GPT = jp.DecoderConfig(
    vocab=VOCAB, seq=SEQ, layers=2, dim=32, heads=8, kv_heads=8, gated=False, position="learned", norm="layer",
    use_bias=True, tied=True, dropout=0.2, scan=False,
)  # fmt: skip
LONG = jp.DecoderConfig(vocab=256, seq=1024, layers=2, dim=64, heads=4, kv_heads=2, hidden=128)
ROWS = 2
KINDS = {
    "llama": partial(jp.Decoder, LLAMA),
    "gpt": partial(jp.Decoder, GPT),
    "annotated": models()["annotated"],
    "linen": models()["linen"],
}
VARIANTS = {"plain": {}, "accumulation": {"accumulate": 2}, "remat": {"remat": "full"}}


@cache
def alone(kind, variant):
    losses, state, _ = on_one_device(KINDS[kind], loss=jp.next_token_loss, **VARIANTS[variant])
    return losses, state


def parallel(layout):
    sizes = LAYOUTS[layout]
    pipeline = jp.Pipeline(microbatches=2) if "pipe" in sizes else jp.Pipeline()
    return jp.Parallel(**sizes, pipeline=pipeline)


CASES = [
    *(("llama", "plain", layout) for layout in LAYOUTS if layout != "context 8"),  # a row of tests/contracts
    *(("gpt", "remat", layout) for layout in ("data 2 x context 4", "fsdp 2 x context 2 x tensor 2")),
    *(("llama", "accumulation", layout) for layout in ("context 8", "data 2 x fsdp 2 x context 2, zero 2")),
    *((kind, "plain", "data 2 x context 4") for kind in ("annotated", "linen")),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "variant", "layout"),
    some(CASES, [("linen", "plain", "data 2 x context 4")], [("llama", "plain", "context 4 x tensor 2, sequence")]),
)
def test_losses_and_parameters_equal_one_device(kind, variant, layout):
    want, reference = alone(kind, variant)
    got, state, _ = train(KINDS[kind], parallel(layout), loss=jp.next_token_loss, **VARIANTS[variant])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays((state.params, state.model_state), (reference.params, reference.model_state))


OF_ANY_KIND = [
    ({"pipe": 2, "context": 2, "tensor": 2, "sequence": True}, {"schedule": "1f1b"}),  # gathers in a lax.switch
    ({"pipe": 2, "fsdp": 2, "context": 2}, {"gather": "tick"}),
    ({"pipe": 2, "context": 2, "tensor": 2, "sequence": True}, {"head": "spread"}),
    ({"pipe": 2, "fsdp": 2, "context": 2}, {"schedule": "zb_v"}),
]


@pytest.mark.spread(0)
@pytest.mark.parametrize(("sizes", "pipeline"), some(OF_ANY_KIND, [], [OF_ANY_KIND[0]]))
def test_in_a_pipeline_of_any_kind(sizes, pipeline):
    want, reference = alone("llama", "plain")
    how = jp.Parallel(**sizes, pipeline=jp.Pipeline(microbatches=4, **pipeline))
    got, state, _ = train(KINDS["llama"], how, loss=jp.next_token_loss)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, reference.params)


@pytest.mark.nightly
def test_a_piece_may_have_fewer_tokens_than_the_others():
    """A vision transformer of 16 patches and a class token, over 4 devices."""

    def images(count):
        rng = np.random.default_rng(0)
        for _ in range(count):
            yield {
                "inputs": rng.normal(size=(8, 8, 8)).astype(np.float32),
                "labels": rng.integers(0, 4, 8).astype(np.int32),
            }

    settings = jp.ViTConfig(size=8, patch=2, classes=4, layers=2, dim=32, heads=4)
    model, run = partial(jp.ViT, settings), partial(train, loss=jp.classification_loss, data=images, steps=3)
    want, reference, _ = run(model, jp.Parallel(), jax.devices()[:1])
    got, state, _ = run(model, jp.Parallel(data=2, context=4))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, reference.params)


@pytest.mark.nightly
def test_a_step_may_be_lowered_twice_though_jax_traces_it_once():
    step = jp.train_step(jp.compose(KINDS["llama"], jp.Parallel(data=4, context=2)), jp.next_token_loss, optax.sgd(0.1))
    ids = jax.ShapeDtypeStruct((8, SEQ), jnp.int32)
    batch = {"inputs": ids, "targets": ids}
    first, second = (step.lower(step.abstract(), batch) for _ in range(2))
    assert first.as_text() == second.as_text()


@pytest.mark.nightly
def test_a_model_that_names_no_sequence_is_refused():
    said = r"context=2, but Bare names no activation dim seq.*\n.*\n.*jp.constrain"
    with pytest.raises(JaxparError, match=said):
        train(models()["bare"], jp.Parallel(data=4, context=2), steps=1)


class OwnNames(nnx.Module):
    """Names its dims as no code base does that jaxpar knows."""

    def __init__(self, rngs):
        self.table, self.out = nnx.Embed(32, 16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        x = nn.with_logical_constraint(self.table(tokens), ("rows", "place", "width"))
        return self.out(jnp.tanh(x))


@pytest.mark.nightly
def test_a_rule_for_a_name_of_the_model_cuts_its_sequence():
    """The refusal says which names have no rule; with the rule that it shows, the step equals one device."""
    said = r"context=2, but OwnNames names no.*\n.*\n.*rules=\{'place': 'context'\}.*: place, rows, width"
    with pytest.raises(JaxparError, match=said):
        train(OwnNames, jp.Parallel(data=4, context=2), steps=1)
    parallel = jp.Parallel(data=4, context=2, rules={"place": "context"})
    losses, state, step = train(OwnNames, parallel, steps=2)
    expected, reference, _ = train(OwnNames, jp.Parallel(), jax.devices()[:1], steps=2)
    assert_same_arrays((losses, state.params), (expected, reference.params))
    assert '{"context"}' in step.lower(step.abstract(), next(batches(1))).as_text()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"pipe": 2, "data": 2, "context": 2}, marks=pytest.mark.full),
        pytest.param({"pipe": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_what_would_end_the_process_is_refused(sizes):
    """optax's loss looks labels up; XLA's partitioner aborts on that between context and tensor, within a pipeline."""
    run = partial(train, KINDS["llama"], jp.Parallel(**sizes, pipeline=jp.Pipeline(microbatches=2)), steps=1)
    if "tensor" not in sizes:
        assert np.isfinite(run(loss=token_loss)[0]).all()
        return
    with pytest.raises(
        JaxparError, match=r"take_along_axis .* pipe=2 x context=2 x tensor=2\n.*\n.*jp.next_token_loss"
    ):
        run(loss=token_loss)


def lowered(monkeypatch, settings, backend, **sizes):
    """Returns what jax.nn was asked to run attention with, as if on such a machine, and the step in bf16."""
    asked, real = set(), jax.nn.dot_product_attention

    def attention(*args, implementation=None, **kwargs):
        asked.add(implementation)
        return real(*args, **kwargs)

    monkeypatch.setattr(islands.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(islands.jax.nn, "dot_product_attention", attention)
    layout = jp.compose(partial(jp.Decoder, settings), jp.Parallel(**sizes))
    step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1), precision="bf16")
    ids = jax.ShapeDtypeStruct((8, settings.seq), jnp.int32)
    step.lower(step.abstract(), {"inputs": ids, "targets": ids})
    return asked, step


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("backend", "sizes", "want"),
    [
        ("gpu", {"data": 8}, {"cudnn"}),
        pytest.param("gpu", {"data": 4, "tensor": 2, "sequence": True}, {"cudnn"}, marks=pytest.mark.slow),
        pytest.param("gpu", {"data": 4, "context": 2}, set(), marks=pytest.mark.slow),
        pytest.param("cpu", {"data": 4, "context": 2}, set(), marks=pytest.mark.slow),
    ],
)
def test_cudnn_is_left_alone_where_sequences_are_in_pieces(backend, sizes, want, monkeypatch):
    """Its kernel refuses them: attention is jaxpar's own there."""
    asked, _ = lowered(monkeypatch, LLAMA, backend, **sizes)
    assert asked == want


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("dim", "want"),
    [pytest.param(24, None, marks=pytest.mark.slow), (32, "cudnn"), pytest.param(528, None, marks=pytest.mark.slow)],
)
def test_heads_that_cudnn_does_not_have_run_as_matmuls_and_it_is_said(dim, want, monkeypatch):
    settings = dataclasses.replace(LLAMA, dim=dim, heads=2, kv_heads=2)
    asked, step = lowered(monkeypatch, settings, "gpu", data=8)
    assert asked == {want}
    assert any(f"no heads of {dim // 2}" in form for form in step.compiler.implementations) == (want is None)


@pytest.mark.nightly
def test_all_products_of_long_sequences_run_in_16_bits(monkeypatch):
    """Those of attention are most of them; JAX's own have one float32 operand going backward, and are listed."""
    _, step = lowered(monkeypatch, LONG, "cpu", data=4, context=2)
    assert step.compiler.matmuls.share == 1
    _, step = lowered(monkeypatch, LONG, "cpu", data=8)
    assert step.compiler.matmuls.share < 0.95
    assert all(each.mixed == each.share for each in step.compiler.matmuls.high_precision)
    assert sum(each.share for each in step.compiler.matmuls.high_precision) == pytest.approx(
        1 - step.compiler.matmuls.share
    )


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "is_causal", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.full)]
)
def test_attention_in_pieces_is_attention(is_causal):
    """Values and gradients in bf16 beside those of JAX in float32; what differs is rounding."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (2, 32, 8, 16), (2, 32, 4, 16), (2, 32, 4, 16), (2, 32, 8, 16)
    *given, weight = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    def run(attention, dtype):
        out, back = jax.vjp(attention, *(x.astype(dtype) for x in given))
        return out, *back(weight.astype(dtype))

    pieces, whole = partial(in_16_bits, causal=is_causal), partial(jax.nn.dot_product_attention, is_causal=is_causal)
    low, high = run(pieces, jnp.bfloat16), run(whole, jnp.float32)
    for got, want in zip(low, high, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(np.float32), want, atol=0.03 * np.abs(want).max())
    exact = run(pieces, jnp.float32)
    for got, want in zip(exact, high, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def compiled(**sizes):
    devices = jp.target_devices("h100:1x8")[: np.prod(list(sizes.values()))]
    layout = jp.compose(partial(jp.Decoder, LONG), jp.Parallel(**sizes), devices)
    batch = {name: jax.ShapeDtypeStruct((ROWS, LONG.seq), jnp.int32) for name in ("inputs", "targets")}
    return jp.inspect(jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3)), batch)


@pytest.mark.nightly
@gpu_compiler
def test_a_device_keeps_its_share_of_the_activations():
    kept = {}
    for ways in (1, 8):
        causes = {share.cause: share.bytes for share in compiled(context=ways).memory}
        kept[ways] = causes["activations"] + causes.get("logits", 0)
    assert kept[8] < kept[1] / 6
