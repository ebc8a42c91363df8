"""Sends codes in two phases: each replica receives its piece of every gradient, then sends the mean of it to all.

It runs inside `shard_map`, so that only codes are sent: otherwise XLA would sum the decoded gradients. The pieces of
all parameters for one replica are concatenated into one row, so a step has two collectives per array of the code, for
any number of parameters.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.exchange.replica_mesh import AXIS, ReplicaMesh, piece_spec
from jaxpar.mesh.collective import round_up

Arrays = Mapping[str, jax.Array]


class Codec(Protocol):
    """The protocol of an encoder and decoder: see `Compressed`."""

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        ...

    def encode(self, rows: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        """Encodes rows of elements."""
        ...

    @property
    def shared_key(self) -> bool:
        """Whether all replicas draw the same random numbers."""
        ...

    def encode_mean(
        self, rows: jax.Array, key: jax.Array, replicas: int, codes: dict[str, jax.Array] | None = None
    ) -> dict[str, jax.Array]:
        """Encodes the mean over replicas; see `Compressed.encode_mean`."""
        ...

    def without_padding(self, code: dict[str, jax.Array], counts: np.ndarray) -> dict[str, jax.Array]:
        """Removes the effect of padding at the ends of blocks from a code."""
        ...

    def decode(self, code: dict[str, jax.Array]) -> jax.Array:
        """Decodes a code to elements."""
        ...


def exchange_codes(
    codec: Codec, local: Arrays, lost: Arrays, pieces: Arrays, dims: Mapping[str, int], between: ReplicaMesh, step
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Averages gradients by two exchanges of codes.

    Returns the mean gradients, the errors of the codes of replicas' gradients, and the errors of the codes of means.

    Args:
      codec: The encoder and decoder.
      local: Gradients [replica, ...] by path.
      lost: Errors of the replicas' codes in the last step, likewise; empty without feedback.
      pieces: Errors of the codes of means [...], split into the replicas' pieces; empty without feedback.
      dims: For each parameter, the dim along which it is divided into the replicas' pieces.
      between: The mesh and the specs of the gradients.
      step: A number that is unique to the step.
    """
    if not local:
        return {}, {}, {}
    replica_specs = {path: PartitionSpec(AXIS, *spec) for path, spec in between.specs.items()}
    piece_specs = {path: piece_spec(between.specs[path], dims[path], local[path].ndim - 1) for path in local}
    specs = dict(between.specs)

    def inside(local: Arrays, lost: Arrays, pieces: Arrays, step: jax.Array):
        # replicas draw different numbers, the devices of one the same: they must decode equal copies of a parameter
        key = jax.random.fold_in(jax.random.key(0), step)
        key = key if codec.shared_key else jax.random.fold_in(key, jax.lax.axis_index(AXIS))
        encode_key, mean_key = jax.random.split(key)
        row = _Rows({path: x.shape[1:] for path, x in local.items()}, dims, between.replicas, codec.block)
        rows = row.to_rows({path: x[0] + lost[path][0] if lost else x[0] for path, x in local.items()})
        code = codec.without_padding(codec.encode(rows, encode_key), row.filled)
        row_error = rows - codec.decode(code) if lost else None  # the padding's error is dropped
        received = {name: jax.lax.all_to_all(x, AXIS, 0, 0) for name, x in code.items()}
        mean = jnp.where(row.real, jnp.mean(codec.decode(received), axis=0, keepdims=True), 0)
        mean = mean + row.piece_to_row(pieces) if lost else mean
        code = codec.without_padding(codec.encode_mean(mean, mean_key, between.replicas, received), row.filled)
        mean_error = mean - codec.decode(code) if lost else None
        gathered = {name: jax.lax.all_gather(x, AXIS, axis=0, tiled=True) for name, x in code.items()}
        means = row.from_rows(codec.decode(gathered))
        if row_error is None or mean_error is None:
            return means, {}, {}
        return means, {path: x[None] for path, x in row.from_rows(row_error).items()}, row.row_to_piece(mean_error)

    error_specs = (replica_specs, piece_specs) if lost else ({}, {})
    program = jax.shard_map(
        inside,
        mesh=between.mesh,
        in_specs=(replica_specs, *error_specs, PartitionSpec()),
        out_specs=(specs, *error_specs),
        check_vma=False,
    )
    return program(dict(local), dict(lost), dict(pieces), step)


class _Rows:
    """Converts the arrays of one device to rows, one per replica: row r has replica r's piece of every array.

    Each piece begins a new block, so no block has elements of two arrays. Otherwise an unsharded array could share a
    scale with a shard of another array, and this scale would differ between the devices of a replica.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, int], replicas: int, block: int):
        self.shapes, self.dims, self.replicas = shapes, dims, replicas
        self.counts = {path: math.prod(shape) // replicas for path, shape in shapes.items()}
        self.padded = {path: round_up(count, block) for path, count in self.counts.items()}
        masks = [np.arange(self.padded[path]) < count for path, count in self.counts.items()]
        self.real = np.concatenate(masks)  # mask of the elements of a row that are no padding
        self.filled = np.maximum(self.real.reshape(-1, block).sum(axis=1), 1)  # without padding, per block

    def to_rows(self, arrays: Arrays) -> jax.Array:
        """Concatenates the pieces of arrays into rows. Shape [replicas, elements], float32."""
        return self._concatenate({
            path: jnp.moveaxis(x.reshape(self._split_shape(path)), self.dims[path], 0).reshape(self.replicas, -1)
            for path, x in arrays.items()
        })  # fmt: skip

    def piece_to_row(self, arrays: Arrays) -> jax.Array:
        """Concatenates the pieces of one replica into its row. Shape [1, elements], float32."""
        return self._concatenate({path: x.reshape(1, -1) for path, x in arrays.items()})

    def from_rows(self, rows: jax.Array) -> dict[str, jax.Array]:
        """Converts rows to arrays."""
        arrays = {}
        for path, pieces in self._split_row(rows).items():
            dim, shape = self.dims[path], self._split_shape(path)
            moved = pieces.reshape(self.replicas, *shape[:dim], *shape[dim + 1 :])
            arrays[path] = jnp.moveaxis(moved, 0, dim).reshape(self.shapes[path])
        return arrays

    def row_to_piece(self, row: jax.Array) -> dict[str, jax.Array]:
        """Splits a replica's row into the pieces of arrays."""
        pieces = {}
        for path, piece in self._split_row(row).items():
            dim, shape = self.dims[path], self._split_shape(path)
            pieces[path] = piece.reshape(*shape[:dim], *shape[dim + 1 :])
        return pieces

    def _split_row(self, rows: jax.Array) -> dict[str, jax.Array]:
        pieces, offset = {}, 0
        for path, count in self.counts.items():
            pieces[path] = rows[:, offset : offset + count]
            offset += self.padded[path]
        return pieces

    def _split_shape(self, path: str) -> tuple[int, ...]:
        """Returns an array's shape with the divided dim as two dims: replicas, and the size of a piece."""
        shape, dim = self.shapes[path], self.dims[path]
        return (*shape[:dim], self.replicas, shape[dim] // self.replicas, *shape[dim + 1 :])

    def _concatenate(self, pieces: Arrays) -> jax.Array:
        columns = [
            jnp.pad(x.astype(jnp.float32), ((0, 0), (0, self.padded[path] - self.counts[path])))
            for path, x in pieces.items()
        ]
        return jnp.concatenate(columns, axis=1)
