"""Parts of attention by cuDNN's kernel on a real GPU: their values and gradients in a band around float64.

A ring of one GPU is not one: what a ring of two makes of its late queries is run on one, with what would come from the
other. On two GPUs and more it is the ring itself.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.fused import CUDNN
from jaxpar.models.islands import use_islands
from jaxpar.parallel.techniques.ring_attention.attention import distributed_attention
from jaxpar.parallel.techniques.ring_attention.choice import BAND, relative_errors


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "shared"), [("bfloat16", 128, 4), ("bfloat16", 64, 1), ("float16", 128, 2)]
)
def test_parts_are_in_the_band(gpus, dtype, head_dim, shared, window):
    found = relative_errors(CUDNN, dtype, head_dim=head_dim, shared=shared, window=window)
    assert max(found.values()) <= BAND[dtype], found


def both(attention, q, k, v, grad):
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(grad)


@pytest.mark.parametrize("ulysses", [1, 0])
@pytest.mark.parametrize("causal", [True, False])
def test_pieces_have_the_values_and_gradients_of_float64(gpus, ulysses, causal):
    """Forms of pieces over all GPUs, with the kernel asked for, against plain JAX on the processor."""
    count = 2 ** (len(gpus).bit_length() - 1)
    mesh = jax.make_mesh((count,), ("context",), axis_types=(AxisType.Auto,), devices=gpus[:count])
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(2, 1024, heads, 128)), jnp.bfloat16) for heads in (8, 8, 8, 8)]
    with jax.set_mesh(mesh), use_islands({}) as called:
        run = partial(distributed_attention, causal=causal, ulysses=ulysses, kernel="cudnn")
        cut = NamedSharding(mesh, P(None, "context"))
        got = jax.jit(partial(both, run))(*jax.device_put(given, cut))
    assert [note for note in called if "run by cuDNN's kernel" in note]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in given]
        wanted = jax.jit(partial(both, partial(blockwise, rule=AttentionMask(causal))))(*wide)
    for x, y in zip(got, wanted, strict=True):
        found = np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y)) / np.linalg.norm(np.asarray(y))
        assert found <= BAND["bfloat16"]
