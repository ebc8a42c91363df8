"""How codes travel: each replica is sent its piece of every gradient, and sends the mean of that to all.

Inside of `shard_map`, so that the wire carries the code and nothing else: XLA would sum gradients where they are
decoded. Shards of all parameters are one row for each replica, so that a step has two collectives for each array of a
code, however many parameters there are.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.exchange.between import AXIS, Between, in_pieces
from jaxpar.exchange.part import filled

Arrays = Mapping[str, jax.Array]


class Codec(Protocol):
    """What makes codes: see `Compressed`."""

    @property
    def block(self) -> int:
        """Elements that have a scale in common."""
        ...

    def encode(self, rows: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the code of rows of elements."""
        ...

    @property
    def common(self) -> bool:
        """Whether replicas draw the same random numbers."""
        ...

    def encode_mean(
        self, rows: jax.Array, key: jax.Array, replicas: int, came: dict[str, jax.Array] | None = None
    ) -> dict[str, jax.Array]:
        """Returns the code of a mean of the codes that came."""
        ...

    def without_filling(self, code: dict[str, jax.Array], counts: np.ndarray) -> dict[str, jax.Array]:
        """Returns the code of blocks that have so many elements, and zeros after them."""
        ...

    def decode(self, code: dict[str, jax.Array]) -> jax.Array:
        """Returns the elements that a code stands for."""
        ...


def exchanged(
    codec: Codec, local: Arrays, lost: Arrays, pieces: Arrays, dims: Mapping[str, int], between: Between, step
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns mean gradients, what each replica's codes lost, and what those of its piece of the mean did.

    Args:
      codec: What makes codes.
      local: Gradients [replica, ...] by path.
      lost: What was lost before, likewise; empty where it is not remembered.
      pieces: Of means [...], each replica with its piece; likewise.
      dims: The dim in which a parameter has pieces.
      between: Where gradients are.
      step: A number that no other step has.
    """
    if not local:
        return {}, {}, {}
    apart = {path: PartitionSpec(AXIS, *spec) for path, spec in between.specs.items()}
    in_part = {path: in_pieces(between.specs[path], dims[path], local[path].ndim - 1) for path in local}
    whole = dict(between.specs)

    def inside(local: Arrays, lost: Arrays, pieces: Arrays, step: jax.Array):
        # replicas draw apart, the devices of one alike: of a parameter that these hold whole all must decode the same
        key = jax.random.fold_in(jax.random.key(0), step)
        key = key if codec.common else jax.random.fold_in(key, jax.lax.axis_index(AXIS))
        first, second = jax.random.split(key)
        row = _Rows({path: x.shape[1:] for path, x in local.items()}, dims, between.replicas, codec.block)
        given = row.of({path: x[0] + lost[path][0] if lost else x[0] for path, x in local.items()})
        code = codec.without_filling(codec.encode(given, first), row.filled)
        missed = given - codec.decode(code) if lost else None  # what it has of zeros that fill is dropped
        came = {name: jax.lax.all_to_all(x, AXIS, 0, 0) for name, x in code.items()}
        mean = jnp.where(row.real, jnp.mean(codec.decode(came), axis=0, keepdims=True), 0)
        mean = mean + row.of_piece(pieces) if lost else mean
        code = codec.without_filling(codec.encode_mean(mean, second, between.replicas, came), row.filled)
        missing = mean - codec.decode(code) if lost else None
        every = {name: jax.lax.all_gather(x, AXIS, axis=0, tiled=True) for name, x in code.items()}
        found = row.apart(codec.decode(every))
        if missed is None or missing is None:
            return found, {}, {}
        return found, {path: x[None] for path, x in row.apart(missed).items()}, row.piece_apart(missing)

    kept = (apart, in_part) if lost else ({}, {})
    run = jax.shard_map(
        inside,
        mesh=between.mesh,
        in_specs=(apart, *kept, PartitionSpec()),
        out_specs=(whole, *kept),
        check_vma=False,
    )
    return run(dict(local), dict(lost), dict(pieces), step)


class _Rows:
    """Arrays of one device as rows, one for each replica: a row has that replica's piece of every array.

    Each piece begins a block, so that none has elements of two arrays: a scale that a whole array shared with the shard
    of another would differ between the devices of a replica.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, int], replicas: int, block: int):
        self.shapes, self.dims, self.replicas = shapes, dims, replicas
        self.counts = {path: math.prod(shape) // replicas for path, shape in shapes.items()}
        self.padded = {path: filled(count, block) for path, count in self.counts.items()}
        each = [np.arange(self.padded[path]) < count for path, count in self.counts.items()]
        self.real = np.concatenate(each)  # which elements of a row are of an array, and fill no block
        self.filled = np.maximum(self.real.reshape(-1, block).sum(axis=1), 1)  # such elements of each block

    def of(self, arrays: Arrays) -> jax.Array:
        """Returns arrays as rows. Shape [replicas, elements], float32."""
        return self._row({
            path: jnp.moveaxis(x.reshape(self._cut(path)), self.dims[path], 0).reshape(self.replicas, -1)
            for path, x in arrays.items()
        })  # fmt: skip

    def of_piece(self, arrays: Arrays) -> jax.Array:
        """Returns the pieces of one replica as its row. Shape [1, elements], float32."""
        return self._row({path: x.reshape(1, -1) for path, x in arrays.items()})

    def apart(self, rows: jax.Array) -> dict[str, jax.Array]:
        """Returns the arrays of rows."""
        found = {}
        for path, each in self._pieces(rows).items():
            dim, cut = self.dims[path], self._cut(path)
            piece = each.reshape(self.replicas, *cut[:dim], *cut[dim + 1 :])
            found[path] = jnp.moveaxis(piece, 0, dim).reshape(self.shapes[path])
        return found

    def piece_apart(self, row: jax.Array) -> dict[str, jax.Array]:
        """Returns the pieces of a replica's row."""
        found = {}
        for path, each in self._pieces(row).items():
            dim, cut = self.dims[path], self._cut(path)
            found[path] = each.reshape(*cut[:dim], *cut[dim + 1 :])
        return found

    def _pieces(self, rows: jax.Array) -> dict[str, jax.Array]:
        found, at = {}, 0
        for path, count in self.counts.items():
            found[path] = rows[:, at : at + count]
            at += self.padded[path]
        return found

    def _cut(self, path: str) -> tuple[int, ...]:
        """Returns a shape with the dim of pieces as two: replicas, and what each has."""
        shape, dim = self.shapes[path], self.dims[path]
        return (*shape[:dim], self.replicas, shape[dim] // self.replicas, *shape[dim + 1 :])

    def _row(self, pieces: Arrays) -> jax.Array:
        each = [
            jnp.pad(x.astype(jnp.float32), ((0, 0), (0, self.padded[path] - self.counts[path])))
            for path, x in pieces.items()
        ]
        return jnp.concatenate(each, axis=1)
