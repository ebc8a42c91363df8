"""Grouped convolutions, each device computing its own examples.

    conv(x, kernel, groups)    by XLA: every device gathers the whole batch, and convolves all of it
                               here: each convolves its own examples, and over `tensor` its own groups

XLA (as of JAX 0.11) splits a grouped convolution only if each channel is a group with one output channel. Others
(ResNeXt's; the patches of an unshared convolution) and their gradients it runs unsharded, whatever constraints say. So
these run in `jax.shard_map`, over all axes that split their batch or divide their groups. No model is edited: as in
`jaxpar.sharding.author.explicit`, the primitive is replaced while a step is traced.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec, get_abstract_mesh

from jaxpar.mesh.axes import batch_axes

CONVOLUTION: Any = lax.conv_general_dilated_p


@contextmanager
def split_convolutions() -> Iterator[None]:
    """Splits grouped convolutions over the mesh of a step that is traced in this context."""
    if "bind" in vars(CONVOLUTION):
        yield
        return
    bind = CONVOLUTION.bind

    def run(images, kernel, **params):
        batch, groups = _axes(images.shape, kernel.shape, params)
        if not batch and not groups:
            return bind(images, kernel, **params)
        dims = params["dimension_numbers"]
        ways = math.prod(get_abstract_mesh().shape[axis] for axis in groups)
        local_params = {**params, "feature_group_count": params["feature_group_count"] // ways}
        return jax.shard_map(
            lambda images, kernel: bind(images, kernel, **local_params),
            in_specs=(_spec(dims.lhs_spec, (batch, groups)), _spec(dims.rhs_spec, (groups,))),
            out_specs=_spec(dims.out_spec, (batch, groups)),
            axis_names={*batch, *groups},
            check_vma=False,
        )(images, kernel)

    CONVOLUTION.bind = run
    try:
        yield
    finally:
        del CONVOLUTION.bind


def _axes(images: tuple[int, ...], kernel: tuple[int, ...], params: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes that split the batch, and those that split the groups; none leave the convolution to XLA."""
    dims, count, mesh = params["dimension_numbers"], params["feature_group_count"], get_abstract_mesh()
    depthwise = count == images[dims.lhs_spec[1]] == kernel[dims.rhs_spec[0]]
    if count == 1 or depthwise or mesh.empty:
        return (), ()
    ways = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes}
    batch = tuple(axis for axis in batch_axes(ways) if axis in ways)
    if images[dims.lhs_spec[0]] % math.prod(ways[axis] for axis in batch):
        batch = ()
    return batch, ("tensor",) if "tensor" in ways and count % ways["tensor"] == 0 else ()


def _spec(dims: tuple[int, ...], axes: tuple[tuple[str, ...], ...]) -> PartitionSpec:
    """Spec of an array whose leading dims, in the order of the dimension numbers, are split over these axes."""
    on = dict(zip(dims, axes, strict=False))
    return PartitionSpec(*(on.get(dim) or None for dim in range(len(dims))))
