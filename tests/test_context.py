"""Context parallelism: sequences in pieces, keys and values gathered, the same losses and parameters as one device."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import SEQ, VOCAB, assert_same_arrays, models, on_one_device, token_loss, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.mesh.target import find_plugin
from jaxpar.models import layers

gpu_compiler = pytest.mark.skipif(find_plugin() is not None, reason=f"compiling for absent GPUs: {find_plugin()}")
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
LLAMA = jp.DecoderSettings(vocab=VOCAB, seq=SEQ, layers=2, dim=32, heads=4, kv_heads=4, hidden=32)
GPT = jp.DecoderSettings(
    vocab=VOCAB, seq=SEQ, layers=2, dim=32, heads=8, kv_heads=8, gated=False, position="learned", norm="layer",
    use_bias=True, tied=True, dropout=0.2, scan=False,
)  # fmt: skip
KINDS = {
    "llama": partial(jp.Decoder, LLAMA),
    "gpt": partial(jp.Decoder, GPT),
    "annotated": models()["annotated"],
    "linen": models()["linen"],
}
VARIANTS = {"plain": {}, "accumulation": {"accumulate": 2}, "remat": {"remat": "full"}}


@cache
def alone(kind, variant):
    losses, state, _ = on_one_device(KINDS[kind], loss=jp.next_token, **VARIANTS[variant])
    return losses, state


def parallel(layout):
    sizes = LAYOUTS[layout]
    pipeline = jp.Pipeline(microbatches=2) if "pipe" in sizes else jp.Pipeline()
    return jp.Parallel(**sizes, pipeline=pipeline)


CASES = [
    *(("llama", "plain", layout) for layout in LAYOUTS),
    *(("gpt", "remat", layout) for layout in ("data 2 x context 4", "fsdp 2 x context 2 x tensor 2")),
    *(("llama", "accumulation", layout) for layout in ("context 8", "data 2 x fsdp 2 x context 2, zero 2")),
    *((kind, "plain", "data 2 x context 4") for kind in ("annotated", "linen")),
]


@pytest.mark.parametrize(("kind", "variant", "layout"), [pytest.param(*case, id=", ".join(case)) for case in CASES])
def test_losses_and_parameters_equal_one_device(kind, variant, layout):
    want, reference = alone(kind, variant)
    got, state, _ = train(KINDS[kind], parallel(layout), loss=jp.next_token, **VARIANTS[variant])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays((state.params, state.rest), (reference.params, reference.rest))


def test_a_piece_may_have_fewer_tokens_than_the_others():
    """A vision transformer of 16 patches and a class token, over 4 devices."""

    def images(count):
        rng = np.random.default_rng(0)
        for _ in range(count):
            yield {
                "inputs": rng.normal(size=(8, 8, 8)).astype(np.float32),
                "labels": rng.integers(0, 4, 8).astype(np.int32),
            }

    settings = jp.ViTSettings(size=8, patch=2, classes=4, layers=2, dim=32, heads=4)
    model, run = partial(jp.ViT, settings), partial(train, loss=jp.classify, data=images, steps=3)
    want, reference, _ = run(model, jp.Parallel(), jax.devices()[:1])
    got, state, _ = run(model, jp.Parallel(data=2, context=4))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, reference.params)


def test_a_model_that_names_no_sequence_is_refused():
    said = r"context=2, but Bare names no activation dim seq.*\n.*\n.*jp.constrain"
    with pytest.raises(JaxparError, match=said):
        train(models()["bare"], jp.Parallel(data=4, context=2), steps=1)


@pytest.mark.parametrize("sizes", [{"pipe": 2, "data": 2, "context": 2}, {"pipe": 2, "context": 2, "tensor": 2}])
def test_what_would_end_the_process_is_refused(sizes):
    """optax's loss looks labels up; XLA's partitioner aborts on that between context and tensor, within a pipeline."""
    run = partial(train, KINDS["llama"], jp.Parallel(**sizes, pipeline=jp.Pipeline(microbatches=2)), steps=1)
    if "tensor" not in sizes:
        assert np.isfinite(run(loss=token_loss)[0]).all()
        return
    with pytest.raises(JaxparError, match=r"take_along_axis .* pipe=2 x context=2 x tensor=2\n.*\n.*jp.next_token"):
        run(loss=token_loss)


@pytest.mark.parametrize("backend", ["gpu", "cpu"])
@pytest.mark.parametrize("context", [1, 2])
def test_cudnn_is_left_alone_where_sequences_are_in_pieces(backend, context, monkeypatch):
    """Its kernel refuses them: on a GPU attention is XLA's own there, and fused elsewhere."""
    asked = []
    real = jax.nn.dot_product_attention

    def attention(*args, implementation, **kwargs):
        asked.append(implementation)
        return real(*args, **kwargs)

    monkeypatch.setattr(layers.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(layers.jax.nn, "dot_product_attention", attention)
    layout = jp.compose(KINDS["llama"], jp.Parallel(data=8 // context, context=context))
    step = jp.build(layout, token_loss, optax.sgd(0.1), precision="bf16")
    ids, mask = jax.ShapeDtypeStruct((16, SEQ), jnp.int32), jax.ShapeDtypeStruct((16, SEQ), jnp.float32)
    step.lower(step.abstract(), {"inputs": ids, "targets": ids, "mask": mask})
    assert set(asked) == {"cudnn" if (backend, context) == ("gpu", 1) else None}


LONG = jp.DecoderSettings(vocab=256, seq=1024, layers=2, dim=64, heads=4, kv_heads=2, hidden=128)
ROWS = 2


def compiled(**sizes):
    devices = jp.target_devices("h100:1x8")[: np.prod(list(sizes.values()))]
    layout = jp.compose(partial(jp.Decoder, LONG), jp.Parallel(**sizes), devices)
    batch = {name: jax.ShapeDtypeStruct((ROWS, LONG.seq), jnp.int32) for name in ("inputs", "targets")}
    return jp.inspect(jp.build(layout, jp.next_token, optax.adamw(1e-3)), batch)


@gpu_compiler
def test_a_device_keeps_its_share_of_the_activations():
    kept = {}
    for ways in (1, 8):
        causes = {share.cause: share.bytes for share in compiled(context=ways).memory}
        kept[ways] = causes["activations"] + causes.get("logits", 0)
    assert kept[8] < kept[1] / 6
