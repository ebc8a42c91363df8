"""Splits a stage's `jax.vjp` into functions that run in different ticks.

    one trace of  y, vjp = jax.vjp(stage);  dparams, dx = vjp(g)

    equations that do not need g      ──► forward       y, residuals      in an F
    need g, and dx needs them         ──► input_grad    dx, stash         in a B
    all other equations               ──► weight_grad   dparams           in a W

`residuals` are the values of the forward that the backward reads. Three kinds are not saved per microbatch:
parameters and the input, which are arguments; values computed from parameters only (a cast, a transpose), which are
recomputed; and, unless the backward is split, results of elementwise ops in scans over layers (`lean_scan`). `stash`
holds the values that cross from B to W.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Var

from jaxpar.jaxprs.dataflow import (
    Env,
    Traced,
    dependent_variables,
    inline_calls,
    needed_equations,
    shapes,
    split_groups,
    subfunction,
    variables,
)
from jaxpar.jaxprs.in_place_scan import BufferEntry, run_in_place
from jaxpar.jaxprs.lean_scan import lean_scans
from jaxpar.jaxprs.split import SplitJaxpr


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A stage's forward and backward as separate functions.

    Attributes:
      forward: Maps (params, inputs, x) to (y, residuals).
      backward: Maps (params, inputs, x, residuals, g) to (dparams, dx).
      forward_in_place: Like `forward`, but writes the residuals to buffers. Its last argument is a `BufferEntry` for
        each residual, and it returns (y, buffers); params may also be buffer entries. None if the backward is split.
      backward_in_place: Like `backward`, but adds dparams to sums in buffers. Its last argument is a `BufferEntry` for
        each sum, and it returns (buffers, dx); params and residuals may also be buffer entries. None if the backward is
        split.
      input_grad: Maps (params, inputs, x, residuals, g) to (dx, stash); None unless the backward is split.
      weight_grad: Maps (params, inputs, stash) to dparams; None unless the backward is split.
      residuals: Shapes and dtypes of the residuals of a forward.
      stash: Shapes and dtypes of the residuals of a B.
    """

    forward: Callable
    backward: Callable
    input_grad: Callable | None
    weight_grad: Callable | None
    residuals: list
    stash: list
    forward_in_place: Callable | None = None
    backward_in_place: Callable | None = None


def halves(stage: Callable, params: object, inputs: object, x: object, *, split: bool, whole: bool = False) -> Halves:
    """Builds the forward and the backward functions of a stage.

    Args:
      stage: Maps (params, inputs, x) to y.
      params: The parameters, as arrays or shapes.
      inputs: The other inputs, which are not trained.
      x: The input of the stage.
      split: Whether to split the backward into `input_grad` and `weight_grad`.
      whole: Whether values that depend only on parameters and `inputs` are saved too, as in a stage that begins with
        the batch; else the backward recomputes them.
    """
    joint = _JointJaxpr(stage, params, inputs, x, least=not split, whole=whole)
    residuals = shapes(joint.crossing)
    if not split:
        # a gradient that is a constant, or the same variable as another, cannot be accumulated in place
        distinct = len(variables(joint.dparams)) == len(joint.dparams)
        return Halves(
            forward=joint.forward,
            backward=joint.backward,
            input_grad=None,
            weight_grad=None,
            residuals=residuals,
            stash=[],
            forward_in_place=joint.forward_into,
            backward_in_place=joint.backward_from if distinct else None,
        )

    avals = shapes([*joint.given, *joint.crossing, *joint.g])
    first = range(len(joint.dparams), len(joint.dparams) + len(joint.dx))
    cut = SplitJaxpr.split(inline_calls(joint.run_backward, avals), first=first, again=joint.again)

    def input_grad(params, inputs, x, residuals, g):
        out, stash = cut.first(jax.tree.leaves((params, inputs, x, residuals, g)))
        return jax.tree.unflatten(joint.x_tree, out), stash

    def weight_grad(params, inputs, stash):
        return jax.tree.unflatten(joint.params_tree, cut.second(jax.tree.leaves((params, inputs)), stash))

    # the jaxpr has the crossing values, but only a trace of the first half has their stacked shapes
    example = jax.make_jaxpr(cut.first)(avals)
    stash = shapes(example.out_avals[len(joint.dx) :])
    return Halves(
        forward=joint.forward, backward=joint.backward, input_grad=input_grad, weight_grad=weight_grad,
        residuals=residuals, stash=stash,
    )  # fmt: skip


