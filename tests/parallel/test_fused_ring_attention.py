"""Parts of attention by a fused kernel: what is called, what is made of the parts, when it runs and what is said."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_context_variants as forms
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import some
from test_attention_in_blocks import arrays, both
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.mesh.target import missing_plugin
from jaxpar.models.blocks import fused
from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.islands import use_islands
from jaxpar.parallel.techniques.ring_attention import attention, choice
from jaxpar.parallel.techniques.ring_attention.choice import BAND, AttentionSharding, check_kernel, relative_errors


def scores(q, k, causal, window):
    """Queries grouped by the heads of keys that they share, and their scores, lowest where a key is not seen."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]).astype(wide)
    away = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = (away >= 0 if causal else jnp.ones_like(away, bool)) & (away < (window or 1 + away.size))
    found = jnp.einsum("bsgrk,btgk->bgrst", grouped, k.astype(wide)) / np.sqrt(q.shape[3])
    return grouped, jnp.where(seen, found, -jnp.inf)


def reference_forward(q, k, v, *, causal, window=None):
    """As cuDNN's kernel is called, from its description: no blocks, no online softmax."""
    _, found = scores(q, k, causal, window)
    logsumexp = jax.nn.logsumexp(found, axis=-1)
    shares = jnp.exp(found - logsumexp[..., None])
    out = jnp.einsum("bgrst,btgk->bsgrk", shares, v.astype(shares.dtype)).reshape(q.shape)
    return out.astype(q.dtype), logsumexp.reshape(q.shape[0], q.shape[2], -1)


def reference_backward(q, k, v, out, logsumexp, grad, *, causal, window=None):
    """Of the logsumexp and output that it is given, which may be those over more keys than `k`."""
    grouped, found = scores(q, k, causal, window)
    of_out, out = (x.reshape(grouped.shape).astype(grouped.dtype) for x in (grad, out))
    shares = jnp.exp(found - logsumexp.reshape(found.shape[:-1])[..., None])
    slopes = jnp.einsum("bsgrk,btgk->bgrst", of_out, v.astype(grouped.dtype))
    delta = jnp.einsum("bsgrk,bsgrk->bgrs", of_out, out)[..., None]
    slopes = shares * (slopes - delta) / np.sqrt(q.shape[3])
    of_q = jnp.einsum("bgrst,btgk->bsgrk", slopes, k.astype(grouped.dtype)).reshape(q.shape)
    of_k = jnp.einsum("bgrst,bsgrk->btgk", slopes, grouped)
    of_v = jnp.einsum("bgrst,bsgrk->btgk", shares, of_out)
    return of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype)


REFERENCE = fused.FusedKernel(reference_forward, reference_backward)


def compare(devices, ulysses, grouped, tokens, causal, window, seed=0):
    """Pieces by the reference kernel against one device in float64."""
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.enable_x64(True),
        jax.set_mesh(mesh),
    ):
        patch.setattr(attention, "choose", lambda *_, **__: (REFERENCE, AttentionSharding()))
        *three, weight = arrays(np.random.default_rng(seed), tokens, *grouped)
        many = partial(attention.distributed_attention, causal=causal, window=window, ulysses=ulysses)
        wanted = both(partial(blockwise, rule=AttentionMask(causal, window)), three, weight)
        cut = NamedSharding(mesh, P(None, "context"))
        got = jax.jit(lambda *x: both(many, x[:3], x[3]))(*jax.device_put((*three, weight), cut))
        for x, y in zip(got, wanted, strict=True):
            assert x.dtype == jnp.float64
            np.testing.assert_allclose(x, y, atol=1e-12)


CASES = [  # devices, those that exchange heads, heads and those of keys, tokens, causal, window
    (3, 1, (2, 1), 12, True, None),
    (4, 2, (4, 1), 16, True, None),
    (8, 1, (2, 2), 16, False, None),
    (4, 4, (4, 2), 8, True, 3),
    (1, 1, (2, 1), 6, True, 2),
    (8, 2, (4, 2), 16, True, None),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("devices", "ulysses", "grouped", "tokens", "causal", "window"), some(CASES, [CASES[2]], []))
def test_parts_by_a_kernel_have_the_values_and_gradients_of_one_device_in_float64(
    devices, ulysses, grouped, tokens, causal, window
):
    compare(devices, ulysses, grouped, tokens, causal, window)


@pytest.mark.full
@settings(max_examples=3, deadline=None)
@given(
    ways=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (6, 3), (7, 1), (8, 1), (8, 4)]),
    chunk=st.integers(1, 3),
    grouped=st.sampled_from([(12, 12), (12, 3), (12, 1)]),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_parts_by_a_kernel_have_them_on_any_number_of_devices(ways, chunk, grouped, causal, seed):
    compare(*ways, grouped, 2 * ways[0] * chunk, causal, None, seed)


