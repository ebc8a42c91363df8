"""cuDNN's fused attention as two calls, forward and backward, with the kernel's own float32 statistics.

    forward     q, k, v                                    ──►  y, logsumexp of each query over the given keys
    backward    q, k, v, y, logsumexp, gradient of y       ──►  gradients of q, k and v

`jax.nn.dot_product_attention` runs the same two calls, but exposes neither: its logsumexp is rounded to the dtype of
`q` and has no gradient. If queries attend to parts of the keys in turn, the second call gets the *final* logsumexp and
output, and returns the gradients' terms for its part of the keys (FlashAttention, arXiv:2205.14135, appendix). These
terms add up to the gradients, so one custom backward pass has to contain all parts.

Targets, operands and settings are those that JAX itself uses (`jax/_src/cudnn`, the same text in 0.10.2 to 0.12); a
test compares both lowered programs. XLA cannot partition the calls, so use them inside `jax.shard_map`.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, k head_dim.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.models.settings import computing

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
_VERSION = 2  # of XLA's custom-call interface under which these targets are registered
_AS_BSHK = (0, 2, 1, 3)  # XLA's name for the result is [b, h, s, k]; it lies in memory as [b, s, h, k]


class FusedKernel(NamedTuple):
    """A fused attention kernel, as a forward and a backward call on one device's arrays.

    Attributes:
      forward: Takes q [b, s, h, k], k and v [b, t, g, k], and the keywords causal (then s = t) and window. Returns the
        output [b, s, h, k], and the logsumexp of the unmasked scores of each query [b, h, s], in float32.
      backward: Takes q, k, v, the output, logsumexp and gradient of the output, and the same keywords. Returns the
        gradients of q, k and v, in their shapes.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Runs cuDNN's attention; returns the output and the logsumexp, see `FusedKernel`."""
    b, s, h, size = q.shape
    results = (
        jax.ShapeDtypeStruct((b, h, s, size), q.dtype),
        jax.ShapeDtypeStruct((b, h, s), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),  # the workspace, whose size XLA asks cuDNN for
    )
    call = _ffi_call(FORWARD, results, (_AS_BSHK, None, None), _settings(q, k, causal, window, _FORWARD_MATMULS))
    out, logsumexp, _ = call(q, k, v)
    return out.transpose(_AS_BSHK), logsumexp


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    grad: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs cuDNN's backward pass; returns the gradients of q, k and v, see `FusedKernel`."""
    results = [jax.ShapeDtypeStruct([x.shape[i] for i in _AS_BSHK], x.dtype) for x in (q, k, v)]
    results.append(jax.ShapeDtypeStruct((0,), jnp.uint8))
    settings = _settings(q, k, causal, window, _BACKWARD_MATMULS)
    *grads, _ = _ffi_call(BACKWARD, tuple(results), (*[_AS_BSHK] * 3, None), settings)(q, k, v, logsumexp, grad, out)
    dq, dk, dv = (x.transpose(_AS_BSHK) for x in grads)
    return dq, dk, dv


CUDNN = FusedKernel(forward, backward)
_override: ContextVar[FusedKernel | None] = ContextVar("override", default=None)


def kernel_override() -> FusedKernel | None:
    """Returns the kernel that replaces cuDNN's in this context, or None."""
    return _override.get()


@contextmanager
def override_kernel(kernel: FusedKernel) -> Iterator[None]:
    """Context in which `kernel` replaces cuDNN's kernel for 16-bit attention over parts of the keys.

    Used for programs compiled for absent GPUs, and for tests of code that combines the parts.
    """
    token = _override.set(kernel)
    try:
        yield
    finally:
        _override.reset(token)


