"""A matrix with a low-rank correction (LoRA), which may be stored in 8 bits; the model reads the sum as one array.

A materialized W + A B is as large as W, and so is its gradient. Hence the sum is a jitted call with a fixed name, which
a step finds in the traced model. If the sum is an operand of a matmul, the step replaces it by products with W, A and
B: see `jaxprs/low_rank_path.py`. Any other use, such as a lookup, reads the sum.

A frozen matrix in 8 bits is integers from -127 to 127, and a scale per output.

    W  [*inputs, *outputs]  ≈  values  [*inputs, *outputs]  int8   x   scales  [*outputs]  float32
    x @ W                   ≈  (x @ values) * scales

One scale per output commutes with the matmul, so no matrix of floats is stored: the matmul converts one layer's
integers at a time (bfloat16 represents them all exactly), and the backward pass does so again.

The rounding is LLM.int8's for weights (Dettmers et al. 2022, arXiv:2208.07339, section 2), without its outliers; a
frozen low-bit base with adapters is QLoRA's idea (Dettmers et al. 2023, arXiv:2305.14314), which uses 4 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.errors import refuse

INT8 = jnp.dtype(jnp.int8)
STEP = np.float32(1 / 127)  # of the largest entry; -128 has no opposite. XLA makes a division by 127 a product too
Index = tuple[slice, ...]
NAME = "low_rank_sum"


def quantize_matrix(matrix: jax.Array, *, lead: int, inputs: int) -> tuple[jax.Array, jax.Array]:
    """Quantizes a matrix to int8 values and scales; the largest entry of each output becomes 127 in magnitude.

    Args:
      matrix: Shape [*lead, *inputs, *outputs], floating point.
      lead: Number of dims of a stack.
      inputs: Number of dims that the matmul contracts.

    Returns:
      values: Integers of the same shape. Times the scales, an entry differs from the original by half a scale at most.
      scales: Shape [*lead, *outputs], float32; 1 where all entries of an output are zero.
    """
    floats, axes = matrix.astype(jnp.float32), tuple(range(lead, lead + inputs))
    largest = jnp.max(jnp.abs(floats), axis=axes, keepdims=True)
    scales = jnp.where(largest * STEP > 0, largest * STEP, 1.0)
    return jnp.round(floats / scales).astype(INT8), jnp.squeeze(scales, axes)


def dequantize(values: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Dequantizes int8 values [*inputs, *outputs] with scales [*outputs]."""
    return (values.astype(jnp.float32) * scales).astype(dtype)


def save_int8_residuals(run: Callable, x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """Computes `run(x, values, scales)`, linear in x, and saves only `values` and `scales` for the backward pass.

    JAX alone would save `values` converted to floats, which in a scan over layers is the whole unquantized base.
    """
    x_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    @jax.custom_vjp
    def frozen_matmul(x, values, scales):
        return run(x, values, scales)

    def forward(x, values, scales):
        return run(x, values, scales), (values, scales)

    def backward(residuals, gradient):
        (dx,) = jax.linear_transpose(lambda x: run(x, *residuals), x_shape)(gradient)
        return dx, None, None

    frozen_matmul.defvjp(forward, backward)
    return frozen_matmul(x, values, scales)


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix in files that is quantized when it is indexed, one layer of a stack at a time.

    Attributes:
      path: Name of the matrix, for messages.
      value: Array-like with `shape` that is indexed by slices. Shape [*lead, *inputs, *outputs].
      lead: Number of dims of a stack.
      inputs: Number of dims that the matmul contracts.
      scale_cache: Cache of computed scales, by layer and outputs.
    """

    path: str
    value: Any
    lead: int
    inputs: int
    scale_cache: dict[str, np.ndarray] = field(default_factory=dict)

    def int8_values(self, index: Index) -> np.ndarray:
        """Reads and quantizes a part of the matrix; returns its int8 values."""
        ranges = [range(*dim.indices(size)) for dim, size in zip(index, self.value.shape, strict=True)]
        result = np.empty([len(dim) for dim in ranges], np.int8)
        for position in product(*map(enumerate, ranges[: self.lead])):
            layer = tuple(slice(i, i + 1) for _, i in position)
            scales = self._scales(layer, index[self.lead + self.inputs :])
            values = np.asarray(self.value[(*layer, *index[self.lead :])], np.float32)
            result[tuple(slice(target, target + 1) for target, _ in position)] = np.rint(values / scales)
        return result

    def scales(self, index: Index) -> np.ndarray:
        """Computes a part of the scales, float32; `index` has the dims of the scales."""
        ranges = [range(*dim.indices(size)) for dim, size in zip(index, self.value.shape, strict=False)][: self.lead]
        layers = [tuple(slice(i, i + 1) for i in position) for position in product(*ranges)]
        axes = tuple(range(self.lead, self.lead + self.inputs))
        layer_scales = [np.squeeze(self._scales(layer, index[self.lead :]), axes) for layer in layers]
        outputs = layer_scales[0].shape[self.lead :]
        return np.stack(layer_scales).reshape(*map(len, ranges), *outputs)

    def _scales(self, layer: Index, outputs: Index) -> np.ndarray:
        """Computes the scales of some outputs of one layer; the dims of the stack and the inputs have size 1."""
        key = str((layer, outputs))
        if key not in self.scale_cache:
            values = np.asarray(self.value[(*layer, *(slice(None),) * self.inputs, *outputs)], np.float32)
            largest = np.abs(values).max(axis=tuple(range(self.lead, self.lead + self.inputs)), keepdims=True)
            if not np.isfinite(largest).all():
                raise refuse(
                    f"{self.path} has entries that are not finite",
                    rule="a matrix that is kept in 8 bits is finite: its largest entry is 127",
                    fix='adapters without base = "int8", or a checkpoint that is sound',
                )
            scales = largest * STEP
            self.scale_cache[key] = np.where(scales > 0, scales, np.float32(1))
        return self.scale_cache[key]


def low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array, lead: int = 0) -> jax.Array:
    """Computes W + A B; for a stack that the model reads before slicing it, the materialized sum of each layer.

    Args:
      base: W. Shape [*inputs, *outputs]; int8 with scales.
      first: A. Shape [*inputs, rank].
      second: B, scaled. Shape [rank, *outputs].
      *scales: If W is stored in 8 bits, one array of the scales of W's outputs. Shape [*outputs], float32.
      lead: Number of leading dims of a stack, which all arrays share.
    """
    add = _called if lead == 0 else _low_rank_sum
    for _ in range(lead):
        add = jax.vmap(add)
    return add(base, first, second, *scales)


def _low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array) -> jax.Array:
    base = dequantize(base, scales[0], second.dtype) if scales else base
    return base + jnp.tensordot(first, second, axes=1).astype(base.dtype)


_low_rank_sum.__name__ = NAME
_called = jax.jit(_low_rank_sum)
