"""Splits a model and its loss into the three parts that a pipeline runs separately.

embed ──► layers ──► head and loss
          `jp.pipelined(layers, x)`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.dataflow import Traced, needed_equations, split_groups, subfunction
from jaxpar.jaxprs.lookups import demote_matmuls, replicate_lookups
from jaxpar.jaxprs.low_rank_path import separate_low_rank
from jaxpar.parallel.techniques.context import splits_tables
from jaxpar.pipeline.run.slots import Interleaved, load, slot_shapes
from jaxpar.pipeline.run.traced_model import PipelineFunctions
from jaxpar.sharding.names import Compute, Tree
from jaxpar.step.numerics import Numerics
from jaxpar.step.pipelined.shardings import Shardings, constrain_in_table
from jaxpar.step.pipelined.submodules import Submodules


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model in three parts, with parameters sharded for the pipeline's table.

    Attributes:
      shardings: The shardings of the pipelined step.
      loss: (model, batch) to (sum, count), or to a dict of them with the entry `loss`.
      numerics: Precision, remat and accumulation.
    """

    shardings: Shardings
    loss: Callable
    numerics: Numerics

    def model(self, *, train: bool) -> PipelineFunctions:
        """Returns the three parts, for training or evaluation."""
        shardings, layout = self.shardings, self.shardings.layout
        compute = Compute(train=train, dtype=shardings.dtype, remat=self.numerics.remat)
        model = Submodules(shardings, self.loss, compute)
        parts = {"embed": model.embed, "stage": model.stage, "head": model.head}
        if layout.blueprint.adapters:
            parts = {name: separate_low_rank(part) for name, part in parts.items()}
        if compute.dtype:
            parts = {name: demote_matmuls(part) for name, part in parts.items()}
        if splits_tables(layout):
            gather = lambda x: constrain_in_table(layout, x, ())  # noqa: E731
            parts = {name: replicate_lookups(part, gather) for name, part in parts.items()}
        return PipelineFunctions(name=layout.blueprint.name, layers=tuple(layout.parallel.pipeline.layers), **parts)

    def microbatches(self, batch: Mapping[str, jax.Array]) -> Tree:
        """Makes slots of this device's rows: rows i, i + count, ... are microbatch i."""
        count = self.shardings.layout.microbatches
        return {
            name: Interleaved(value.reshape(value.shape[0] // count, count, *value.shape[1:]))
            for name, value in batch.items()
        }


# Computes the loss count of each microbatch before its forward pass, and scales loss gradients by it.
#
#     the batch ─► the count's equations in the head ─► counts ─► 1 / their sum ─► the cotangent of each loss
#
# float16 gradients need this: the gradient of a sum of losses may exceed 65504 where that of the mean does not.


def loss_counts(
    model: PipelineFunctions, shared: Mapping[str, Any], inputs: Tree, microbatches: int
) -> jax.Array | None:
    """Returns the loss count of each microbatch of this device, or None if it depends on the model's output.

    Args:
      model: The three parts of the model.
      shared: Parameters outside of the layers.
      inputs: Inputs with a slot for each microbatch.
      microbatches: Number of microbatches.
    """
    microbatch = slot_shapes(inputs)
    x, _ = Traced(model.embed, shared, microbatch).shapes
    traced = Traced(lambda known, shared, x: model.head(shared, known, x)["loss"][1], microbatch, shared, x)
    if any(jax.tree.leaves(traced.reads()[1:])):
        return None
    # runs only the head's equations for the count, on the batch: computes no logits
    jaxpr = traced.flat.jaxpr
    ins, *_ = split_groups(jaxpr.invars, [len(jax.tree.leaves(microbatch))])
    eqns, _ = needed_equations(jaxpr.eqns, jaxpr.outvars)
    count = subfunction(jaxpr, traced.flat.consts, ins, eqns, jaxpr.outvars)
    return jax.lax.map(lambda i: jnp.asarray(count(*jax.tree.leaves(load(inputs, i)))[0]), jnp.arange(microbatches))


def with_scaled_gradient(model: PipelineFunctions) -> PipelineFunctions:
    """Replaces a model's input `known` by (known, scale), and multiplies its loss gradients by the scale."""

    def head(shared: Tree, known: tuple[Tree, jax.Array], y: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
        sums = model.head(shared, known[0], y)
        return sums | {"loss": (_scale_gradient(sums["loss"][0], known[1]), sums["loss"][1])}

    return replace(
        model,
        embed=lambda shared, known: model.embed(shared, known[0]),
        stage=lambda layers, known, *args: model.stage(layers, known[0], *args),
        head=head,
    )


@jax.custom_vjp
def _scale_gradient(loss: jax.Array, scale: jax.Array) -> jax.Array:
    del scale
    return loss


def _forward(loss: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss, scale


def _backward(scale: jax.Array, g: jax.Array) -> tuple[jax.Array, Any]:
    return g * scale, jnp.zeros_like(scale)


_scale_gradient.defvjp(_forward, _backward)
