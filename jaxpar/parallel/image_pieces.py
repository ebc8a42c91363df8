"""The pieces of an image: the rows that each device convolves, and its halo, which neighbours send."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import get_abstract_mesh

from jaxpar.models.dim_names import SPATIAL, record_use
from jaxpar.models.islands import note
from jaxpar.sharding.names import HALO


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a convolution along one dim, in the words of `lax.conv_general_dilated`.

    Attributes:
      size: Rows of the image.
      result: Rows of the result.
      span: Rows of the kernel, with those that its dilation adds.
      stride: Rows from one window to the next.
      low: Rows of padding before the image.
      base: Dilation of the image: above 1 in a transposed convolution.
    """

    size: int
    result: int
    span: int
    stride: int
    low: int
    base: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One device's piece of an image along one dim.

    Device i convolves `count` rows from row `i * rows + offsets[i]` of the image. With s the stride, b the dilation of
    the image and r the rows of a device's result, these begin at floor((i r s - low) / b).

    Attributes:
      window: The window of the whole convolution.
      name: Name of the dim.
      axes: Mesh axes of the pieces.
      ways: Number of pieces.
      rows: Rows of a piece; the last pieces are filled up with zeros.
      offsets: Per device, the first row that it convolves, counted from its own first row.
      count: Number of rows that a device convolves.
      padding: Padding of a device's convolution along this dim, before and after.
    """

    window: Window
    name: str
    axes: tuple[str, ...]
    ways: int
    rows: int
    offsets: tuple[int, ...]
    count: int
    padding: tuple[int, int]

    @property
    def halo(self) -> tuple[int, int]:
        """Rows that a device receives of the one before it, and of the one after it."""
        return max(0, -min(self.offsets)), max(0, max(self.offsets) + self.count - self.rows)

    def fill_up(self, images: jax.Array, dim: int, fill: float = 0) -> jax.Array:
        """Returns whole images with rows of `fill` at the end, so that all pieces have the same rows."""
        added = _fill_rows(fill, images, dim, self.rows * self.ways - images.shape[dim])
        return lax.concatenate([images, added], dim) if added.shape[dim] else images

    def exchange(self, images: jax.Array, dim: int, fill: float = 0) -> jax.Array:
        """Returns the rows that a device needs, of its own and its neighbours'; in `jax.shard_map`.

        Args:
          images: The device's piece.
          dim: Index of the dim.
          fill: Value of the rows beyond the image's borders.
        """
        before, after = self.halo
        reach = (self.ways - 1) * self.rows  # beyond it are rows of `fill` alone
        device, parts = lax.axis_index(self.axes), [images]

        def send_rows(rows: jax.Array, hop: int) -> jax.Array:
            """Sends rows to the device `hop` further; zeros arrive where no device is before it."""
            senders = range(max(0, -hop), self.ways - max(0, hop))
            rows = lax.ppermute(rows, self.axes, [(sender, sender + hop) for sender in senders])
            inside = (device >= hop) & (device < self.ways + hop)
            return rows if fill == 0 else jnp.where(inside, rows, jnp.asarray(fill, rows.dtype))

        with jax.named_scope(HALO + self.name):
            for hop in range(1, self.ways):  # a halo of more rows than a piece also comes from beyond the neighbours
                if (missing := min(self.rows, before - (hop - 1) * self.rows)) > 0:
                    last = lax.slice_in_dim(images, self.rows - missing, self.rows, axis=dim)
                    parts.insert(0, send_rows(last, hop))
                if (missing := min(self.rows, after - (hop - 1) * self.rows)) > 0:
                    first = lax.slice_in_dim(images, 0, missing, axis=dim)
                    parts.append(send_rows(first, -hop))
        beyond = [_fill_rows(fill, images, dim, max(0, rows - reach)) for rows in (before, after)]
        parts = [part for part in (beyond[0], *parts, beyond[1]) if part.shape[dim]]
        rows = lax.concatenate(parts, dim) if len(parts) > 1 else images
        starts = [before + offset for offset in self.offsets]
        if len({*starts}) == 1:
            return lax.slice_in_dim(rows, starts[0], starts[0] + self.count, axis=dim)
        return lax.dynamic_slice_in_dim(rows, jnp.asarray(starts)[device], self.count, axis=dim)


def find_piece(
    dim: int, axes: tuple[str, ...], images: tuple[int, ...], kernel: tuple[int, ...], params: Mapping[str, object]
) -> Piece | None:
    """Returns the pieces along a dim; None, after a note to the user, if there are fewer rows than devices."""
    return split_by_window(find_window(dim, images, kernel, params), dim, axes)


def split_by_window(window: Window, dim: int, axes: tuple[str, ...]) -> Piece | None:
    """Returns the pieces under a window along a dim, as `find_piece`."""
    ways = math.prod(get_abstract_mesh().shape[axis] for axis in axes)
    if not enough_rows(window.size, window.result, SPATIAL[dim], ways):
        return None
    return split_window(window, SPATIAL[dim], axes, ways)


def enough_rows(size: int, result: int, name: str, ways: int) -> bool:
    """Whether each device has rows of a dim, of the image and of the result; a note if not."""
    if min(result, size) < ways:
        note(
            f"windows from {size} to {result} rows of {name} run whole on each of {ways} devices: "
            "there are fewer rows than devices"
        )
        return False
    record_use(name)
    return True


def find_window(dim: int, images: tuple[int, ...], kernel: tuple[int, ...], params: Mapping[str, Any]) -> Window:
    """Returns the window along a spatial dim, counted from 0."""
    dims, (low, high) = params["dimension_numbers"], params["padding"][dim]
    size, stride, base = images[dims.lhs_spec[2 + dim]], params["window_strides"][dim], params["lhs_dilation"][dim]
    span = (kernel[dims.rhs_spec[2 + dim]] - 1) * params["rhs_dilation"][dim] + 1
    result = ((size - 1) * base + 1 + low + high - span) // stride + 1
    return Window(size=size, result=result, span=span, stride=stride, low=low, base=base)


def split_window(window: Window, name: str, axes: tuple[str, ...], ways: int) -> Piece:
    """Divides an image among devices, for a convolution with this window.

    >>> piece = split_window(Window(size=32, result=32, span=3, stride=1, low=1, base=1), "height", ("height",), 4)
    >>> piece.rows, piece.halo, piece.count
    (8, (1, 1), 10)
    """
    rows, results = -(-window.size // ways), -(-window.result // ways)
    results += -results * window.stride % window.base  # so that every device begins at the same phase of the dilation
    firsts = [device * results * window.stride - window.low for device in range(ways)]
    phase = firsts[0] % window.base
    count = ((results - 1) * window.stride + window.span - 1 + phase) // window.base + 1
    end = (results - 1) * window.stride + window.span - (count - 1) * window.base - 1 + phase
    offsets = tuple(first // window.base - device * rows for device, first in enumerate(firsts))
    return Piece(window, name, axes, ways, rows, offsets, count, (-phase, end))


def _fill_rows(fill: float, images: jax.Array, dim: int, rows: int) -> jax.Array:
    return jnp.full((*images.shape[:dim], rows, *images.shape[dim + 1 :]), fill, images.dtype)
