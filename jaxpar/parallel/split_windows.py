"""Convolutions and pools that each device computes on its pieces of the images, in `jax.shard_map`.

Gradients of a convolution are convolutions with other dimension numbers. In straight code XLA transposes their
operands; inside the body of a `lax.scan` or a branch of a `lax.switch` it runs them as they are, 14 times slower
(github.com/jax-ml/jax/issues/12868). So the operands are transposed here to the only form that XLA runs fast on CPUs:
images NHWC, kernels HWIO. The barrier keeps XLA from moving the transpositions back into the dimension numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec, get_abstract_mesh
from jax.typing import DTypeLike

from jaxpar.models.dim_names import IMAGES, SPATIAL, constrain_to, partial_spec, record_use
from jaxpar.parallel.image_pieces import Piece, Window, find_piece, split_by_window
from jaxpar.parallel.manual_axes import automatic_axes, example_axes, group_axes, merging_replicas
from jaxpar.parallel.split_resizes import split_resizes


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


def convolve(
    bind: Callable[..., jax.Array], images: jax.Array, kernel: jax.Array, params: Mapping[str, Any], *, processors: bool
) -> jax.Array:
    """Runs a convolution of a step over the mesh axes that split its examples, its groups of channels, or its images.

    Args:
      bind: The original convolution primitive.
      images: The images.
      kernel: The kernel.
      params: Parameters of the convolution.
      processors: Whether the devices are processors.
    """
    if processors:
        bind = partial(run_canonical, bind)
    (examples,), numbers = automatic_axes(IMAGES), params["dimension_numbers"]
    if examples and numbers.lhs_spec[0] < numbers.lhs_spec[1]:
        record_use(IMAGES)
        images = constrain_to(images, partial_spec(images.ndim, {numbers.lhs_spec[0]: examples}))
    pieces: dict[int, Piece] = {}
    if split := image_axes(params):
        images, pieces = cut_images(images, kernel, params, split)
    grouped = not get_abstract_mesh().empty and (
        is_grouped(images.shape, kernel.shape, params) or _has_wrong_gradient(images.shape, params)
    )
    if _is_mapped(images) or _is_mapped(kernel):
        with merging_replicas():  # the convolution that the `vmap` makes of this one is bound in here
            return bind(images, kernel, **params)
    if not pieces and not grouped:
        return bind(images, kernel, **params)
    return run_split(bind, images, kernel, params, pieces, grouped=grouped)


def image_axes(params: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    """Returns the mesh axes that the traced step gives the spatial dims of a convolution, counted from 0.

    None for the gradient of a kernel, where batch and features have changed places: its result has the kernel's dims.
    """
    mesh, lhs = get_abstract_mesh(), params["dimension_numbers"].lhs_spec
    if mesh.empty or lhs[0] > lhs[1]:
        return {}
    axes = dict(enumerate(automatic_axes(*SPATIAL[: len(lhs) - 2])))
    return {dim: names for dim, names in axes.items() if math.prod(mesh.shape[axis] for axis in names) > 1}


def _is_mapped(array: Any) -> bool:
    """Whether a `vmap` maps an array, as that of replicas does."""
    while hasattr(array, "primal"):  # differentiated
        array = array.primal
    return hasattr(array, "batch_dim")


def is_grouped(images: tuple[int, ...], kernel: tuple[int, ...], params: Mapping[str, Any]) -> bool:
    """Whether a convolution has groups of several channels, which XLA does not split."""
    dims, count = params["dimension_numbers"], params["feature_group_count"]
    return count > 1 and not count == images[dims.lhs_spec[1]] == kernel[dims.rhs_spec[0]]


def _has_wrong_gradient(images: tuple[int, ...], params: Mapping[str, Any]) -> bool:
    """Whether XLA would compute a wrong gradient of a depthwise kernel.

    If some axes split the examples and the images are replicated over others (`data 2 x tensor 4`), XLA (jaxlib 0.10
    to 0.12) sums the gradient over all axes: here it is 4 times too large (tests/hlo/test_xla_faults.py).
    """
    mesh = get_abstract_mesh()
    examples = example_axes(images[params["dimension_numbers"].lhs_spec[0]])
    others = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in (*mesh.manual_axes, *examples)]
    return params["feature_group_count"] > 1 and bool(examples and others)


def cut_images(
    images: jax.Array, kernel: jax.Array, params: Mapping[str, Any], split: Mapping[int, tuple[str, ...]]
) -> tuple[jax.Array, dict[int, Piece]]:
    """Returns the images of a convolution, and their pieces by dim; constrains all other spatial dims to be unsplit.

    Otherwise XLA would split the convolution along them if its operands happen to be split.
    """
    shapes, numbers = (images.shape, kernel.shape), params["dimension_numbers"]
    pieces = {dim: piece for dim, axes in split.items() if (piece := find_piece(dim, axes, *shapes, params))}
    whole: dict[int, tuple[str, ...] | None] = {numbers.lhs_spec[2 + dim]: None for dim in split if dim not in pieces}
    return constrain_to(images, partial_spec(images.ndim, whole)) if whole else images, pieces


def run_split(
    bind: Callable[..., jax.Array],
    images: jax.Array,
    kernel: jax.Array,
    params: Mapping[str, Any],
    pieces: Mapping[int, Piece],
    *,
    grouped: bool,
) -> jax.Array:
    """Runs a convolution in `jax.shard_map`: each device has its examples, its groups and its pieces of the images.

    Args:
      bind: The original convolution primitive.
      images: The images.
      kernel: The kernel.
      params: Parameters of the convolution.
      pieces: The pieces of the images by spatial dim, counted from 0.
      grouped: Whether it has groups that XLA does not split.
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
    if dtype.itemsize < 4:  # its gradient is summed in float32: in 16 bits XLA ends the process on CPUs (JAX 0.12)
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


