"""The arrays that a decoder stores, and whether the shards of a layout divide them."""

from math import prod
from typing import Any

import numpy as np

from jaxpar.parallel.declaration import Parallel
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.model.shape import Shape

BYTES = 4  # of a parameter between steps
REPLICATED = Parallel().replicate_above  # largest bytes of a parameter that is replicated if shards do not divide it


def divides_arrays(shape: Shape, candidate: Candidate) -> Any:
    """Whether stages and shards of the training state divide a dim of each large parameter.

    The number of stages must divide the number of layers or the model dim. The number of shards (times `tensor`, on
    dims that it splits) must divide a dim other than the layers: JAX stores no unequal shards, and `compose` refuses to
    replicate large parameters.
    """
    stages = np.equal(shape.layers % candidate.pipe, 0) | np.equal(shape.dim % candidate.pipe, 0)
    # all large arrays divide; and at least one array does, or the axis is refused
    large_divide, any_divides = True, False
    for size, dims in _stored_arrays(shape):
        fits = [np.equal(dim % (candidate.shards * (candidate.tensor if flag else 1)), 0) for dim, flag in dims]
        divides = np.any(np.broadcast_arrays(*fits), axis=0)
        any_divides = any_divides | divides
        large_divide = large_divide & (divides | (size * BYTES <= REPLICATED))
    return stages & ((large_divide & any_divides) | np.equal(candidate.shards, 1))


def _stored_arrays(shape: Shape) -> tuple[tuple[int, tuple[tuple[int, bool], ...]], ...]:
    """Returns (parameters, dims) of each array of matrices; an array stacks all layers.

    A dim is (size, whether the tensor axis splits it). The dim of the layers is not listed.
    """
    size, kv_heads = shape.head_width, shape.kv_heads or shape.heads
    inner = (
        ((shape.dim, False), (shape.heads, True), (size, False)),
        ((shape.dim, False), (kv_heads, True), (size, False)),
    )
    arrays = *inner, ((shape.dim, False), (shape.width, True))
    ends = ((shape.dim, False), (shape.vocab, True))
    return *((shape.layers * prod(n for n, _ in dims), dims) for dims in arrays), (shape.vocab * shape.dim, ends)
