"""A stage's forward and backward as functions that run in different ticks.

    one trace of  y, vjp = jax.vjp(stage);  dparams, dx = vjp(g)

    needs no g                        ──► forward       y, kept           in an F
    needs g, and dx needs it          ──► input_grad    dx, stash         in a B
    the rest                          ──► weight_grad   dparams           in a W

`kept` holds the residuals: values of the forward that the backward reads. Parameters, the input, and values computed
from parameters alone (a cast, a transpose) are not kept per microbatch: they are given or computed again; nor are
results of elementwise ops in scans over layers (`lean_scan`), unless the backward is split. `stash` holds the values
that cross from B to W.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Var

from jaxpar.pipeline.jaxprs.dataflow import Env, Traced, after, function, inlined, needed, parts, shapes, variables
from jaxpar.pipeline.jaxprs.in_place import Place, run_in_place
from jaxpar.pipeline.jaxprs.lean_scan import lean
from jaxpar.pipeline.jaxprs.split import Cut


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A stage's forward and backward as separate functions.

    Attributes:
      forward: (params, known, x) to (y, kept).
      backward: (params, known, x, kept, g) to (dparams, dx).
      forward_into: (params or their places, known, x, places of the residuals) to (y, their buffers); None where it is
        split.
      backward_from: (params or their places, known, x, the residuals or their places, g, places of the sums of
        gradients) to (the buffers of the sums, dx); None where it is split.
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
    forward_into: Callable | None = None
    backward_from: Callable | None = None


def halves(stage: Callable, params: Any, known: Any, x: Any, *, split: bool) -> Halves:
    """Returns the forward and the backward of a stage.

    Args:
      stage: (params, known, x) to y, of the structure and shapes of x.
      params: The parameters, as arrays or shapes.
      known: Other inputs of the stage, which are not trained.
      x: The input.
      split: Whether the backward is needed in halves.
    """
    both = _Both(stage, params, known, x, least=not split)
    kept = shapes(both.crossing)
    if not split:
        # a gradient that is no variable of its own (a constant, or another's) has no place of its own to be added to
        alone = len(variables(both.dparams)) == len(both.dparams)
        return Halves(
            forward=both.forward, backward=both.backward, input_grad=None, weight_grad=None, kept=kept, stash=[],
            forward_into=both.forward_into, backward_from=both.backward_from if alone else None,
        )  # fmt: skip

    avals = shapes([*both.given, *both.crossing, *both.g])
    first = range(len(both.dparams), len(both.dparams) + len(both.dx))
    cut = Cut.of(inlined(both.run_backward, avals), first=first, again=both.again)

    def input_grad(params, known, x, kept, g):
        out, stash = cut.first(jax.tree.leaves((params, known, x, kept, g)))
        return jax.tree.unflatten(both.x_tree, out), stash

    def weight_grad(params, known, stash):
        return jax.tree.unflatten(both.params_tree, cut.second(jax.tree.leaves((params, known)), stash))

    # which values cross is known from the jaxpr, their stacked shapes only from a trace of the first half
    example = jax.make_jaxpr(cut.first)(avals)
    stash = shapes(example.out_avals[len(both.dx) :])
    return Halves(
        forward=both.forward, backward=both.backward, input_grad=input_grad, weight_grad=weight_grad,
        kept=kept, stash=stash,
    )  # fmt: skip


class _Both:
    """A stage's forward and backward in one jaxpr, cut by dataflow.

    The VJP objects of `jax.vjp` hold all residuals, parameters included, and their fields change between releases.
    """

    def __init__(self, stage: Callable, params: Any, known: Any, x: Any, *, least: bool):
        def joint(params, known, x, g):
            y, pull = jax.vjp(lambda params, x: stage(params, known, x), params, x)
            return y, *pull(g)

        closed = Traced(joint, params, known, x, x).closed
        counts = [len(jax.tree.leaves(tree)) for tree in (params, known, x)]
        if least:
            closed = lean(closed, closed.jaxpr.invars[sum(counts[:2]) : sum(counts)])
        jaxpr = self.jaxpr = closed.jaxpr
        self.consts = list(closed.consts)
        p, k, xs, self.g = parts(jaxpr.invars, [*counts, counts[2]])
        self.given, self.again = [*p, *k, *xs], len(p) + len(k)
        self.y, self.dparams, self.dx = parts(jaxpr.outvars, [counts[2], counts[0], counts[2]])
        self.params_tree, self.x_tree = jax.tree.structure(params), jax.tree.structure(x)

        # what depends on g is backward; of the rest, what does not depend on x is computed from parameters alone: the
        # backward computes it again instead of keeping a copy for each microbatch in flight
        after_g, after_x = after(jaxpr.eqns, self.g), after(jaxpr.eqns, xs)
        late = [eqn for eqn in jaxpr.eqns if any(var in after_g for var in eqn.outvars)]
        early = [eqn for eqn in jaxpr.eqns if not any(var in after_g for var in eqn.outvars)]
        again = [eqn for eqn in early if not any(var in after_x for var in eqn.outvars)]  # from parameters alone
        self.back, reads = needed(again + late, [*self.dparams, *self.dx])
        self.crossing = [var for eqn in early for var in eqn.outvars if var in reads and var in after_x]
        self.ahead, _ = needed(early, [*self.y, *self.crossing])
        self.run_forward = self._function(self.given, self.ahead, [*self.y, *self.crossing])
        self.run_backward = self._function([*self.given, *self.crossing, *self.g], self.back, [*self.dparams, *self.dx])

    def _function(self, ins: list, eqns: list, outs: list) -> Callable:
        return function(self.jaxpr, self.consts, ins, eqns, outs)

    def forward(self, params, known, x):
        out = self.run_forward(*jax.tree.leaves((params, known, x)))
        return jax.tree.unflatten(self.x_tree, out[: len(self.y)]), list(out[len(self.y) :])

    def backward(self, params, known, x, kept, g):
        out = self.run_backward(*jax.tree.leaves((params, known, x, kept, g)))
        dparams, dx = out[: len(self.dparams)], out[len(self.dparams) :]
        return jax.tree.unflatten(self.params_tree, dparams), jax.tree.unflatten(self.x_tree, dx)

    def _apart(self, given: Iterable[tuple[Var, Any]]) -> tuple[Env, dict[Var, Place]]:
        """Returns the values among these, and what is still an entry of a buffer."""
        each = dict(given)
        places = {var: value for var, value in each.items() if isinstance(value, Place)}
        return Env(self.jaxpr, self.consts, [item for item in each.items() if item[0] not in places]), places

    def forward_into(self, params, known, x, places):
        env, read = self._apart(zip(self.given, jax.tree.leaves((params, known, x)), strict=True))
        buffers = run_in_place(env, self.ahead, read, dict(zip(self.crossing, places, strict=True)), self.y)
        return jax.tree.unflatten(self.x_tree, [env[var] for var in self.y]), [buffers[var] for var in self.crossing]

    def backward_from(self, params, known, x, kept, g, sums):
        given = [*jax.tree.leaves((params, known, x, g)), *kept]
        env, read = self._apart(zip([*self.given, *self.g, *self.crossing], given, strict=True))
        write = dict(zip(self.dparams, jax.tree.leaves(sums), strict=True))
        buffers = run_in_place(env, self.back, read, write, self.dx)
        summed = jax.tree.unflatten(self.params_tree, [buffers[var] for var in self.dparams])
        return summed, jax.tree.unflatten(self.x_tree, [env[var] for var in self.dx])
