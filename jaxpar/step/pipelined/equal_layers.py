"""Layers of a list that are one program: nothing but their parameters and state differs.

A stage runs all of its layers by the first one's program. So all of them are traced side by side, and compared:
equations, numbers in these, and which parameter is read where. How random keys are made is left out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import Literal, Var

from jaxpar.errors import refuse
from jaxpar.models.stack import InTurn, reached
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.dataflow import Traced, is_key, variables
from jaxpar.sharding.names import Tree, path_of
from jaxpar.step.pipelined.layer_keys import makes_keys


def check_equal(layout: Layout, run: Callable, params: Tree, model_state: Tree, batch: Tree, call: tuple) -> None:
    """Refuses layers that are not the list of a layout, and layers that are not equal.

    Args:
      layout: With a list of layers.
      run: (params, model_state, batch) to a function without arguments that computes the loss.
      params: As between steps.
      model_state: As before the step.
      batch: One microbatch.
      call: What `jp.pipelined` was given: layers, x, and what each layer has of its own.
    """
    layers, x, per_layer = call
    count = len(next(iter(layout.lists.values()), ()))
    given = len(layers.layers) if isinstance(layers, InTurn) else 0
    if given != count:
        got = f"{given} layers" if given else "a function"
        largest = f"list of equal layers is {layers_of(layout)}, {count} of them" if count else "is a stack"
        raise refuse(
            f"{layout.blueprint.name} gives jp.pipelined {got}, and its largest {largest}",
            rule="a pipeline runs the largest stack or list of equal layers: a stack by a function, a list one by one",
            fix="x = jp.pipelined(self.blocks, x)" if count else "x = jp.pipelined(lambda x: scan(x, self.blocks), x)",
        )
    if not count:
        return

    def shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def apart(params, model_state, batch, x, one):
        return reached(run(params, model_state, batch), lambda layers, *_: [layer(x, *one) for layer in layers.layers])

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), per_layer)
    programs = _programs(Traced(apart, params, model_state, batch, jax.tree.map(shape, x), one), layout)
    for i, program in enumerate(programs):
        if program != programs[0]:
            raise refuse(
                f"layer {i} of {layers_of(layout)} is another program than layer 0",
                rule="a stage runs all of its layers by one program: nothing but their parameters differs",
                fix="a number that differs by layer as an array, jp.pipelined(layers, x, numbers); layers of another "
                "kind before or after the equal ones: jp.pipelined(self.blocks[1:], self.blocks[0](x))",
            )


def layers_of(layout: Layout) -> str:
    """Returns the layers of a list for a message: `blocks/0 ... blocks/7`."""
    stack, members = next(iter(layout.lists.items()))
    rest = len(stack) - stack.index("*") - 1
    return f"{members[0][:-rest]} ... {members[-1][:-rest]}"


def _programs(traced: Traced, layout: Layout) -> list[tuple]:
    """Returns each layer's program, with the names of what it reads."""
    closed = traced.flat
    jaxpr = closed.jaxpr
    keys, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(traced.inputs, range(len(jaxpr.invars))))
    paths = {jaxpr.invars[i]: path_of(key) for key, i in keys}
    names: dict[Var, Any] = dict(zip(jaxpr.constvars, map(_value, closed.consts), strict=True))
    outs = jax.tree.unflatten(traced.outputs, jaxpr.outvars)
    return [_program(jaxpr, jax.tree.leaves(out), i, paths, names, layout) for i, out in enumerate(outs)]


def _program(jaxpr, outs: list, layer: int, paths: dict, names: dict, layout: Layout) -> tuple:
    # back from the layer's results, so that the other layers drop out; and how keys are made, since layer i folds in or
    # splits off another number than layer 0
    eqns, reads = [], variables(outs)
    for eqn in reversed(jaxpr.eqns):
        if reads.intersection(eqn.outvars) and not makes_keys(eqn):
            eqns.append(eqn)
            reads |= variables(eqn.invars)
    eqns.reverse()
    made = {var for eqn in eqns for var in eqn.outvars}
    free = dict.fromkeys(var for eqn in eqns for var in eqn.invars if not isinstance(var, Literal) and var not in made)
    known = [None if is_key(var) else names[var] if var in names else _own(paths[var], layer, layout) for var in free]
    # printed, variables are named in the order of their use: equal programs are equal texts, whatever layer they are of
    text = str(jaxpr.replace(constvars=(), invars=list(free), outvars=outs, eqns=eqns))
    return text, known


def _own(path: str, layer: int, layout: Layout) -> str:
    """Returns a path of layer 3 as that of any layer: `0/blocks/3/w` as `0/blocks/*/w`."""
    stack, members = next(iter(layout.lists.items()))
    start, rest = stack.index("*"), len(stack) - stack.index("*") - 1
    mine = members[layer][:-rest] + "/"
    which, _, own = path.partition("/")
    return f"{which}/{mine[:start]}*/{own[len(mine) :]}" if own.startswith(mine) else path


def _value(const: Any) -> Any:
    """Returns a constant so that equal ones compare equal; one that is traced is equal to itself alone."""
    return id(const) if isinstance(const, jax.core.Tracer) else (str(const.dtype), np.asarray(const).tobytes())
