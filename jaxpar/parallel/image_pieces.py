"""The pieces of an image: the rows that each device convolves, and those that it receives of others (its halo)."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, get_abstract_mesh

from jaxpar.models.dim_names import SPATIAL, axes_of, constrain_to, partial_spec, record_use, spec_of
from jaxpar.models.islands import note
from jaxpar.parallel.manual_axes import example_axes, group_axes
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
        added = _rows_of(fill, images, dim, self.rows * self.ways - images.shape[dim])
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

        def received(rows: jax.Array, hop: int) -> jax.Array:
            """Sends rows to the device `hop` further; zeros arrive where no device is before it."""
            senders = range(max(0, -hop), self.ways - max(0, hop))
            rows = lax.ppermute(rows, self.axes, [(sender, sender + hop) for sender in senders])
            inside = (device >= hop) & (device < self.ways + hop)
            return rows if fill == 0 else jnp.where(inside, rows, jnp.asarray(fill, rows.dtype))

        with jax.named_scope(HALO + self.name):
            for hop in range(1, self.ways):  # a halo of more rows than a piece also comes from beyond the neighbours
                if (missing := min(self.rows, before - (hop - 1) * self.rows)) > 0:
                    last = lax.slice_in_dim(images, self.rows - missing, self.rows, axis=dim)
                    parts.insert(0, received(last, hop))
                if (missing := min(self.rows, after - (hop - 1) * self.rows)) > 0:
                    first = lax.slice_in_dim(images, 0, missing, axis=dim)
                    parts.append(received(first, -hop))
        beyond = [_rows_of(fill, images, dim, max(0, rows - reach)) for rows in (before, after)]
        parts = [part for part in (beyond[0], *parts, beyond[1]) if part.shape[dim]]
        rows = lax.concatenate(parts, dim) if len(parts) > 1 else images
        starts = [before + offset for offset in self.offsets]
        if len({*starts}) == 1:
            return lax.slice_in_dim(rows, starts[0], starts[0] + self.count, axis=dim)
        return lax.dynamic_slice_in_dim(rows, jnp.asarray(starts)[device], self.count, axis=dim)


def cut_images(
    images: jax.Array, kernel: jax.Array, params: Any, split: Mapping[int, tuple[str, ...]]
) -> tuple[jax.Array, dict[int, Piece]]:
    """Returns the images of a convolution, and their pieces by dim; dims that stay whole are constrained to be so.

    Otherwise XLA would split the convolution along them as its operands are split.
    """
    shapes, numbers = (images.shape, kernel.shape), params["dimension_numbers"]
    pieces = {dim: piece for dim, axes in split.items() if (piece := piece_of(dim, axes, *shapes, params))}
    whole: dict[int, tuple[str, ...] | None] = {numbers.lhs_spec[2 + dim]: None for dim in split if dim not in pieces}
    return constrain_to(images, partial_spec(images.ndim, whole)) if whole else images, pieces


def piece_of(
    dim: int, axes: tuple[str, ...], images: tuple[int, ...], kernel: tuple[int, ...], params: Any
) -> Piece | None:
    """Returns the pieces along a dim, or None with a note if there are fewer rows than devices."""
    return _piece_of_window(window_of(dim, images, kernel, params), dim, axes)


def _piece_of_window(window: Window, dim: int, axes: tuple[str, ...]) -> Piece | None:
    ways = math.prod(get_abstract_mesh().shape[axis] for axis in axes)
    if min(window.result, window.size) < ways:
        note(
            f"windows from {window.size} to {window.result} rows of {SPATIAL[dim]} run whole on each of {ways} "
            "devices: there are fewer rows than devices"
        )
        return None
    record_use(SPATIAL[dim])
    return split_window(window, SPATIAL[dim], axes, ways)


def window_of(dim: int, images: tuple[int, ...], kernel: tuple[int, ...], params: Any) -> Window:
    """Returns the window along a spatial dim, counted from 0."""
    dims, (low, high) = params["dimension_numbers"], params["padding"][dim]
    size, stride, base = images[dims.lhs_spec[2 + dim]], params["window_strides"][dim], params["lhs_dilation"][dim]
    span = (kernel[dims.rhs_spec[2 + dim]] - 1) * params["rhs_dilation"][dim] + 1
    result = ((size - 1) * base + 1 + low + high - span) // stride + 1
    return Window(size=size, result=result, span=span, stride=stride, low=low, base=base)


def split_window(window: Window, name: str, axes: tuple[str, ...], ways: int) -> Piece:
    """Returns one device's piece of an image under a window, on so many devices.

    >>> piece = split_window(Window(size=32, result=32, span=3, stride=1, low=1, base=1), "height", ("height",), 4)
    >>> piece.rows, piece.halo, piece.count
    (8, (1, 1), 10)
    """
    rows, results = -(-window.size // ways), -(-window.result // ways)
    results += -results * window.stride % window.base  # so that all devices begin at one phase of a dilated image
    firsts = [device * results * window.stride - window.low for device in range(ways)]
    phase = firsts[0] % window.base
    count = ((results - 1) * window.stride + window.span - 1 + phase) // window.base + 1
    end = (results - 1) * window.stride + window.span - (count - 1) * window.base - 1 + phase
    offsets = tuple(first // window.base - device * rows for device, first in enumerate(firsts))
    return Piece(window, name, axes, ways, rows, offsets, count, (-phase, end))


def _rows_of(fill: float, images: jax.Array, dim: int, rows: int) -> jax.Array:
    return jnp.full((*images.shape[:dim], rows, *images.shape[dim + 1 :]), fill, images.dtype)


def run_split(
    bind: Any,
    images: jax.Array,
    kernel: jax.Array,
    params: Any,
    pieces: Mapping[int, Piece],
    *,
    grouped: bool,
) -> jax.Array:
    """Convolves on every device its examples, its groups of channels and its pieces of the images.

    Args:
      bind: The convolution itself.
      images: The images.
      kernel: The kernel.
      params: Parameters of the convolution.
      pieces: The pieces of the images by spatial dim, counted from 0.
      grouped: Whether XLA does not split its groups.
    """
    dims, count = params["dimension_numbers"], params["feature_group_count"]
    groups = group_axes(count) if grouped else ()
    batch = example_axes(images.shape[dims.lhs_spec[0]], groups=groups)
    if not pieces and not batch and not groups:
        return bind(images, kernel, **params)
    ways = math.prod(get_abstract_mesh().shape[axis] for axis in groups)
    padding = list(params["padding"])
    for dim, piece in pieces.items():
        images = piece.fill_up(images, dims.lhs_spec[2 + dim])
        padding[dim] = piece.padding
    local = {**params, "feature_group_count": params["feature_group_count"] // ways, "padding": tuple(padding)}

    dtype = kernel.dtype
    if (
        dtype.itemsize < 4
    ):  # gradients are summed in float32: a sum in 16 bits ends the process on CPUs (as of JAX 0.12)
        kernel = kernel.astype(jnp.float32)

    def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
        kernel = kernel.astype(dtype)
        for dim, piece in pieces.items():
            images = piece.exchange(images, dims.lhs_spec[2 + dim])
        return bind(images, kernel, **local)

    spatial = tuple(pieces[dim].axes if dim in pieces else () for dim in range(images.ndim - 2))
    result = jax.shard_map(
        convolve,
        in_specs=(_spec(dims.lhs_spec, (batch, groups, *spatial)), _spec(dims.rhs_spec, (groups,))),
        out_specs=_spec(dims.out_spec, (batch, groups, *spatial)),
        axis_names={*batch, *groups, *(axis for axes in spatial for axis in axes)},
        check_vma=False,
    )(images, kernel)
    for dim, piece in pieces.items():
        result = lax.slice_in_dim(result, 0, piece.window.result, axis=dims.out_spec[2 + dim])
    return result


def _spec(dims: tuple[int, ...], axes: tuple[tuple[str, ...], ...]) -> PartitionSpec:
    """Spec of an array whose leading dims, in the order of the dimension numbers, are split over these axes."""
    on = dict(zip(dims, axes, strict=False))
    return PartitionSpec(*(on.get(dim) or None for dim in range(len(dims))))


# Pooling. XLA splits its windows by itself, but (as of JAX 0.12) the gradient of a maximum is wrong where windows
# overlap and their stride is 1, as in GoogLeNet: 3e-4 off on `height 8`.


@contextmanager
def split_other_operations(*, examples: bool) -> Iterator[None]:
    """Splits the windows of sums, maxima and minima in a step that is traced in this context.

    Args:
      examples: Whether a rule splits the examples of convolutions otherwise than those of dense layers.
    """
    kinds = {lax.reduce_window_sum_p: "sum", lax.reduce_window_max_p: "max", lax.reduce_window_min_p: "min"}
    with ExitStack() as stack:
        for primitive, kind in kinds.items():
            stack.enter_context(_replaced(primitive, kind))
        if examples:
            stack.enter_context(_matmuls_of_whole_batches())
        yield


@contextmanager
def _matmuls_of_whole_batches() -> Iterator[None]:
    """Gathers the examples of dense layers over the axes that split those of convolutions alone."""
    bind = lax.dot_general_p.bind

    def run(inputs, kernel, **params):
        if inputs.ndim == kernel.ndim == 2 and params["dimension_numbers"][0] == ((1,), (0,)):
            manual = get_abstract_mesh().manual_axes
            axes = tuple(axis for axis in axes_of((spec_of(("batch",)) or (None,))[0]) if axis not in manual)
            inputs = constrain_to(inputs, PartitionSpec(axes or None, PartitionSpec.UNCONSTRAINED))
        return bind(inputs, kernel, **params)

    lax.dot_general_p.bind = run
    try:
        yield
    finally:
        del lax.dot_general_p.bind


@contextmanager
def _replaced(primitive: Any, kind: str) -> Iterator[None]:
    bind = primitive.bind

    def run(images, **params):
        pieces = _pooled_pieces(images.shape, params)
        if not pieces or images.dtype == bool:
            return bind(images, **params)
        fill, padding = _neutral(kind, images.dtype), list(params["padding"])
        for dim, piece in pieces.items():
            images, padding[dim] = piece.fill_up(images, dim, fill), piece.padding

        def pool(images: jax.Array) -> jax.Array:
            for dim, piece in pieces.items():
                images = piece.exchange(images, dim, fill)
            return bind(images, **{**params, "padding": tuple(padding)})

        batch = example_axes(images.shape[0])
        spec = PartitionSpec(
            batch or None, *(pieces[dim].axes if dim in pieces else None for dim in range(1, images.ndim))
        )
        axes = {*batch, *(axis for piece in pieces.values() for axis in piece.axes)}
        result = jax.shard_map(pool, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)(images)
        for dim, piece in pieces.items():
            result = lax.slice_in_dim(result, 0, piece.window.result, axis=dim)
        return result

    primitive.bind = run
    try:
        yield
    finally:
        del primitive.bind


def _neutral(kind: str, dtype: Any) -> float:
    """Returns the value of which a sum, a maximum or a minimum takes no notice."""
    if kind == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return -math.inf if kind == "max" else math.inf
    return int(jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max)


def _pooled_pieces(shape: tuple[int, ...], params: Any) -> dict[int, Piece]:
    """Returns the pieces of the dims, counted from 0, that windows reduce and axes split.

    Images are [batch, ..., channels] or [batch, channels, ...].
    """
    sizes, mesh = params["window_dimensions"], get_abstract_mesh()
    if len(shape) < 3 or sizes[0] > 1 or mesh.empty:
        return {}
    first = 1 if sizes[-1] == 1 else 2
    pieces = {}
    for place, entry in enumerate(spec_of(SPATIAL[: len(shape) - 2]) or ()):
        dim, axes = first + place, tuple(axis for axis in axes_of(entry) if axis not in mesh.manual_axes)
        if sizes[dim] == 1 or params["base_dilation"][dim] > 1 or math.prod(mesh.shape[axis] for axis in axes) == 1:
            continue
        (low, high), stride = params["padding"][dim], params["window_strides"][dim]
        span = (sizes[dim] - 1) * params["window_dilation"][dim] + 1
        result = (shape[dim] + low + high - span) // stride + 1
        window = Window(size=shape[dim], result=result, span=span, stride=stride, low=low, base=1)
        if piece := _piece_of_window(window, place, axes):
            pieces[dim] = piece
    return pieces
