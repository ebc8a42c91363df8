"""Pieces of sequences that travel: rings, heads for tokens, and both, have the values and gradients of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairwise import some
from test_attention_in_blocks import arrays, both

from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.parallel.techniques.ring_attention import attention

MASKS = {  # causal, window, packed
    "causal": (True, None, False),
    "window": (True, 5, False),
    "packed": (True, None, True),
    "full": (False, None, False),
    "full window": (False, 5, True),
}
CASES = [  # devices, ulysses, heads, heads of keys, mask
    (2, 1, 4, 2, "packed"),
    (3, 1, 2, 1, "causal"),
    (4, 1, 4, 2, "window"),
    (4, 1, 2, 2, "full"),
    (4, 4, 4, 2, "causal"),
    (4, 2, 4, 4, "packed"),
    (4, 2, 4, 1, "full window"),
    (8, 1, 2, 1, "packed"),
    (8, 2, 4, 2, "causal"),
    (8, 4, 8, 2, "window"),
    (8, 8, 8, 8, "full"),
    (8, 1, 2, 2, "full window"),
]


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "ulysses", "heads", "groups", "mask"),
    some(
        CASES,
        [(4, 4, 4, 2, "causal")],
        [
            (3, 1, 2, 1, "causal"),
            (4, 1, 2, 2, "full"),
            (4, 2, 4, 4, "packed"),
            (8, 1, 2, 1, "packed"),
            (8, 2, 4, 2, "causal"),
        ],
    ),
)
def test_values_and_gradients_are_those_of_one_device_in_float64(devices, ulysses, heads, groups, mask, monkeypatch):
    monkeypatch.setattr(
        attention, "max_block_sizes", lambda *_: (2, 3)
    )  # several blocks of each chunk, some of them filled up
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    causal, window, packed = MASKS[mask]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True), jax.set_mesh(mesh):
        *given, weight = arrays(rng, 48, heads, groups)
        segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, 48)), axis=1)) if packed else None
        one = partial(blockwise, rule=AttentionMask(causal, window), segments_bs=segments)
        many = partial(
            attention.distributed_attention, causal=causal, window=window, segments=segments, ulysses=ulysses
        )
        wanted = both(one, given, weight)
        cut = NamedSharding(mesh, P(None, "context"))
        got = jax.jit(lambda *x: both(many, x[:3], x[3]))(*jax.device_put((*given, weight), cut))
        for x, y in zip(got, wanted, strict=True):
            assert x.dtype == jnp.float64
            np.testing.assert_allclose(x, y, atol=1e-12)
