"""Gradient norms of parts of a batch, without an update or an all-reduce of gradients.

    several replicas     rows of each replica ─► gradient ─► norm ─► mean: one scalar over `data`
    one replica          microbatches, or halves, in sequence ─► the same

This is a separate program, so that measuring norms does not change the training step, also for models with batch
statistics or dropout.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.exchange.replica_mesh import AXIS
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import Tree
from jaxpar.step.gradient_norm import unsharded_norm
from jaxpar.step.numerics import Numerics
from jaxpar.step.per_replica.replicas import layout_of_replica
from jaxpar.step.state import fold_in_number
from jaxpar.step.stochastic_loss import carry_key, key_parameter
from jaxpar.step.unpipelined import Unpipelined


def num_parts(layout: Layout, numerics: Numerics) -> int:
    """Returns the number of parts of a batch: the replicas over `data`, or the microbatches of a single replica.

    Raises:
      JaxparError: If the layout cannot compute the gradient of a single part, or that of the whole batch.
    """
    if layout.sizes["pipe"] > 1:
        raise refuse(
            f"the noise of gradients with pipe={layout.sizes['pipe']}",
            rule="the noise is measured from gradients of parts of a batch, and a pipeline computes only their sum",
            fix="metrics.noise_every = 0; or measure it with pipe=1",
        )
    if layout.parallel.exchange.per_replica:
        raise refuse(
            f"the noise of gradients with exchange {layout.parallel.exchange}",
            rule="the noise is measured against the exact mean of the gradients, which only all-reduces compute",
            fix="metrics.noise_every = 0, or no exchange",
        )
    if layout.sizes[AXIS] > 1 and layout.sizes["context"] > 1 and layout.parallel.context_by != "gather":
        raise refuse(
            f"the noise of gradients with context_by={layout.parallel.context_by!r}",
            rule="gradients of replicas are mapped over `data`, inside of which no piece of a sequence can travel",
            fix="metrics.noise_every = 0, or parallel.context_by = 'gather'",
        )
    return layout.sizes[AXIS] if layout.sizes[AXIS] > 1 else max(2, numerics.accumulate)


def part_norm_function(
    layout: Layout, loss: Callable, numerics: Numerics, *, frozen: frozenset[str] = frozenset(), seed: int = 0
) -> Callable[[Tree, Tree, Mapping[str, Any]], jax.Array]:
    """Builds the function of (params, model state, batch) that computes the root mean square gradient norm of parts.

    The gradient of a part is that of its summed loss, divided by the mean count per part. So the gradient of the batch
    is the mean over its parts, also if masks leave them unequal counts.

    Args:
      layout: The sharding of all arrays.
      loss: (model, batch), or (model, batch, key), to sums and counts.
      numerics: Precision, remat and accumulation.
      frozen: Paths of parameters whose gradients the optimizer does not read.
      seed: Seed of the random key, for a loss that takes one.

    Raises:
      JaxparError: As for `num_parts`.
    """
    count, axis = num_parts(layout, numerics), layout.sizes[AXIS] > 1
    keyed = key_parameter(loss) is not None
    part_layout, part_loss = carry_key(layout, loss) if keyed else (layout, loss)
    replica_layout = layout_of_replica(part_layout)
    part_gradients = Unpipelined(
        replica_layout, part_loss, numerics if axis else replace(numerics, accumulate=1), frozen
    ).gradients

    def square(params: Tree, model_state: Tree, batch: Mapping[str, object], part: jax.Array):
        """Returns the squared gradient norm of a part's summed loss, and the loss's count."""
        with activation_names(replica_layout.names, replica_layout.sizes):
            gradients, sums, _ = part_gradients(params, fold_in_number(model_state, part), batch)
        tokens = sums["loss"][1]
        return jnp.where(tokens > 0, unsharded_norm(gradients, squared=True) * tokens**2, 0.0), tokens

    def run(params: Tree, model_state: Tree, batch: Mapping[str, Any]) -> jax.Array:
        state = {"model": model_state, "key": jax.random.key(seed)} if keyed else model_state
        numbers, rows = jnp.arange(count), {name: _split(layout, value, count) for name, value in batch.items()}
        if axis:
            squares_of = jax.vmap(square, in_axes=(None, None, 0, 0), spmd_axis_name=AXIS)
            squares, tokens = squares_of(params, state, rows, numbers)
        else:
            squares, tokens = jax.lax.map(lambda part: square(params, state, *part), (rows, numbers))
        return jnp.sqrt(jnp.mean(squares)) / jnp.mean(tokens)

    return run


def check_parts(layout: Layout, count: int, batch: int) -> None:
    """Refuses a batch that does not divide into `count` parts.

    Raises:
      JaxparError: If a part does not divide over the devices of a replica.
    """
    replica_devices = layout.replicas // layout.sizes[AXIS]
    if batch % (ways := count * replica_devices):
        raise refuse(
            f"the noise of gradients of a batch of {batch} examples over {replica_devices} devices of a replica",
            rule=f"it falls into {count} parts that are measured alone, each split over these devices",
            fix=f"train.global_batch = {-(-batch // ways) * ways}, or metrics.noise_every = 0",
        )


def _split(layout: Layout, value: jax.Array, count: int) -> jax.Array:
    """Reshapes an array of a batch to [part, rows, ...]; no row moves to another device."""
    check_parts(layout, count, value.shape[0])
    rows = value.shape[0] // count
    if layout.sizes[AXIS] == 1:  # part i is rows i, i + count, ...
        return jnp.moveaxis(value.reshape(rows, count, *value.shape[1:]), 1, 0)
    axes = jax.sharding.PartitionSpec(AXIS, tuple(axis for axis in layout.parallel.batch_axes if axis != AXIS))
    split = value.reshape(count, rows, *value.shape[1:])
    return jax.lax.with_sharding_constraint(split, layout.sharding(axes))