class _JointJaxpr:
    """A stage's forward and backward in one jaxpr, split by dataflow.

    The VJP objects of `jax.vjp` would save all residuals, including parameters, and their fields change between
    releases.
    """

    def __init__(self, stage: Callable, params: object, inputs: object, x: object, *, least: bool, whole: bool):
        y = jax.eval_shape(stage, params, inputs, x)

        def joint(params, inputs, x, g):
            y, pull = jax.vjp(lambda params, x: stage(params, inputs, x), params, x)
            return y, *pull(g)

        closed = Traced(joint, params, inputs, x, y).closed
        counts = [len(jax.tree.leaves(tree)) for tree in (params, inputs, x)]
        results = len(jax.tree.leaves(y))
        if least:
            closed = lean_scans(closed, closed.jaxpr.invars[sum(counts[:2]) : sum(counts)])
        jaxpr = self.jaxpr = closed.jaxpr
        self.consts = list(closed.consts)
        p, k, xs, self.g = split_groups(jaxpr.invars, [*counts, results])
        self.given, self.again = [*p, *k, *xs], len(p) + len(k)
        self.y, self.dparams, self.dx = split_groups(jaxpr.outvars, [results, counts[0], counts[2]])
        self.params_tree, self.x_tree, self.y_tree = map(jax.tree.structure, (params, x, y))

        # equations that depend on g are the backward; of the others, the backward recomputes those that do not depend
        # on x but on parameters only, instead of saving a copy for each microbatch in flight
        after_g, after_x = dependent_variables(jaxpr.eqns, self.g), dependent_variables(jaxpr.eqns, xs)
        if whole:
            after_x |= dependent_variables(jaxpr.eqns, p) & dependent_variables(jaxpr.eqns, k)
        backward_eqns = [eqn for eqn in jaxpr.eqns if any(var in after_g for var in eqn.outvars)]
        forward_eqns = [eqn for eqn in jaxpr.eqns if not any(var in after_g for var in eqn.outvars)]
        recomputed = [eqn for eqn in forward_eqns if not any(var in after_x for var in eqn.outvars)]
        self.back, reads = needed_equations(recomputed + backward_eqns, [*self.dparams, *self.dx])
        self.crossing = [var for eqn in forward_eqns for var in eqn.outvars if var in reads and var in after_x]
        self.ahead, _ = needed_equations(forward_eqns, [*self.y, *self.crossing])
        self.run_forward = self._function(self.given, self.ahead, [*self.y, *self.crossing])
        self.run_backward = self._function([*self.given, *self.crossing, *self.g], self.back, [*self.dparams, *self.dx])

    def _function(self, ins: list, eqns: list, outs: list) -> Callable:
        return subfunction(self.jaxpr, self.consts, ins, eqns, outs)

    def forward(self, params, inputs, x):
        out = self.run_forward(*jax.tree.leaves((params, inputs, x)))
        return jax.tree.unflatten(self.y_tree, out[: len(self.y)]), list(out[len(self.y) :])

    def backward(self, params, inputs, x, residuals, g):
        out = self.run_backward(*jax.tree.leaves((params, inputs, x, residuals, g)))
        dparams, dx = out[: len(self.dparams)], out[len(self.dparams) :]
        return jax.tree.unflatten(self.params_tree, dparams), jax.tree.unflatten(self.x_tree, dx)

    def _split_places(self, pairs: Iterable[tuple[Var, Any]]) -> tuple[Env, dict[Var, BufferEntry]]:
        """Separates values from references to entries of buffers."""
        values = dict(pairs)
        places = {var: value for var, value in values.items() if isinstance(value, BufferEntry)}
        return Env(self.jaxpr, self.consts, [item for item in values.items() if item[0] not in places]), places

    def forward_into(self, params, inputs, x, places):
        env, input_places = self._split_places(zip(self.given, jax.tree.leaves((params, inputs, x)), strict=True))
        buffers = run_in_place(env, self.ahead, input_places, dict(zip(self.crossing, places, strict=True)), self.y)
        return jax.tree.unflatten(self.y_tree, [env[var] for var in self.y]), [buffers[var] for var in self.crossing]

    def backward_from(self, params, inputs, x, residuals, g, sums):
        values = [*jax.tree.leaves((params, inputs, x, g)), *residuals]
        env, input_places = self._split_places(zip([*self.given, *self.g, *self.crossing], values, strict=True))
        write = dict(zip(self.dparams, jax.tree.leaves(sums), strict=True))
        buffers = run_in_place(env, self.back, input_places, write, self.dx)
        summed = jax.tree.unflatten(self.params_tree, [buffers[var] for var in self.dparams])
        return summed, jax.tree.unflatten(self.x_tree, [env[var] for var in self.dx])
