"""Attention for programs that are compiled and never run: an empty kernel with the operands of cuDNN's kernel.

On a GPU a step in bfloat16 calls cuDNN, which does not store scores. Without a GPU there is no cuDNN, and XLA would
compile another program, with scores in memory. An empty kernel with the same operands and results replaces cuDNN's, so
that buffers, fusions and the order of all other instructions are those of the program that runs on GPUs:

    forward     q, k, v                      ->  y, one float32 number for each query and head
    backward    q, k, v, those numbers, y, gradient of y   ->  gradients of q, k and v

On several devices each device runs the empty kernel on its own examples and heads, as with cuDNN's kernel, because XLA
cannot partition a custom kernel and would gather its operands. The empty kernel has neither cuDNN's workspace nor its
time, so both are missing in `timeline`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.dim_names import get_spec
from jaxpar.models.islands import KEYS, QUERIES

NAME = "stand_in_attention"
_TARGET = "__gpu$xla.gpu.triton"  # XLA itself compiles it, without a library that may be missing
_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Returns an array of the shape and dtype of `q`; an implementation of the island `attention`.

    Args:
      q: Shape [batch, seq, heads, head_dim].
      k: Shape [batch, seq, kv_heads, head_dim].
      v: Shape of `k`.
      causal: Ignored, because no score is computed.
    """
    cut = get_spec(QUERIES), get_spec(KEYS), get_spec(KEYS)
    entries = [entry for spec in cut for entry in spec or () if entry]
    axes = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
    if not axes:
        return _attention(q, k, v)
    each = jax.shard_map(_attention, in_specs=cut, out_specs=cut[0], axis_names=axes, check_vma=False)
    return each(q, k, v)


@jax.custom_vjp
def _attention(q, k, v):
    return _forward(q, k, v)[0]


def _forward(q, k, v):
    batch, seq, heads, _ = q.shape
    numbers = jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32)
    y, sums = _empty_kernel("forward", (q, k, v), (_like(q), numbers))
    return y, (q, k, v, sums, y)


def _backward(kept, gradient):
    q, k, v, *_ = kept
    return tuple(_empty_kernel("backward", (*kept, gradient), (_like(q), _like(k), _like(v))))


_attention.defvjp(_forward, _backward)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _empty_kernel(way: str, given: Sequence[Any], made: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """Returns the results of an empty kernel: XLA allocates them, but nothing computes them."""
    pointers = ", ".join(f"%a{i}: !tt.ptr<{_TYPES[str(x.dtype)]}>" for i, x in enumerate((*given, *made)))
    one = np.int32(1)
    return jax.ffi.ffi_call(_TARGET, tuple(made))(
        *given, name=f"{NAME}_{way}", ir=f"module {{ tt.func public @{NAME}_{way}({pointers}) {{ tt.return }} }}",
        num_stages=one, num_warps=one, grid_x=one, grid_y=one, grid_z=one, debug=False,
    )  # fmt: skip
