"""`jax.image.resize` of sharded images: each device interpolates its own rows, in `jax.shard_map`.

Along each dim a resize is a matmul of a matrix [result rows, rows] with the image (for "nearest", a gather of rows).
XLA does not see that the matrix is banded, and would gather the image. Here each device has the band of its own result
rows, and receives from its neighbours the few rows outside of its piece on which they depend.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.image
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, get_abstract_mesh

from jaxpar.models.dim_names import SPATIAL, constrain_to, partial_spec
from jaxpar.parallel.image_pieces import Piece, Window, enough_rows
from jaxpar.parallel.manual_axes import automatic_axes, example_axes


@contextmanager
def split_resizes() -> Iterator[None]:
    """Splits what `jax.image.resize` resizes in a step that is traced in this context."""
    original = jax.image.resize

    def resize(image, shape, method, antialias=True, precision=lax.Precision.HIGHEST):
        image, shape = jnp.asarray(image), tuple(shape)
        changed = {dim for dim, rows in enumerate(shape) if rows != image.shape[dim]}
        found = {
            dim: _band(original, dim - first, axes, (image.shape[dim], shape[dim]), (method, antialias))
            for first, dim, axes in _split_dims(image.shape, shape)
            if dim in changed
        }
        whole: dict[int, tuple[str, ...] | None] = {dim: None for dim, band in found.items() if band is None}
        if whole:
            image = constrain_to(image, partial_spec(image.ndim, whole))
        bands = {dim: band for dim, band in found.items() if band is not None}
        if not bands:
            return original(image, shape, method, antialias, precision)
        nearest = _is_nearest(method)
        if not nearest and not jnp.issubdtype(image.dtype, jnp.inexact):
            image = image.astype(jnp.float32)
        for dim, band in bands.items():
            image = band.piece.fill_up(image, dim)

        def interpolate(image: jax.Array) -> jax.Array:
            for dim, band in bands.items():
                rows = band.piece.exchange(image, dim)
                image = band.take_nearest_rows(rows, dim) if nearest else band.interpolate_rows(rows, dim, precision)
            local = [shape[dim] if dim in changed - bands.keys() else rows for dim, rows in enumerate(image.shape)]
            return original(image, local, method, antialias, precision)

        batch = example_axes(image.shape[0])
        spec = PartitionSpec(
            batch or None, *(bands[dim].piece.axes if dim in bands else None for dim in range(1, image.ndim))
        )
        manual = {*batch, *(axis for band in bands.values() for axis in band.piece.axes)}
        result = jax.shard_map(interpolate, in_specs=spec, out_specs=spec, axis_names=manual, check_vma=False)(image)
        for dim, band in bands.items():
            result = lax.slice_in_dim(result, 0, band.piece.window.result, axis=dim)
        return result

    jax.image.resize = resize
    try:
        yield
    finally:
        jax.image.resize = original


@dataclass(frozen=True, slots=True)
class Band:
    """An interpolation matrix, divided among devices by rows of the result; only the columns that are not zero.

    Attributes:
      piece: The rows of the image that a device needs, its own and its neighbours': `count` of them.
      weights: Weights of these rows. Shape [devices, rows of a device's result, count]; zero beyond the result.
    """

    piece: Piece
    weights: np.ndarray

    def interpolate_rows(self, rows: jax.Array, dim: int, precision: jax.lax.PrecisionLike) -> jax.Array:
        """Returns weighted sums of the rows that a device has received; in `jax.shard_map`."""
        band = jnp.asarray(self.weights, rows.dtype)[lax.axis_index(self.piece.axes)]
        return jnp.moveaxis(jnp.tensordot(band, rows, (1, dim), precision=precision), 0, dim)

    def take_nearest_rows(self, rows: jax.Array, dim: int) -> jax.Array:
        """Returns the nearest of the rows that a device has received; in `jax.shard_map`."""
        nearest = jnp.asarray(self.weights.argmax(axis=2))[lax.axis_index(self.piece.axes)]
        return jnp.take(rows, nearest, axis=dim, mode="clip")


def split_band(weights: np.ndarray, name: str, axes: tuple[str, ...], ways: int) -> Band:
    """Divides the interpolation matrix of one dim among devices.

    Args:
      weights: The matrix. Shape [rows of the result, rows of the image].
      name: Name of the dim.
      axes: Mesh axes of the pieces.
      ways: Number of pieces.

    >>> twice = np.repeat(np.eye(8), 2, axis=0)
    >>> band = split_band(twice, "height", ("height",), 4)
    >>> band.piece.rows, band.piece.halo, band.weights.shape
    (2, (0, 0), (4, 4, 2))
    """
    result, size = weights.shape
    rows, results = -(-size // ways), -(-result // ways)
    filled = np.zeros((results * ways, size), weights.dtype)
    filled[:result] = weights
    parts = filled.reshape(ways, results, size)
    used = {device: np.flatnonzero(part.any(axis=0)) for device, part in enumerate(parts) if part.any()}
    reached = {device: (int(columns[0]), int(columns[-1]) + 1) for device, columns in used.items()}
    count = max(end - first for first, end in reached.values())
    # a device at a border needs fewer rows: its window begins at the same offset as all others if that covers them
    common = min(first - device * rows for device, (first, _) in reached.items())
    firsts = [
        min(max(device * rows + common, reached[device][1] - count), reached[device][0])
        if device in reached
        else device * rows + common
        for device in range(ways)
    ]
    columns = np.zeros((ways, results, count), weights.dtype)
    for device, (first, end) in reached.items():
        columns[device, :, first - firsts[device] : end - firsts[device]] = parts[device][:, first:end]
    window = Window(size=size, result=result, span=count, stride=1, low=0, base=1)
    offsets = tuple(first - device * rows for device, first in enumerate(firsts))
    return Band(Piece(window, name, axes, ways, rows, offsets, count, (0, 0)), columns)


def _split_dims(shape: tuple[int, ...], result: tuple[int, ...]) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """Yields (first spatial dim, dim, axes) of each dim that axes split.

    Images are [batch, ..., channels] or [batch, channels, ...].
    """
    if len(shape) < 4 or shape[0] != result[0] or get_abstract_mesh().empty:
        return
    first = 1 if shape[-1] == result[-1] else 2
    for dim, axes in enumerate(automatic_axes(*SPATIAL[: len(shape) - 2]), first):
        if axes:
            yield first, dim, axes


def _band(
    resize: Callable[..., jax.Array],
    spatial: int,
    axes: tuple[str, ...],
    sizes: tuple[int, int],
    settings: tuple[Any, bool],
) -> Band | None:
    """Returns the bands along a spatial dim, or None with a note if there are fewer rows than devices."""
    ways = math.prod(get_abstract_mesh().shape[axis] for axis in axes)
    if not enough_rows(*sizes, SPATIAL[spatial], ways):
        return None
    with ThreadPoolExecutor(1) as thread:  # without this thread's trace and mesh, whose devices may be absent
        weights = thread.submit(_matrix, resize, *sizes, *settings).result()
    return split_band(weights, SPATIAL[spatial], axes, ways)


def _matrix(
    resize: Callable[..., jax.Array], size: int, result: int, method: str | jax.image.ResizeMethod, antialias: bool
) -> np.ndarray:
    """Returns the matrix of a resize along one dim, by resizing the identity matrix. Shape [result, size]."""
    return np.asarray(resize(jnp.eye(size, dtype=jnp.float32), (result, size), method, antialias))


def _is_nearest(method: str | jax.image.ResizeMethod) -> bool:
    methods = jax.image.ResizeMethod
    return (methods.from_string(method) if isinstance(method, str) else method) == methods.NEAREST
