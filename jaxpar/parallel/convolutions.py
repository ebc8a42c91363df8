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
  patches of an unshared convolution) and their gradients it runs unsharded, whatever constraints say. The gradient of
  a depthwise kernel is wrong where images are whole on an axis: see `_has_wrong_gradient` in `split_windows.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from jax import lax

from jaxpar.models.dim_names import IMAGES, SPATIAL
from jaxpar.parallel.manual_axes import automatic_axes

CONVOLUTION: Any = lax.conv_general_dilated_p


@contextmanager
def split_convolutions(*, processors: bool) -> Iterator[None]:
    """Splits convolutions over the mesh of a step that is traced in this context.

    Args:
      processors: Whether the devices are CPUs.
    """
    if "bind" in vars(CONVOLUTION):
        yield
        return
    bind = CONVOLUTION.bind

    def run(images, kernel, **params):
        from jaxpar.parallel.split_windows import convolve  # no part of a step without convolutions

        return convolve(bind, images, kernel, params, processors=processors)

    CONVOLUTION.bind = run
    try:
        with _split_pools_and_dense_layers():
            yield
    finally:
        del CONVOLUTION.bind


def _split_pools_and_dense_layers() -> AbstractContextManager[None]:
    """Splits pools with the images, and gathers the examples of dense layers that a rule splits otherwise."""
    examples, *spatial = automatic_axes(IMAGES, *SPATIAL)
    if not examples and not any(spatial):
        return nullcontext()
    from jaxpar.parallel.split_windows import split_other_operations  # no part of a step that splits no images

    return split_other_operations(examples=bool(examples))
