"""Reshapes gradients to matrices, and sends many small arrays as one vector.

A parameter of more than two dims becomes the most nearly square matrix whose rows are the leading dims and whose
columns are the other dims; in a stack, each layer is a matrix. For a sharded parameter, each shard is a matrix.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.mesh.collective import ShardShape

Arrays = dict[str, jax.Array]


class Matrix(NamedTuple):
    """The shape of a gradient as matrices, one per layer."""

    layers: int
    rows: int
    columns: int

    @property
    def rank(self) -> int:
        """The highest possible rank."""
        return min(self.rows, self.columns)


def matrix(part: ShardShape) -> Matrix | None:
    """Returns the shape of a parameter's shard as matrices; None for a vector.

    >>> matrix(ShardShape((512, 8, 64), "float32"))
    Matrix(layers=1, rows=512, columns=512)
    """
    layers, shape = (part.shape[0], part.shape[1:]) if part.layers else (1, part.shape)
    cuts = [(math.prod(shape[:dim]), math.prod(shape[dim:])) for dim in range(1, len(shape))]
    rows, columns = max(cuts, key=min, default=(1, 1))
    return Matrix(layers, rows, columns) if min(rows, columns) > 1 else None


def orthonormal(x: jax.Array) -> jax.Array:
    """Returns an orthonormal basis whose span contains the columns of x. Shape [..., rows, columns].

    It applies Gram-Schmidt twice to each column, which is as accurate as Householder's method in float32 (Giraud et al.
    2005). If earlier columns span a column, its residual is only rounding error, and a random column replaces it.
    """
    noise = jax.random.normal(jax.random.key(0), x.shape)
    tolerance = 1e-6 * jnp.linalg.norm(x, axis=(-2, -1))[..., None]

    def orthogonal(v: jax.Array, basis: jax.Array) -> jax.Array:
        for _ in range(2):
            v = v - jnp.einsum("...rk,...k->...r", basis, jnp.einsum("...rk,...r->...k", basis, v))
        return v

    def column(number: jax.Array, basis: jax.Array) -> jax.Array:
        residual, spare = (orthogonal(jax.lax.dynamic_index_in_dim(y, number, -1, False), basis) for y in (x, noise))
        length = jnp.linalg.norm(residual, axis=-1, keepdims=True)
        new = jnp.where(length > tolerance, residual, spare)
        new = orthogonal(new / jnp.linalg.norm(new, axis=-1, keepdims=True), basis)
        new = new / jnp.linalg.norm(new, axis=-1, keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(basis, new, number, -1)

    return jax.lax.fori_loop(0, x.shape[-1], column, jnp.zeros_like(x))


def as_one_vector(arrays: Arrays, collective: Callable[[jax.Array], jax.Array]) -> Arrays:
    """Applies a collective to several arrays as one vector.

    Args:
      arrays: Arrays by path.
      collective: Maps a vector [elements] to [..., elements].
    """
    received = collective(jnp.concatenate([x.reshape(-1) for x in arrays.values()]))
    result, offset = {}, 0
    for path, x in arrays.items():
        result[path] = received[..., offset : offset + x.size].reshape(*received.shape[:-1], *x.shape)
        offset += x.size
    return result


def to_matrices(arrays: Mapping[str, jax.Array], shapes: Mapping[str, Matrix]) -> Arrays:
    """Reshapes one replica's arrays [1, ...] to matrices [layers, rows, columns] in float32."""
    return {path: x.reshape(shapes[path]).astype(jnp.float32) for path, x in arrays.items()}
