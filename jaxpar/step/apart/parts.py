"""Gradients of parts of a batch, for their norms: nothing is updated, and no gradient travels between replicas.

    several replicas     the rows of each ─► its gradient ─► its norm ─► mean: one scalar over `data`
    one replica          microbatches, or halves, one after the other ─► the same

A program of its own, beside the training step's: that one is the same whether norms are measured or not, and so are its
numbers, where a model keeps statistics of its batch or draws dropout too.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.exchange.between import AXIS
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import Tree
from jaxpar.step.apart.replicas import of_one
from jaxpar.step.keyed.gradients import handed
from jaxpar.step.keyed.loss import key_of
from jaxpar.step.norm.of_shards import whole
from jaxpar.step.numerics import Numerics
from jaxpar.step.state import salted
from jaxpar.step.whole import Whole


def parts_of(layout: Layout, numerics: Numerics) -> int:
    """Returns into how many parts a batch falls: one for each replica over `data`; of one replica its microbatches.

    Raises:
      JaxparError: If the gradient of a part is never there alone, or that of the whole batch is not.
    """
    if layout.sizes["pipe"] > 1:
        raise refuse(
            f"the noise of gradients with pipe={layout.sizes['pipe']}",
            rule="it is measured by gradients of parts of a batch, which the table of a pipeline adds up as it goes",
            fix="metrics.noise_every = 0; or measure it with pipe=1",
        )
    if layout.parallel.exchange.apart:
        raise refuse(
            f"the noise of gradients with exchange {layout.parallel.exchange}",
            rule="it is measured beside the exact mean of the replicas' gradients, which only all-reduces make",
            fix="metrics.noise_every = 0, or no exchange",
        )
    if layout.sizes[AXIS] > 1 and layout.sizes["context"] > 1 and layout.parallel.context_by != "gather":
        raise refuse(
            f"the noise of gradients with context_by={layout.parallel.context_by!r}",
            rule="gradients of replicas are mapped over `data`, inside of which no piece of a sequence can travel",
            fix="metrics.noise_every = 0, or parallel.context_by = 'gather'",
        )
    return layout.sizes[AXIS] if layout.sizes[AXIS] > 1 else max(2, numerics.accumulate)


def norm_of_parts(
    layout: Layout, loss: Callable, numerics: Numerics, *, frozen: frozenset[str] = frozenset(), seed: int = 0
) -> Callable[[Tree, Tree, Mapping[str, Any]], jax.Array]:
    """Returns a function of (params, model state, batch): the root mean square of the norms of its parts' gradients.

    A part's gradient is that of its summed loss, by the mean count of a part: the gradient of the whole batch is the
    mean of those of its parts, also where masks leave one more to count than another.

    Args:
      layout: Where arrays live.
      loss: (model, batch), or (model, batch, key), to sums and counts.
      numerics: How it computes.
      frozen: Paths of parameters whose gradients the optimizer does not read.
      seed: Of the key of a loss that wants one.

    Raises:
      JaxparError: If such a layout has no parts.
    """
    count, axis = parts_of(layout, numerics), layout.sizes[AXIS] > 1
    keyed = key_of(loss) is not None
    inner, called = handed(layout, loss) if keyed else (layout, loss)
    one = of_one(inner)
    of_part = Whole(one, called, numerics if axis else replace(numerics, accumulate=1), frozen).gradients

    def square(params: Tree, model_state: Tree, batch: Mapping[str, Any], part: jax.Array):
        """Returns the square of the norm of the gradient of a part's summed loss, and the count of that loss."""
        with activation_names(one.names, one.sizes):
            gradients, sums, _ = of_part(params, salted(model_state, part), batch)
        tokens = sums["loss"][1]
        return jnp.where(tokens > 0, whole(gradients, squared=True) * tokens**2, 0.0), tokens

    def run(params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> jax.Array:
        state = {"model": model_state, "key": jax.random.key(seed)} if keyed else model_state
        numbers, rows = jnp.arange(count), {name: _split(layout, value, count) for name, value in batch.items()}
        if axis:
            each = jax.vmap(square, in_axes=(None, None, 0, 0), spmd_axis_name=AXIS)
            squares, tokens = each(params, state, rows, numbers)
        else:
            squares, tokens = jax.lax.map(lambda part: square(params, state, *part), (rows, numbers))
        return jnp.sqrt(jnp.mean(squares)) / jnp.mean(tokens)

    return run


def check_parts(layout: Layout, count: int, batch: int) -> None:
    """Refuses a batch that does not fall into so many parts.

    Raises:
      JaxparError: If it does not, each part split over the devices of a replica.
    """
    inside = layout.replicas // layout.sizes[AXIS]
    if batch % (ways := count * inside):
        raise refuse(
            f"the noise of gradients of a batch of {batch} examples over {inside} devices of a replica",
            rule=f"it falls into {count} parts that are measured alone, each split over these devices",
            fix=f"train.global_batch = {-(-batch // ways) * ways}, or metrics.noise_every = 0",
        )


def _split(layout: Layout, value: jax.Array, count: int) -> jax.Array:
    """Returns an array of a batch as [part, rows, ...]; no row moves to another device."""
    check_parts(layout, count, value.shape[0])
    rows = value.shape[0] // count
    if layout.sizes[AXIS] == 1:  # rows i, i + count, ... are part i
        return jnp.moveaxis(value.reshape(rows, count, *value.shape[1:]), 1, 0)
    axes = jax.sharding.PartitionSpec(AXIS, tuple(axis for axis in layout.batch_axes if axis != AXIS))
    split = value.reshape(count, rows, *value.shape[1:])
    return jax.lax.with_sharding_constraint(split, layout.sharding(axes))
