"""`jp.attention(softcap=)` is Gemma 2's attention: values and gradients of plain einsums, on one device and many."""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import some
from test_attention_in_blocks import arrays, both
from test_context_costs import call
from test_fused_ring_attention import REFERENCE, lowered
from tiny import VOCAB, assert_same_arrays, train

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.models import islands
from jaxpar.models.blocks import fused
from jaxpar.models.blocks import fused as dispatch
from jaxpar.parallel.techniques.attention_gather import in_16_bits
from jaxpar.parallel.techniques.ring_attention import attention
from jaxpar.plan.techniques.auto_context import choose_form

CAP = 0.7  # scores of normal entries reach 2: many of them are far into the bend of tanh
MASKS = {  # causal, window, packed
    "causal": (True, None, False),
    "window": (True, 5, False),
    "packed": (True, None, True),
    "full": (False, None, False),
    "full window": (False, 5, True),
}


def by_einsum(q, k, v, *, causal=False, window=None, segments=None, softcap=None):
    """Attention as the paper writes it: heads of keys repeated, a matrix of scores, no help of jaxpar's."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / np.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    away = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = jnp.ones((1, *away.shape), bool)
    if causal:
        seen &= away >= 0
    if window is not None:
        seen &= abs(away) < window
    if segments is not None:
        seen &= segments[:, :, None] == segments[:, None, :]
    shares = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhst,bthk->bshk", shares, v)


def given(mask, tokens, heads, groups, dtype: Any = np.float64):
    rng = np.random.default_rng(0)
    causal, window, packed = MASKS[mask]
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, tokens)), axis=1)) if packed else None
    *three, weight = arrays(rng, tokens, heads, groups, dtype)
    return three, weight, {"causal": causal, "window": window, "segments": segments}


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("mask", some(MASKS, ["full window"], ["packed", "full"]))
def test_one_device_has_the_values_and_gradients_of_einsums(mask, long, monkeypatch):
    monkeypatch.setattr(dispatch, "LONG", 8 if long else 8192)
    with jax.enable_x64(True):
        three, weight, masks = given(mask, 24, 4, 2)
        wanted = both(partial(by_einsum, **masks, softcap=CAP), three, weight)
        with islands.use_islands({}) as called:
            got = both(partial(jp.attention, **masks, softcap=CAP), three, weight)
        uncapped = both(partial(by_einsum, **masks), three, weight)
    assert (islands.BLOCKS_NOTE in called) == long
    for x, y, other in zip(got, wanted, uncapped, strict=True):
        assert x.dtype == jnp.float64
        np.testing.assert_allclose(x, y, atol=1e-12)
        assert np.abs(other - y).max() > 1e-2  # the cap does something here


CASES = [  # devices, ulysses, heads, heads of keys, mask
    (2, 1, 4, 2, "causal"),
    (2, 2, 4, 2, "packed"),
    (4, 1, 2, 1, "window"),
    (4, 1, 4, 2, "packed"),
    (4, 4, 4, 1, "causal"),
    (4, 4, 8, 4, "full window"),
    (4, 2, 4, 2, "causal"),
    (4, 1, 2, 2, "full"),
    (8, 2, 4, 2, "window"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "ulysses", "heads", "groups", "mask"),
    some(CASES, [(4, 4, 4, 1, "causal")], [(2, 2, 4, 2, "packed"), (4, 4, 8, 4, "full window")]),
)
def test_pieces_that_travel_have_the_values_and_gradients_of_einsums(
    devices, ulysses, heads, groups, mask, monkeypatch
):
    monkeypatch.setattr(
        attention, "max_block_sizes", lambda *_: (2, 3)
    )  # several blocks of each chunk, some of them filled up
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    with jax.enable_x64(True), jax.set_mesh(mesh):
        three, weight, masks = given(mask, 48, heads, groups)
        wanted = both(partial(by_einsum, **masks, softcap=CAP), three, weight)
        many = partial(attention.distributed_attention, **masks, softcap=CAP, ulysses=ulysses)
        cut = NamedSharding(mesh, P(None, "context"))
        got = jax.jit(lambda *x: both(many, x[:3], x[3]))(*jax.device_put((*three, weight), cut))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("attend", [pytest.param(in_16_bits, marks=pytest.mark.full), jp.attention])
def test_in_16_bits_scores_are_capped_in_float32(attend):
    three, weight, masks = given("packed", 24, 4, 2, jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (*three, weight)]
    wanted = both(partial(by_einsum, **masks, softcap=CAP), wide[:3], wide[3])
    got = both(partial(attend, **masks, softcap=CAP), three, weight)
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == jnp.bfloat16
        assert np.linalg.norm(x.astype(jnp.float32) - y) < 0.01 * np.linalg.norm(y)


class Gemma(nnx.Module):
    """Layers of local and global attention in turns, with capped scores."""

    def __init__(self, attend, cap, rngs):
        self.attend, self.cap, table = attend, cap, nnx.initializers.normal(0.3)
        self.embed = nnx.Param(table(rngs.params(), (VOCAB, 16)), out_sharding=("vocab", "embed"))
        self.qkv = nnx.List(
            [nnx.Param(table(rngs.params(), (16, 8, 8)), out_sharding=("embed", None, None)) for _ in range(2)]
        )
        self.out = nnx.List(
            [nnx.Param(table(rngs.params(), (4, 8, 16)), out_sharding=(None, None, "embed")) for _ in range(2)]
        )

    def __call__(self, tokens):
        x = jp.constrain(self.embed[...][tokens], "batch", "seq", "embed")
        for qkv, out, window in zip(self.qkv, self.out, (3, None), strict=True):
            q, k, v = jnp.split(jnp.einsum("bsd,dhk->bshk", x, qkv[...]), (4, 6), axis=2)
            y = self.attend(q, k, v, causal=True, window=window, softcap=self.cap)
            x = jp.constrain(x + jnp.einsum("bshk,hkd->bsd", y, out[...]), "batch", "seq", "embed")
        return x @ self.embed[...].T


def trained(attend, parallel, devices=None, cap: float | None = 0.1):  # scores are 0.13 on average
    losses, state, _ = train(
        partial(Gemma, attend, cap), parallel, devices, loss=jp.next_token_loss, chain=optax.sgd(0.1), steps=3
    )
    return losses, state.params


@cache
def of_einsums():
    capped, wide = (trained(by_einsum, jp.Parallel(), jax.devices()[:1], cap) for cap in (0.1, None))
    apart = [np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (capped[1], wide[1])), strict=True)]
    assert max(apart) > 1e-3  # the cap does something here
    return capped


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes",
    some(
        LAYOUTS := [
            {"data": 8},
            {"context": 2, "data": 4},
            {"context": 4, "data": 2},
            {"context": 2, "fsdp": 2, "data": 2, "context_by": "ring"},
            {"context": 4, "data": 2, "context_by": "ring"},
            {"context": 2, "data": 4, "context_by": "ulysses"},
            {"context": 4, "data": 2, "context_by": "ulysses"},
            {"context": 4, "data": 2, "context_by": "ring", "ulysses": 2},
            {"context": 4, "data": 2, "context_by": "auto"},
        ],
        [LAYOUTS[6]],
        [LAYOUTS[4], LAYOUTS[5]],
    ),
)
def test_a_model_with_capped_scores_trains_as_with_einsums_on_one_device(sizes):
    (losses, params), (wanted, expected) = trained(jp.attention, jp.Parallel(**sizes)), of_einsums()
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_arrays(params, expected)


@pytest.mark.nightly
def test_cudnns_kernel_is_not_given_capped_scores_and_refused_by_name_where_it_is_asked_for():
    why = "it caps no scores"
    with fused.override_kernel(REFERENCE):
        called, run = lowered(parts="cpu", softcap=CAP)
        assert [note for note in called if note.endswith(f"not by cuDNN's kernel: {why}")]
        assert "tanh" in run.lower().as_text()
        with pytest.raises(JaxparError, match=rf"context_kernel='cudnn' for q .*: {why}\n.*softcap.*\n.*'auto'"):
            lowered(parts="cpu", softcap=CAP, kernel="cudnn")
    with islands.override_cudnn(lambda *_, **__: pytest.fail("the kernel was called")):
        low = jnp.ones((1, 8, 2, 8), jnp.bfloat16)
        assert jp.attention(low, low, low, softcap=CAP).shape == low.shape


def test_a_plan_knows_that_capped_scores_are_met_in_blocks():
    assert "in blocks of plain JAX: it caps no scores" in choose_form(call(seq=131072, chip="h100", softcap=True)).why
    with pytest.raises(JaxparError, match="it caps no scores"):
        choose_form(call(seq=131072, chip="h100", softcap=True, kernel="cudnn"))


Q = jnp.ones((1, 4, 2, 4))


@pytest.mark.parametrize("cap", [0, -1.0, float("inf"), float("nan"), True, "50", jnp.array(50.0), [50.0]])
def test_what_is_no_cap_is_refused(cap):
    with pytest.raises(JaxparError, match=r"jp.attention\(softcap=(.|\n)*a Python number above 0"):
        jp.attention(Q, Q, Q, softcap=cap)


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("cap", [50, np.float32(50), np.float64(50)])
def test_any_number_is_a_cap_and_keeps_the_dtype(cap):
    got = jp.attention(Q, Q, Q, softcap=cap)
    assert got.dtype == Q.dtype
    np.testing.assert_array_equal(got, jp.attention(Q, Q, Q, softcap=50.0))


def test_an_implementation_without_a_cap_is_refused_by_name():
    with islands.use_islands({"attention": lambda q, k, v, *, causal: q}):
        with pytest.raises(JaxparError, match=re.escape("jp.attention(softcap=...), run by <lambda>")):
            jp.attention(Q, Q, Q, softcap=50.0)