def calls(function, *arrays):
    """Returns how cuDNN is called: targets, settings, layouts and types of operands and results."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(__cudnn\S+)\(.*?\) (\{.*)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("causal", "window", "groups", "dtype"),
    [(True, None, 2, jnp.bfloat16), (True, 8, 1, jnp.float16), (False, None, 4, jnp.bfloat16)],
)
def test_cudnn_is_called_as_jax_calls_it(causal, window, groups, dtype, monkeypatch):
    theirs = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(theirs, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91100))
    q, k = (jax.ShapeDtypeStruct((2, s, n, 32), dtype) for s, n in ((64, 4), (64 if causal else 48, groups)))
    reach = window and (window - 1, 0)

    def of_jax(q, k, v, grad):
        attend = partial(
            jax.nn.dot_product_attention, is_causal=causal, local_window_size=reach, implementation="cudnn"
        )
        out, back = jax.vjp(attend, q, k, v)
        return out, back(grad)

    def mine(q, k, v, grad):
        out, logsumexp = fused.forward(q, k, v, causal=causal, window=window)
        return out, fused.backward(q, k, v, out, logsumexp, grad, causal=causal, window=window)

    found = calls(mine, q, k, k, q)
    assert found == calls(of_jax, q, k, k, q)
    assert [target for target, _ in found] == [fused.FORWARD, fused.BACKWARD]


def rounded(wrong):
    """The reference kernel with a fault of a kind that trains without a word."""

    def forward(q, k, v, **masks):
        out, logsumexp = reference_forward(q, k, v, **masks)
        return out, logsumexp / np.log(2) if wrong == "logarithms to base 2" else logsumexp

    def backward(q, k, v, out, logsumexp, grad, **masks):
        if wrong == "a logsumexp of its own":  # of these keys alone
            out, logsumexp = reference_forward(q, k, v, **masks)
        return reference_backward(q, k, v, out, logsumexp, grad, **masks)

    return fused.FusedKernel(forward, backward)


@pytest.mark.nightly
def test_a_trial_passes_a_kernel_that_is_right_and_refuses_others():
    right = relative_errors(REFERENCE, "bfloat16", head_dim=64, shared=2)
    assert max(right.values()) < BAND["bfloat16"] / 5
    for wrong, found in (
        ("logarithms to base 2", "the output by .*, the gradient of q"),
        ("a logsumexp of its own", "the gradient of q by"),
    ):
        with pytest.raises(JaxparError, match=rf"heads of 64 on cpu is off: {found}.*\n.*\n.*context_kernel = 'plain'"):
            check_kernel(rounded(wrong), "bfloat16", 64, 2)


@pytest.mark.slow
def test_a_trial_of_a_window_longer_than_itself_finds_a_kernel_that_leaves_it_out():
    def no_window(run):
        return lambda *arrays, causal, window=None: run(*arrays, causal=causal)

    assert (
        max(relative_errors(REFERENCE, "bfloat16", head_dim=64, shared=2, window=4096).values()) < BAND["bfloat16"] / 5
    )
    with pytest.raises(JaxparError, match="is off: the output by"):
        check_kernel(fused.FusedKernel(*map(no_window, REFERENCE)), "bfloat16", 64, 2, 4096)


def test_a_kernel_that_does_not_run_is_refused_with_the_way_out():
    with pytest.raises(JaxparError, match=r"does not run: .*fmhaSoftmax.*\n.*\n.*context_kernel = 'plain'"):
        check_kernel(fused.CUDNN, "bfloat16", 64, 2)


def lowered(shape=(2, 32, 4, 64), dtype=jnp.bfloat16, kv_heads=2, devices=2, axes=("context",), parts="h100", **how):
    """What a call of attention over pieces notes where it is lowered, for GPUs that are not there or simulated ones."""
    count = int(np.prod([devices, *[2] * (len(axes) - 1)]))
    found = jax.devices()[:count] if parts == "cpu" else jp.target_devices(f"{parts}:1x{count}")
    mesh = Mesh(np.array(found).reshape(devices, *[2] * (len(axes) - 1)), axes, axis_types=(AxisType.Auto,) * len(axes))
    cut = NamedSharding(mesh, P(None, "context"))
    q, k = (jax.ShapeDtypeStruct((*shape[:2], n, shape[3]), dtype, sharding=cut) for n in (shape[2], kv_heads))
    segments = jnp.zeros(shape[:2], jnp.int32) if how.pop("packed", False) else None
    how = {"causal": True, "segments": segments} | how
    with jax.set_mesh(mesh), use_islands({}) as called:
        run = jax.jit(partial(attention.distributed_attention, **how)).trace(q, k, k)
    return called, run


KERNEL = "parts of attention are run by cuDNN's kernel"
PLAIN = "parts of attention are run in blocks of plain JAX, not by cuDNN's kernel: "
absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")


@absent
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "on GPUs that are there it would be"),
        ({"kernel": "plain"}, "parallel.context_kernel = 'plain'"),
        ({"dtype": jnp.float32}, "it computes in 16 bits, not in float32"),
        ({"packed": True}, "it is given no segments of packed documents"),
        ({"window": 5}, "a window is causal and within the tokens of one device for it"),
        ({"shape": (2, 32, 4, 20)}, "it has no heads of 20"),
        ({"shape": (2, 32, 4, 264)}, "it has no heads of 264"),
    ],
)
def test_where_plain_jax_runs_it_is_said_why_and_refused_where_the_kernel_is_asked_for(how, said):
    called, _ = lowered(**how)
    assert (
        [note for note in called if "cuDNN" in note]
        == [note for note in called if f"ring: {PLAIN}{said}" in note]
        != []
    )
    if how.get("kernel") or not how:
        return
    with pytest.raises(
        JaxparError, match=rf"context_kernel='cudnn' for q .*by ring: {said}\n.*\n.*context_kernel='auto'"
    ):
        lowered(**how, kernel="cudnn")


@absent
@pytest.mark.parametrize(("how", "forward"), [({}, 3), ({"ulysses": 2}, 1), ({"ulysses": 2, "window": 5}, 1)])
def test_the_kernel_runs_for_gpus_where_it_is_asked_for_and_it_is_said(how, forward):
    called, run = lowered(**how, kernel="cudnn")
    assert [note for note in called if KERNEL in note]
    text = run.lower().as_text()
    assert len(re.findall(re.escape(f"@{fused.FORWARD}("), text)) == forward  # own keys, and two chunks of the other's
    assert ("sliding_window_length\\22: 5" in text) == ("window" in how)


def test_simulated_devices_run_plain_jax_and_cannot_be_asked_for_more():
    called, _ = lowered(parts="cpu")
    assert not [note for note in called if "cuDNN" in note]
    with pytest.raises(JaxparError, match="by ring: these devices are no GPUs"):
        lowered(parts="cpu", kernel="cudnn")


def test_what_stands_in_for_it_runs_where_it_would():
    with fused.override_kernel(REFERENCE):
        called, run = lowered(parts="cpu")
    assert [note for note in called if KERNEL in note]
    assert "while" not in run.lower().as_text()  # no walk over blocks


def test_the_layout_says_what_may_run_parts_and_what_cannot_be_declared_is_refused():
    settings = jp.DecoderConfig(vocab=32, seq=32, layers=1, dim=16, heads=2)
    for asked, said in (
        ("auto", "and on simulated devices, in blocks of plain JAX"),
        ("plain", "plain JAX, as asked"),
    ):
        layout = jp.compose(
            partial(jp.Decoder, settings), jp.Parallel(context=8, context_by="ring", context_kernel=asked)
        )
        assert said in layout.explain()
    for declared, said in (
        ({"context_by": "ring", "context_kernel": "cudn"}, "context_kernel='cudn'.*\n.*auto, cudnn, plain\n.*cudnn"),
        ({"context_kernel": "plain"}, "context_kernel='plain' with context_by='gather' does nothing"),
    ):
        with pytest.raises(JaxparError, match=said):
            jp.compose(partial(jp.Decoder, settings), jp.Parallel(context=8, **declared))


TRAINED = [case for case in forms.CASES if case[0] != "gather" and case[2] in ("causal", "full")]


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("form", "kind", "mask", "layout", "remat"),
    some(
        TRAINED,
        [],
        [("ring", "llama", "causal", "context 2, fsdp 2, tensor 2", "full")],
    ),
)
def test_training_by_parts_of_a_kernel_has_the_losses_and_parameters_of_one_device(
    form, kind, mask, layout, remat, monkeypatch
):
    want, params = forms.alone(kind, mask)
    monkeypatch.setattr(choice, "_refusal", lambda *_: None)  # the reference computes in float32 too
    pipeline = {"pipeline": jp.Pipeline(microbatches=2)} if "pipe" in layout else {}
    parallel = jp.Parallel(**forms.LAYOUTS[layout], **forms.FORMS[form], **pipeline, context_kernel="cudnn")
    with fused.override_kernel(REFERENCE):
        got, state, _ = forms.run(kind, mask, parallel, remat=remat)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same_arrays(state.params, params)


@absent
def test_on_a_gpu_that_is_here_the_kernel_is_tried_out_before_it_is_taken(monkeypatch):
    tried = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(choice, "check_kernel", lambda *given: tried.append(given))
    called, _ = lowered()
    assert [note for note in called if KERNEL in note]
    assert tried == [(fused.CUDNN, "bfloat16", 64, 2, None)]
    lowered(kernel="plain")
    assert len(tried) == 1
    lowered(kv_heads=1, ulysses=2)  # of which each device gets a copy, and two of four heads
    assert tried[1:] == [(fused.CUDNN, "bfloat16", 64, 2, None)]


@pytest.mark.nightly
def test_a_trial_takes_no_part_in_the_trace_mesh_and_settings_of_who_asks():
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def piece(x):
        check_kernel(REFERENCE, "float16", 32, 1)
        return x

    with jax.enable_x64(True), jax.set_mesh(mesh):
        traced = jax.make_jaxpr(jax.shard_map(piece, in_specs=P("context"), out_specs=P("context")))(jnp.ones(4))
    assert len(traced.eqns[0].params["jaxpr"].eqns) == 0
