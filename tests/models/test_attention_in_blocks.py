"""Attention block by block: the values and gradients of attention, and memory that grows as the sequence does."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.hlo.text import parse
from jaxpar.models import islands
from jaxpar.models.blocks import attention as in_blocks
from jaxpar.models.blocks import fused
from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.kernel import Blocks, pairs


def both(attention, arrays, weight):
    out, back = jax.vjp(attention, *arrays)
    return out, *back(weight)


def of_jax(q, k, v, *, causal, window, segments):
    mask = None if segments is None else (segments[:, :, None] == segments[:, None])[:, None]
    reach = None if window is None else (window - 1, window - 1)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, local_window_size=reach)


def arrays(rng, tokens, heads, groups, dtype=np.float64, keys=None, dim=4):
    sizes = (tokens, heads), (keys or tokens, groups), (keys or tokens, groups), (tokens, heads)
    return [jnp.asarray(rng.normal(size=(2, s, h, dim)), dtype) for s, h in sizes]


def compare(seed, tokens, block, grouped, masks):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        *given, weight = arrays(rng, tokens, *grouped)
        packed = jnp.asarray(np.sort(rng.integers(0, 3, (2, tokens)), axis=1)) if masks["segments"] else None
        masks = masks | {"segments": packed}
        mine = partial(
            blockwise, rule=AttentionMask(masks["causal"], masks["window"]), segments_bs=masks["segments"], block=block
        )
        for got, want in zip(both(mine, given, weight), both(partial(of_jax, **masks), given, weight), strict=True):
            assert got.dtype == want.dtype == jnp.float64
            np.testing.assert_allclose(got, want, atol=1e-6)


CASE = {
    "seed": st.integers(0, 2**31),
    "tokens": st.integers(1, 24),
    "block": st.integers(1, 26),
    "grouped": st.sampled_from([(4, 2), (2, 2), (4, 1)]),
    "masks": st.fixed_dictionaries(
        {
            "causal": st.booleans(),
            "window": st.none() | st.integers(1, 26),
            "segments": st.booleans(),
        }
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tokens", "block", "grouped", "masks"),
    [
        (13, 4, (4, 2), {"causal": True, "window": None, "segments": False}),
        pytest.param(20, 3, (2, 1), {"causal": True, "window": 5, "segments": True}, marks=pytest.mark.full),
        pytest.param(12, 5, (2, 2), {"causal": False, "window": 4, "segments": False}, marks=pytest.mark.full),
    ],
)
def test_values_and_gradients_are_those_of_jax_in_float64(tokens, block, grouped, masks):
    compare(0, tokens, block, grouped, masks)


@pytest.mark.nightly
@settings(max_examples=3, deadline=None)
@given(**CASE)
def test_values_and_gradients_are_those_of_jax_for_any_shape_and_mask(seed, tokens, block, grouped, masks):
    compare(seed, tokens, block, grouped, masks)


@pytest.mark.nightly
def test_a_query_may_meet_keys_of_another_sequence():
    *given, weight = arrays(np.random.default_rng(0), 9, 4, 2, np.float32, keys=13)
    mine, jaxs = (both(f, given, weight) for f in (partial(blockwise, rule=AttentionMask(), block=4), of_full))
    for got, want in zip(mine, jaxs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def of_full(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@pytest.mark.nightly
def test_in_16_bits_sums_are_float32():
    """As near to the exact gradients as those of JAX in the same dtype, and nearer than one block would be off."""
    given = arrays(np.random.default_rng(1), 64, 4, 2, np.float32)
    exact = both(partial(of_jax, causal=True, window=None, segments=None), given[:3], given[3])
    low = [x.astype(jnp.bfloat16) for x in given]
    mine = both(partial(blockwise, rule=AttentionMask(causal=True), block=4), low[:3], low[3])
    for got, want in zip(mine, exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(np.float32), want, atol=0.03 * np.abs(want).max())


@pytest.mark.parametrize(
    ("rule", "walked"),
    [
        (AttentionMask(), 64),
        (AttentionMask(causal=True), 36),
        (AttentionMask(causal=True, window=16), 15),
        (AttentionMask(window=16), 22),
    ],
)
def test_pairs_in_which_nothing_is_seen_are_not_walked(rule, walked):
    blocks = Blocks.split(128, 16)
    table = {tuple(row) for row in pairs(rule, blocks, blocks)}
    seen = np.asarray(rule.mask(jnp.arange(128), jnp.arange(128), None, None))[0, 0, 0]
    assert table == {(i, j) for i in range(8) for j in range(8) if seen[16 * i :][:16, 16 * j :][:, :16].any()}
    assert len(table) == walked


@pytest.mark.nightly
def test_blocks_of_queries_may_be_smaller_than_those_of_keys(monkeypatch):
    *given, weight = arrays(np.random.default_rng(3), 23, 4, 2, np.float32)
    monkeypatch.setattr(in_blocks, "max_block_sizes", lambda *_: (3, 5))
    masks = {"causal": True, "window": 9, "segments": None}
    mine, jaxs = (
        both(f, given, weight)
        for f in (partial(blockwise, rule=AttentionMask(causal=True, window=9)), partial(of_jax, **masks))
    )
    for got, want in zip(mine, jaxs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def program(tokens, block):
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, 8), jnp.float32) for heads in (2, 1))
    run = lambda q, k, v: blockwise(q, k, v, rule=AttentionMask(causal=True), block=block).sum()  # noqa: E731
    return jax.jit(jax.grad(run, (0, 1, 2))).lower(q, k, k).compile()


def test_memory_is_linear_in_tokens_and_no_array_has_two_dims_of_them():
    small, large = (program(tokens, 32) for tokens in (2048, 4096))
    held = [each.memory_analysis().temp_size_in_bytes for each in (small, large)]
    assert held[1] / held[0] == pytest.approx(2, rel=0.03)
    module = parse(large.as_text())
    shapes = {array.dims for ops in module.computations.values() for op in ops for array in op.arrays}
    assert any(128 in dims for dims in shapes)
    assert not [dims for dims in shapes if sum(dim >= 4096 for dim in dims) > 1 or np.prod(dims) >= 4096**2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "masks",
    [
        pytest.param({"causal": True}, marks=pytest.mark.full),
        {"causal": True, "window": 9},
        pytest.param({"segments": True}, marks=pytest.mark.slow),
    ],
)
def test_long_rows_run_by_blocks_and_it_is_noted(masks, monkeypatch):
    *given, weight = arrays(np.random.default_rng(2), 40, 4, 2, np.float32)
    if "segments" in masks:
        masks["segments"] = jnp.arange(40)[None] // jnp.array([[7], [11]])
    run = partial(jp.attention, **masks)
    with islands.use_islands({}) as called:
        short = both(run, given, weight)
    assert called == {"attention"}
    monkeypatch.setattr(fused, "LONG", 32)
    with islands.use_islands({}) as called:
        long = both(run, given, weight)
    assert called == {"attention", islands.BLOCKS_NOTE}
    for got, want in zip(long, short, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.nightly
def test_queries_that_devices_share_do_not_run_by_blocks(monkeypatch):
    """A walk takes one pair of blocks after the other: every device would make all of them."""
    monkeypatch.setattr(fused, "LONG", 8)
    shape = jp.DecoderConfig(vocab=16, seq=16, layers=1, dim=8, heads=2, hidden=8)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    for sizes, forms in (({"data": 8}, (islands.BLOCKS_NOTE,)), ({"data": 2, "context": 4}, ())):
        layout = jp.compose(partial(jp.Decoder, shape), jp.Parallel(**sizes))
        step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1))
        step.lower(step.abstract(), {"inputs": tokens, "targets": tokens})
        assert step.compiler.implementations == forms


Q = jnp.zeros((2, 8, 4, 4))
BAD = {
    "a window of nothing": ({"window": 0}, "window=0.*\n.*at least 1"),
    "segments of another shape": ({"segments": jnp.zeros((2, 7), int)}, r"segments=int32\[2, 7\].*\n.*one for every"),
    "segments that are no numbers": ({"segments": jnp.zeros((2, 8))}, "segments=float32"),
    "segments that descend": ({"segments": jnp.array([[0] * 8, [0, 0, 2, 1, 1, 1, 1, 1]])}, "row 1 goes from 2 to 1"),
}


@pytest.mark.parametrize(("masks", "said"), BAD.values(), ids=BAD)
def test_masks_that_mean_nothing_are_refused(masks, said):
    with pytest.raises(JaxparError, match=said):
        jp.attention(Q, Q, Q, **masks)


def test_a_window_over_another_sequence_and_an_implementation_without_windows_are_refused():
    with pytest.raises(JaxparError, match="8 queries and 6 keys"):
        jp.attention(Q, Q[:, :6], Q[:, :6], window=3)
    with islands.use_islands({"attention": lambda q, k, v, *, causal: q}):
        with pytest.raises(JaxparError, match=re.escape("jp.attention(window=...), run by <lambda>")):
            jp.attention(Q, Q, Q, window=3)


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, pytest.param({"context": 8, "context_by": "ring"}, marks=pytest.mark.slow)])
def test_masks_are_not_kept_for_a_scan_over_layers(parallel):
    """What layers share is computed before their scan, and kept: of places alone the masks of all pairs of blocks."""
    decoder = jp.DecoderConfig(vocab=32, seq=16384, layers=2, dim=16, heads=2, hidden=32)
    devices = jax.devices()[: max(parallel.get("context", 1), 1)]
    layout = jp.compose(partial(jp.Decoder, decoder), jp.Parallel(**parallel), devices)
    step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1), remat="full")
    rows = jax.ShapeDtypeStruct((1, decoder.seq), jnp.int32)
    text = step.lower(step.abstract(), {"inputs": rows, "targets": rows}).as_text()
    masks = {math.prod(map(int, found.split("x")[:-1])) for found in re.findall(r"tensor<((?:\d+x)+i1)>", text)}
    assert max(masks) <= 2 * 512 * 512  # heads of one pair of blocks
