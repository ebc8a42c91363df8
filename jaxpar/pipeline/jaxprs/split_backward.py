"""A stage's forward and backward as functions that run in different ticks.

    one trace of  y, vjp = jax.vjp(stage);  dparams, dx = vjp(g)

    needs no g                        ──► forward       y, kept           in an F
    needs g, and dx needs it          ──► input_grad    dx, stash         in a B
    the rest                          ──► weight_grad   dparams           in a W

`kept` holds the residuals: values of the forward that the backward reads. Parameters, the input, and values computed
from parameters alone (a cast, a transpose) are not kept per microbatch: they are given or computed again. `stash`
holds the values that cross from B to W.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.pipeline.jaxprs.dataflow import Traced, after, function, inlined, needed, parts, shapes
from jaxpar.pipeline.jaxprs.split import Cut


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A stage's forward and backward as separate functions.

    Attributes:
      forward: (params, known, x) to (y, kept).
      backward: (params, known, x, kept, g) to (dparams, dx).
      input_grad: (params, known, x, kept, g) to (dx, stash); None unless the backward is split.
      weight_grad: (params, known, stash) to dparams; None unless the backward is split.
      kept: Shapes and dtypes of the residuals of a forward.
      stash: Shapes and dtypes of the residuals of a B.
    """

    forward: Callable
    backward: Callable
    input_grad: Callable | None
    weight_grad: Callable | None
    kept: list
    stash: list


def halves(stage: Callable, params: Any, known: Any, x: Any, *, split: bool) -> Halves:
    """Returns the forward and the backward of a stage.

    Args:
      stage: (params, known, x) to y, of the structure and shapes of x.
      params: The parameters, as arrays or shapes.
      known: Other inputs of the stage, which are not trained.
      x: The input.
      split: Whether the backward is needed in halves.
    """

    # forward and backward in one jaxpr, cut by dataflow: the VJP objects of `jax.vjp` hold all residuals, parameters
    # included, and their fields change between releases of JAX
    def joint(params, known, x, g):
        y, pull = jax.vjp(lambda params, x: stage(params, known, x), params, x)
        return y, *pull(g)

    traced = Traced(joint, params, known, x, x)
    counts = [len(jax.tree.leaves(tree)) for tree in (params, known, x)]
    jaxpr = traced.closed.jaxpr
    consts = list(traced.closed.consts)
    p, k, xs, g = parts(jaxpr.invars, [*counts, counts[2]])
    y, dparams, dx = parts(jaxpr.outvars, [counts[2], counts[0], counts[2]])
    params_tree, x_tree = jax.tree.structure(params), jax.tree.structure(x)

    # what depends on g is backward; of the rest, what does not depend on x is computed from parameters alone: the
    # backward computes it again instead of keeping a copy for each microbatch in flight
    after_g, after_x = after(jaxpr.eqns, g), after(jaxpr.eqns, xs)
    late = [eqn for eqn in jaxpr.eqns if any(var in after_g for var in eqn.outvars)]
    early = [eqn for eqn in jaxpr.eqns if not any(var in after_g for var in eqn.outvars)]
    again = [eqn for eqn in early if not any(var in after_x for var in eqn.outvars)]  # from parameters alone
    back, reads = needed(again + late, [*dparams, *dx])
    crossing = [var for eqn in early for var in eqn.outvars if var in reads and var in after_x]
    ahead, _ = needed(early, [*y, *crossing])

    forward_ = function(jaxpr, consts, [*p, *k, *xs], ahead, [*y, *crossing])
    backward_ = function(jaxpr, consts, [*p, *k, *xs, *crossing, *g], back, [*dparams, *dx])

    def forward(params, known, x):
        out = forward_(*jax.tree.leaves((params, known, x)))
        return jax.tree.unflatten(x_tree, out[: len(y)]), list(out[len(y) :])

    def backward(params, known, x, kept, g):
        out = backward_(*jax.tree.leaves((params, known, x, kept, g)))
        return jax.tree.unflatten(params_tree, out[: len(dparams)]), jax.tree.unflatten(x_tree, out[len(dparams) :])

    kept = shapes(crossing)
    if not split:
        return Halves(forward=forward, backward=backward, input_grad=None, weight_grad=None, kept=kept, stash=[])

    avals = shapes([*p, *k, *xs, *crossing, *g])
    cut = Cut.of(inlined(backward_, avals), first=range(len(dparams), len(dparams) + len(dx)), again=len(p) + len(k))

    def input_grad(params, known, x, kept, g):
        out, stash = cut.first(jax.tree.leaves((params, known, x, kept, g)))
        return jax.tree.unflatten(x_tree, out), stash

    def weight_grad(params, known, stash):
        return jax.tree.unflatten(params_tree, cut.second(jax.tree.leaves((params, known)), stash))

    # which values cross is known from the jaxpr, their stacked shapes only from a trace of the first half
    example = jax.make_jaxpr(cut.first)(avals)
    stash = shapes(example.out_avals[len(dx) :])
    return Halves(
        forward=forward, backward=backward, input_grad=input_grad, weight_grad=weight_grad, kept=kept, stash=stash
    )
