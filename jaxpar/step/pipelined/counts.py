"""Computes the loss count of each microbatch before its forward pass, and scales loss gradients by it.

    the batch ─► the count's equations in the head ─► counts ─► 1 / their sum ─► the cotangent of each loss

float16 gradients need this: the gradient of a sum of losses may exceed 65504 where that of the mean does not.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.dataflow import Traced, needed_equations, split_groups, subfunction
from jaxpar.pipeline.run.traced_model import Model
from jaxpar.sharding.names import Tree


def loss_counts(model: Model, shared: Tree, inputs: Tree) -> jax.Array | None:
    """Returns the loss count of each microbatch of this device, or None if it depends on the model's output.

    Args:
      model: The three parts of the model.
      shared: Parameters outside of the layers.
      inputs: Inputs with a leading dim of microbatches.
    """
    microbatch = jax.tree.map(lambda x: x[0], inputs)
    x, _ = Traced(model.embed, shared, microbatch).shapes
    traced = Traced(lambda known, shared, x: model.head(shared, known, x)["loss"][1], microbatch, shared, x)
    if any(jax.tree.leaves(traced.reads()[1:])):
        return None
    # runs only the head's equations for the count, on the batch: computes no logits
    jaxpr = traced.flat.jaxpr
    ins, *_ = split_groups(jaxpr.invars, [len(jax.tree.leaves(microbatch))])
    eqns, _ = needed_equations(jaxpr.eqns, jaxpr.outvars)
    count = subfunction(jaxpr, traced.flat.consts, ins, eqns, jaxpr.outvars)
    return jax.lax.map(lambda leaves: jnp.asarray(count(*leaves)[0]), jax.tree.leaves(inputs))


def with_scaled_gradient(model: Model) -> Model:
    """Replaces a model's input `known` by (known, scale), and multiplies its loss gradients by the scale."""

    def head(shared: Tree, known: tuple[Tree, jax.Array], y: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
        sums = model.head(shared, known[0], y)
        return sums | {"loss": (_scaled(sums["loss"][0], known[1]), sums["loss"][1])}

    return replace(
        model,
        embed=lambda shared, known: model.embed(shared, known[0]),
        stage=lambda layers, known, *args: model.stage(layers, known[0], *args),
        head=head,
    )


@jax.custom_vjp
def _scaled(loss: jax.Array, scale: jax.Array) -> jax.Array:
    del scale
    return loss


def _forward(loss: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss, scale


def _backward(scale: jax.Array, g: jax.Array) -> tuple[jax.Array, Any]:
    return g * scale, jnp.zeros_like(scale)


_scaled.defvjp(_forward, _backward)