# Pooling. XLA splits its windows by itself, but (as of JAX 0.12) the gradient of max pooling is wrong if the windows
# overlap and have stride 1, as in GoogLeNet: by 3e-4 on `height 8`.


@contextmanager
def split_other_operations(*, examples: bool) -> Iterator[None]:
    """Splits pooling (sums, maxima, minima over windows) and resizes in a step that is traced in this context.

    Args:
      examples: Whether a rule splits the examples of convolutions over other axes than those of dense layers.
    """
    kinds = {lax.reduce_window_sum_p: "sum", lax.reduce_window_max_p: "max", lax.reduce_window_min_p: "min"}
    with ExitStack() as stack:
        for primitive, kind in kinds.items():
            stack.enter_context(_split_pooling(primitive, kind))
        stack.enter_context(split_resizes())
        if examples:
            stack.enter_context(_gather_dense_inputs())
        yield


@contextmanager
def _gather_dense_inputs() -> Iterator[None]:
    """Gathers the examples of dense layers over the axes that split those of convolutions alone."""
    bind = lax.dot_general_p.bind

    def run(inputs, kernel, **params):
        if inputs.ndim == kernel.ndim == 2 and params["dimension_numbers"][0] == ((1,), (0,)):
            (batch,) = automatic_axes("batch")
            inputs = constrain_to(inputs, PartitionSpec(batch or None, PartitionSpec.UNCONSTRAINED))
        return bind(inputs, kernel, **params)

    lax.dot_general_p.bind = run
    try:
        yield
    finally:
        del lax.dot_general_p.bind


@contextmanager
def _split_pooling(primitive: Primitive, kind: str) -> Iterator[None]:
    bind = primitive.bind

    def run(images, **params):
        split = _pooling_axes(images.shape, params) if images.dtype != bool else {}
        found = {dim: _pooling_piece(dim, axes, images.shape, params) for dim, axes in split.items()}
        pieces = {dim: piece for dim, piece in found.items() if piece}
        whole: dict[int, tuple[str, ...] | None] = {dim: None for dim in split if dim not in pieces}
        if whole:
            images = constrain_to(images, partial_spec(images.ndim, whole))
        if not pieces:
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


def _neutral(kind: str, dtype: DTypeLike) -> float:
    """Returns the identity element of a sum, a maximum or a minimum."""
    if kind == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return -math.inf if kind == "max" else math.inf
    return int(jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max)


def _pooling_axes(shape: tuple[int, ...], params: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    """Returns the mesh axes of the dims, counted from 0, that windows reduce and axes split.

    Images are [batch, ..., channels] or [batch, channels, ...].
    """
    sizes, mesh = params["window_dimensions"], get_abstract_mesh()
    if len(shape) < 3 or sizes[0] > 1 or mesh.empty:
        return {}
    first = _first_spatial(params)
    axes = dict(enumerate(automatic_axes(*SPATIAL[: len(shape) - 2]), first))
    return {
        dim: names
        for dim, names in axes.items()
        if sizes[dim] > 1 and params["base_dilation"][dim] == 1 and math.prod(mesh.shape[axis] for axis in names) > 1
    }


def _first_spatial(params: Mapping[str, Any]) -> int:
    return 1 if params["window_dimensions"][-1] == 1 else 2


def _pooling_piece(dim: int, axes: tuple[str, ...], shape: tuple[int, ...], params: Mapping[str, Any]) -> Piece | None:
    (low, high), stride = params["padding"][dim], params["window_strides"][dim]
    span = (params["window_dimensions"][dim] - 1) * params["window_dilation"][dim] + 1
    result = (shape[dim] + low + high - span) // stride + 1
    window = Window(size=shape[dim], result=result, span=span, stride=stride, low=low, base=1)
    return split_by_window(window, dim - _first_spatial(params), axes)
