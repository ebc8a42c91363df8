"""Convolutions in the only form that XLA runs fast on CPUs inside a loop: images NHWC, kernels HWIO.

Gradients of a convolution are convolutions with other dimension numbers. In straight code XLA transposes their
operands; inside the body of a `lax.scan` or a branch of a `lax.switch` it runs them as they are, 14 times slower
(github.com/jax-ml/jax/issues/12868). So the operands are transposed here. The barrier keeps XLA from moving the
transpositions back into the dimension numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def run_canonical(bind: Callable[..., jax.Array], images: jax.Array, kernel: jax.Array, **params: Any) -> jax.Array:
    """Runs a convolution in the form that is fast in a loop; convolutions with groups are unchanged.

    Args:
      bind: The original convolution primitive.
      images: The images.
      kernel: The kernel.
      params: Parameters of the convolution.
    """
    dims, rank = params["dimension_numbers"], images.ndim
    canonical = canonical_numbers(rank)
    if dims == canonical or params["feature_group_count"] * params["batch_group_count"] > 1:
        return bind(images, kernel, **params)
    last_channels = lambda spec: (spec[0], *spec[2:], spec[1])  # noqa: E731
    images = jnp.transpose(images, last_channels(dims.lhs_spec))
    kernel = jnp.transpose(kernel, (*dims.rhs_spec[2:], dims.rhs_spec[1], dims.rhs_spec[0]))
    images, kernel = lax.optimization_barrier((images, kernel))
    result = bind(images, kernel, **{**params, "dimension_numbers": canonical})
    return jnp.transpose(result, [last_channels(dims.out_spec).index(dim) for dim in range(rank)])


def canonical_numbers(rank: int) -> lax.ConvDimensionNumbers:
    """Returns the dimension numbers of images [batch, ..., channels] and kernels [..., inputs, outputs]."""
    spatial = tuple(range(1, rank - 1))
    images = (0, rank - 1, *spatial)
    return lax.ConvDimensionNumbers(images, (rank - 1, rank - 2, *range(rank - 2)), images)
