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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from jax import lax
from jax.sharding import get_abstract_mesh

from jaxpar.models.dim_names import IMAGES, SPATIAL, constrain_to, partial_spec, record_use
from jaxpar.parallel.manual_axes import automatic_axes, merging_replicas

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
        (examples,), numbers = automatic_axes(IMAGES), params["dimension_numbers"]
        if examples and numbers.lhs_spec[0] < numbers.lhs_spec[1]:
            record_use(IMAGES)
            images = constrain_to(images, partial_spec(images.ndim, {numbers.lhs_spec[0]: examples}))
        pieces: dict[int, Piece] = {}
        if split := image_axes(params):
            from jaxpar.parallel.split_windows import cut_images

            images, pieces = cut_images(images, kernel, params, split)
        grouped = not get_abstract_mesh().empty and is_grouped(images.shape, kernel.shape, params)
        if _is_mapped(images) or _is_mapped(kernel):
            with merging_replicas():  # the convolution that the `vmap` makes of this one is bound in here
                return bind(images, kernel, **params)
        if not pieces and not grouped:
            return bind(images, kernel, **params)
        from jaxpar.parallel.split_windows import run_split

        return run_split(bind, images, kernel, params, pieces, grouped=grouped)

    CONVOLUTION.bind = run
    try:
        with _other_operations():
            yield
    finally:
        del CONVOLUTION.bind


def _other_operations() -> AbstractContextManager[None]:
    """Splits pools with the images, and gathers the examples of dense layers that a rule splits otherwise."""
    examples, *spatial = automatic_axes(IMAGES, *SPATIAL)
    if not examples and not any(spatial):
        return nullcontext()
    from jaxpar.parallel.split_windows import split_other_operations  # no part of a step that splits no images

    return split_other_operations(examples=bool(examples))


def image_axes(params: Any) -> dict[int, tuple[str, ...]]:
    """Returns the mesh axes that the traced step gives the spatial dims of a convolution, counted from 0.

    None for the gradient of a kernel, where batch and features have changed places: its result has the kernel's dims.
    """
    mesh, lhs = get_abstract_mesh(), params["dimension_numbers"].lhs_spec
    if mesh.empty or lhs[0] > lhs[1]:
        return {}
    axes = dict(enumerate(automatic_axes(*SPATIAL[: len(lhs) - 2])))
    return {dim: names for dim, names in axes.items() if math.prod(mesh.shape[axis] for axis in names) > 1}


# Grouped convolutions.


def _is_mapped(array: Any) -> bool:
    """Whether a `vmap` maps an array, as that of replicas does."""
    while hasattr(array, "primal"):  # differentiated
        array = array.primal
    return hasattr(array, "batch_dim")


def is_grouped(images: tuple[int, ...], kernel: tuple[int, ...], params: Any) -> bool:
    """Whether a convolution has groups of several channels, which XLA does not split."""
    dims, count = params["dimension_numbers"], params["feature_group_count"]
    return count > 1 and not count == images[dims.lhs_spec[1]] == kernel[dims.rhs_spec[0]]
