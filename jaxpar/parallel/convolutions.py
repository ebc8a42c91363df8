"""Convolutions and pooling of a traced step, over axes that XLA splits wrongly or not at all. No model is edited.

    examples of images       over axes of their own, by a rule for `images`: dense layers then gather them
    images in pieces         each device convolves its own rows, after an exchange with its neighbours
    grouped convolutions     each device convolves its own examples, and over `tensor` its own groups

As in `jaxpar.sharding.author.explicit`, the primitive is replaced while a step is traced: its forward and backward
passes call this one.

* XLA splits the spatial dims of a convolution by itself, but (as of JAX 0.12) its values are wrong on meshes where
  other axes lie around that of the rows, as on `data 2 x height 2 x tensor 2` (tests/hlo/test_xla_faults.py). So a
  piece is convolved in `jax.shard_map`, and the rows that it needs of its neighbours (its halo) arrive by `ppermute`:
  zeros beyond the borders of the image, as in padding. Backward, gradients of these rows go back to their owner.
* XLA splits a grouped convolution only if each channel is a group with one output channel. Others (ResNeXt's; the
  patches of an unshared convolution) and their gradients it runs unsharded, whatever constraints say.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.sharding import PartitionSpec, get_abstract_mesh

from jaxpar.models.dim_names import IMAGES, SPATIAL, axes_of, constrain_to, partial_spec, record_use, spec_of
from jaxpar.parallel.manual_axes import example_axes

if TYPE_CHECKING:
    from jaxpar.parallel.image_pieces import Piece

CONVOLUTION: Any = lax.conv_general_dilated_p


@contextmanager
def split_convolutions() -> Iterator[None]:
    """Splits convolutions over the mesh of a step that is traced in this context."""
    if "bind" in vars(CONVOLUTION):
        yield
        return
    bind = CONVOLUTION.bind

    def run(images, kernel, **params):
        examples, numbers = _examples(), params["dimension_numbers"]
        if examples and numbers.lhs_spec[0] < numbers.lhs_spec[1]:
            record_use(IMAGES)
            images = constrain_to(images, partial_spec(images.ndim, {numbers.lhs_spec[0]: examples}))
        pieces: dict[int, Piece] = {}
        if split := image_axes(params):
            from jaxpar.parallel.image_pieces import cut_images

            images, pieces = cut_images(images, kernel, params, split)
        grouped = not get_abstract_mesh().empty and is_grouped(images.shape, kernel.shape, params)
        groups = group_axes(params["feature_group_count"]) if grouped else ()
        batch = example_axes(images.shape[numbers.lhs_spec[0]]) if grouped or pieces else ()
        if not pieces and not batch and not groups:
            return bind(images, kernel, **params)
        return _run_split(bind, images, kernel, params, pieces, batch, groups)

    CONVOLUTION.bind = run
    try:
        with _other_operations():
            yield
    finally:
        del CONVOLUTION.bind


def _examples() -> tuple[str, ...]:
    """Returns the axes that a rule gives the examples of convolutions; none leave them with those of other layers."""
    manual = get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes_of((spec_of((IMAGES,)) or (None,))[0]) if axis not in manual)


def _other_operations() -> AbstractContextManager[None]:
    """Splits pools with the images, and gathers the examples of dense layers that a rule splits otherwise."""
    if not _examples() and not any(axes_of(entry) for entry in spec_of(SPATIAL) or ()):
        return nullcontext()
    from jaxpar.parallel.image_pieces import split_other_operations  # no part of a step that splits no images

    return split_other_operations(examples=bool(_examples()))


def _run_split(
    bind: Any,
    images: jax.Array,
    kernel: jax.Array,
    params: Any,
    pieces: "Mapping[int, Piece]",
    batch: tuple[str, ...],
    groups: tuple[str, ...],
) -> jax.Array:
    """Convolves on every device its examples, its groups of channels and its pieces of the images."""
    dims, ways = params["dimension_numbers"], math.prod(get_abstract_mesh().shape[axis] for axis in groups)
    padding = list(params["padding"])
    for dim, piece in pieces.items():
        images = piece.fill_up(images, dims.lhs_spec[2 + dim])
        padding[dim] = piece.padding
    local = {**params, "feature_group_count": params["feature_group_count"] // ways, "padding": tuple(padding)}

    def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
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


def image_axes(params: Any) -> dict[int, tuple[str, ...]]:
    """Returns the mesh axes that the traced step gives the spatial dims of a convolution, counted from 0.

    None for the gradient of a kernel, where batch and features have changed places: its result has the kernel's dims.
    """
    mesh, lhs = get_abstract_mesh(), params["dimension_numbers"].lhs_spec
    spec = spec_of(SPATIAL[: len(lhs) - 2])
    if spec is None or mesh.empty or lhs[0] > lhs[1]:
        return {}
    axes = {
        dim: tuple(axis for axis in axes_of(entry) if axis not in mesh.manual_axes) for dim, entry in enumerate(spec)
    }
    return {dim: names for dim, names in axes.items() if math.prod(mesh.shape[axis] for axis in names) > 1}


# Grouped convolutions.


def is_grouped(images: tuple[int, ...], kernel: tuple[int, ...], params: Any) -> bool:
    """Whether a convolution has groups of several channels, which XLA does not split."""
    dims, count = params["dimension_numbers"], params["feature_group_count"]
    return count > 1 and not count == images[dims.lhs_spec[1]] == kernel[dims.rhs_spec[0]]


def group_axes(groups: int) -> tuple[str, ...]:
    """Returns the axes that split so many groups of channels in `jax.shard_map`."""
    mesh = get_abstract_mesh()
    ways = mesh.shape.get("tensor", 1)
    return ("tensor",) if ways > 1 and "tensor" not in mesh.manual_axes and groups % ways == 0 else ()


def _spec(dims: tuple[int, ...], axes: tuple[tuple[str, ...], ...]) -> PartitionSpec:
    """Spec of an array whose leading dims, in the order of the dimension numbers, are split over these axes."""
    on = dict(zip(dims, axes, strict=False))
    return PartitionSpec(*(on.get(dim) or None for dim in range(len(dims))))