def merge(sums: tuple[jax.Array, jax.Array], update: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merges (output, logsumexp) over two sets of keys: the float32 running sums, and the result of one call."""
    (out, running), (update_out, logsumexp) = sums, update
    total = jnp.logaddexp(running, logsumexp)
    weights = (jnp.exp(term - total).swapaxes(1, 2)[..., None] for term in (running, logsumexp))
    return out * next(weights) + update_out.astype(out.dtype) * next(weights), total


def _ffi_call(target: str, result_shapes, layouts, settings: str) -> Callable:
    return jax.ffi.ffi_call(
        target,
        result_shapes,
        vmap_method="sequential",
        output_layouts=layouts,
        custom_call_api_version=_VERSION,
        legacy_backend_config=settings,
    )


# contracting dims and batch dims, as XLA states them, of arrays [b, s, h, k] and scores [b, h, s, t]
_FORWARD_MATMULS = {"bmm1": ((3, 3), (0, 2), (0, 2)), "bmm2": ((3, 1), (0, 1), (0, 2))}
_BACKWARD_MATMULS = {
    "bmm1_grad_gemm1": ((2, 1), (0, 1), (0, 2)),
    "bmm1_grad_gemm2": ((3, 1), (0, 1), (0, 2)),
    "bmm2_grad_gemm1": ((2, 1), (0, 1), (0, 2)),
    "bmm2_grad_gemm2": ((3, 3), (0, 2), (0, 2)),
}
_TYPES = {"bfloat16": "BF16", "float16": "F16"}


def _settings(q: jax.Array, k: jax.Array, causal: bool, window: int | None, matmuls: dict) -> str:
    """Builds the backend config of a call: XLA's message `GpuBackendConfig` as JSON."""
    b, s, h, size = q.shape
    scores = {
        "element_type": _TYPES[str(q.dtype)],
        "dimensions": [str(n) for n in (b, h, s, k.shape[1])],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": 1 / math.sqrt(size),
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        **{f"{name}_dot_dimension_numbers": _dot_dimensions(*dims) for name, dims in matmuls.items()},
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window or 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})


def _dot_dimensions(over: tuple[int, int], left: tuple[int, int], right: tuple[int, int]) -> dict:
    return {
        "lhs_contracting_dimensions": [str(over[0])],
        "rhs_contracting_dimensions": [str(over[1])],
        "lhs_batch_dimensions": [str(i) for i in left],
        "rhs_batch_dimensions": [str(i) for i in right],
    }


# Chooses attention on one device: blockwise above LONG keys, unless a fused kernel runs it.
#
#                       up to LONG keys       more
# cuDNN supports it     cuDNN's kernel        cuDNN's kernel    (stores no scores; on GPUs, in 16 bits, without
# segments) cuDNN does not        jax.nn's matmuls      blockwise
#
# Head sizes must fit cuDNN's kernel too: a multiple of 8, at most 256 from Hopper on and 128 before it, as in JAX's own
# check.
#
# jax.nn's matmuls store the scores of a layer: at LONG keys 256 MiB per head and sequence in float32. Below LONG they
# are faster than a loop over blocks: one large matmul instead of many small ones.

LONG = 8192


def fits_cudnn(q: jax.Array, *, causal: bool, window: int | None = None, segments: jax.Array | None = None) -> bool:
    """Whether cuDNN's kernel runs attention here: GPUs, 16 bits, a head size it supports, no segments, and a window
    only if causal.
    """
    return wants_cudnn(q) and head_fits(q.shape[-1]) and segments is None and (window is None or causal)


def wants_cudnn(q: jax.Array) -> bool:
    """Whether queries are on GPUs and in the 16 bits that cuDNN's kernel computes in."""
    return str(q.dtype) in computing.DTYPES and jax.default_backend() == "gpu"


def head_fits(head_dim: int) -> bool:
    """Whether cuDNN's kernel supports this head size on the local GPUs."""
    return computing.head_fits(head_dim, capability())


def capability() -> float:
    """Compute capability of the local GPUs; Hopper's if the devices have none (absent or simulated GPUs)."""
    return float(getattr(jax.local_devices()[0], "compute_capability", computing.HOPPER))


def runs_blockwise(k: jax.Array, *, fused: bool) -> bool:
    """Whether attention to this number of keys runs block by block instead of materializing all scores."""
    return k.shape[1] > LONG and not fused
