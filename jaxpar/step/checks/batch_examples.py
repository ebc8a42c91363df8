"""Refuses batches whose arrays have no examples, a number of them that does not divide, or several numbers.

Several numbers are refused where a step takes slices:

    nodes [96, 5] of 16 graphs  ─► slices of 48 nodes
    labels [16]                 ─► slices of 8 graphs, to which other nodes may belong

A whole batch may have such arrays: wherever their shards lie, XLA computes the numbers of one device.
"""

from collections.abc import Mapping

import jax
import numpy as np

from jaxpar.errors import JaxparError, refuse
from jaxpar.parallel.layout import Layout


def examples_error(
    name: str, value: jax.Array | np.ndarray | jax.ShapeDtypeStruct, layout: Layout, accumulate: int
) -> JaxparError:
    """Makes the error for an array whose first dim is missing, or does not divide into replicas and microbatches."""
    if not value.shape:
        return refuse(
            f"{name} in the batch is one {value.dtype}",
            rule="dim 0 of every array of a batch is its examples",
            fix=f"np.full(examples, {name}), and in the loss batch[{name!r}][0]; or a constant of the loss",
        )
    factors = {axis: layout.sizes[axis] for axis in layout.parallel.batch_axes}
    factors |= {"accumulate": accumulate, "microbatches": layout.microbatches}
    shown = " x ".join(f"{axis}={size}" for axis, size in factors.items() if size > 1) or "one device"
    rows, ways = value.shape[0], layout.replicas * accumulate * layout.microbatches
    return refuse(
        f"{name} {list(value.shape)} in the batch has {rows} examples; {shown} needs a multiple of {ways}",
        rule="data x fsdp x accumulate (or microbatches of a pipeline) divides the global batch, the first dim "
        "of every array",
        fix=f"a global batch of {max(1, round(rows / ways)) * ways}",
    )


def check_slices(arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct], layout: Layout, accumulate: int) -> None:
    """Checks a batch whose arrays differ in their first dims; without slices there is nothing to check.

    Args:
      arrays: The batch, or its shapes.
      layout: Its microbatches, and replicas that step apart, get slices.
      accumulate: Number of microbatches that run in sequence.

    Raises:
      JaxparError: If the step takes slices.
    """
    replicas = layout.sizes["data"] if layout.parallel.exchange.per_replica else 1
    slices = {"accumulate": accumulate, "microbatches": layout.microbatches, "replicas that step apart": replicas}
    shown = ", ".join(f"{name}={size}" for name, size in slices.items() if size > 1)
    if not shown:
        return
    raise refuse(
        f"{', '.join(f'{name} {list(array.shape)}' for name, array in arrays.items())} in the batch, of which {shown} "
        "takes slices",
        rule="a slice has the same examples of every array, so dim 0 is all examples in each",
        fix="arrays [examples, ...]: rows grouped per example as x.reshape(examples, -1, ...), or padded: graphs "
        "as nodes [graphs, most nodes, ...]; or a step without accumulate, pipeline and exchange, whose devices share "
        "the whole batch",
    )
