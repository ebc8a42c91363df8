"""The count of each microbatch's loss before its forward is run, and a loss whose gradient is scaled by them.

    the batch ─► equations of the head that make the count ─► counts ─► 1 / their sum ─► the cotangent of each loss

Gradients of float16 need this: that of a sum of losses may be beyond 65504 where that of their mean is not.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.pipeline.jaxprs.dataflow import Traced, function, needed, parts
from jaxpar.pipeline.run.traced_model import Model
from jaxpar.sharding.names import Tree


def counts_of(model: Model, shared: Tree, known: Tree) -> jax.Array | None:
    """Returns the count of each microbatch of this device, or None where it follows from what the model computes.

    Args:
      model: The pieces of the model.
      shared: Parameters outside of the stack.
      known: Inputs with a leading dim of microbatches.
    """
    one = jax.tree.map(lambda x: x[0], known)
    x, _ = Traced(model.embed, shared, one).shapes
    traced = Traced(lambda known, shared, x: model.head(shared, known, x)["loss"][1], one, shared, x)
    if any(jax.tree.leaves(traced.reads()[1:])):
        return None
    # of the head only the equations that make the count are run, on the batch: no logits are computed for it
    jaxpr = traced.flat.jaxpr
    ins, *_ = parts(jaxpr.invars, [len(jax.tree.leaves(one))])
    eqns, _ = needed(jaxpr.eqns, jaxpr.outvars)
    count = function(jaxpr, traced.flat.consts, ins, eqns, jaxpr.outvars)
    return jax.lax.map(lambda leaves: jnp.asarray(count(*leaves)[0]), jax.tree.leaves(known))


def with_scaled_gradient(model: Model) -> Model:
    """Returns a model of (known, scale) for known, whose gradients are those of the loss times that scale."""

    def head(shared: Tree, known: tuple[Tree, jax.Array], y: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
        sums = model.head(shared, known[0], y)
        return sums | {"loss": (_scaled(sums["loss"][0], known[1]), sums["loss"][1])}

    return replace(
        model,
        embed=lambda shared, known: model.embed(shared, known[0]),
        stage=lambda layers, known, *rest: model.stage(layers, known[0], *rest),
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
