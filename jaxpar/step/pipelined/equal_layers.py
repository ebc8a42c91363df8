"""Layers of a list that are one program: nothing but their parameters and state differs.

A stage runs all of its layers by the first one's program. So all of them are traced side by side, and compared:
equations, numbers in these, and which parameter is read where. How random keys are made is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import Literal, Var

from jaxpar.errors import JaxparError, refuse
from jaxpar.models.stack import InTurn, reached
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.dataflow import Traced, is_key, variables
from jaxpar.sharding.lists import modules_of
from jaxpar.sharding.names import Tree, path_of, pick
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
    if not count and not given:
        return
    if not given:
        raise _other_layers(layout, given, count)

    def shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def apart(params, model_state, batch, x, one):
        return reached(run(params, model_state, batch), lambda layers, *_: [layer(x, *one) for layer in layers.layers])

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), per_layer)
    traced = Traced(apart, params, model_state, batch, jax.tree.map(shape, x), one)
    span = count // given
    if span * given != count or not count:
        raise _other_layers(layout, given, count, traced)
    programs = _programs(traced, layout, span)
    for i, program in enumerate(programs):
        if program == programs[0]:
            continue
        # programs that differ in what they read alone may be layers of another list, or no neighbours
        if program.text == programs[0].text and (span > 1 or not _of_the_list(layout, traced)):
            raise _other_layers(layout, given, count, traced)
        raise refuse(
            f"layer {i} of {layers_of(layout)} is another program than layer 0: {program.difference(programs[0])}",
            rule="a stage runs all of its layers by one program: nothing but their parameters differs",
            fix=_fix(programs),
        )
    if span > 1:
        _check_spans(layout, given, span)


def _other_layers(layout: Layout, given: int, count: int, traced: Traced | None = None) -> JaxparError:
    """Returns the refusal of a call of `jp.pipelined` with layers that are not the list of a layout, or its stack."""
    got = f"{given} layers" if given else "a function"
    layers = f"list of equal layers is {layers_of(layout)}, {count} of them" if count else "is a stack"
    fix = "x = jp.pipelined(self.blocks, x)" if count else "x = jp.pipelined(lambda x: scan(x, self.blocks), x)"
    if given > 1 and not count:  # of a list whose layers have other parameters, or other names, no list was found
        fix = (
            "layers with parameters of equal names and shapes, in modules whose names end with numbers: blocks_0, "
            f"blocks_1, ...; of layers of several kinds one callable for each turn, {_by_turns(2)}; or pipe=1"
        )
    elif traced is not None and (others := _read_paths(layout, traced)) and not _of_the_list(layout, traced):
        prefix = _common_start(others)
        fix = f'jp.Pipeline(stack="{prefix}") for the layers given, which read {others[0]}; or pipe=1'
    elif count and given == count * (kinds := len(modules_of(layout.lists))) and kinds > 1:
        fix = f"layers of {kinds} kinds in turns as one callable for each turn: {_by_turns(kinds)}"
    chosen = "chosen" if layout.parallel.pipeline.stack else "largest"
    return refuse(
        f"{layout.blueprint.name} gives jp.pipelined {got}, and its {chosen} {layers}",
        rule="a pipeline runs the largest stack or list of equal layers, or the one that jp.Pipeline(stack=) names: a "
        "stack by a function, a list one by one",
        fix=fix,
    )


def _common_start(paths: list[str]) -> str:
    """Returns the characters that all paths begin with: `text_h_` of `text_h_0/w` and `text_h_1/w`."""
    first, last = min(paths), max(paths)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length].rstrip("/")


def _read_paths(layout: Layout, traced: Traced) -> list[str]:
    """Returns the paths of the parameters that the layers given to `jp.pipelined` read."""
    reads = traced.reads()[0]
    return [path for path in layout.placements if pick(reads, tuple(path.split("/")))]


def _of_the_list(layout: Layout, traced: Traced) -> bool:
    """Returns whether the layers given to `jp.pipelined` read parameters of the layout's list."""
    members = {path for paths in layout.lists.values() for path in paths}
    return not members.isdisjoint(_read_paths(layout, traced))


def _check_spans(layout: Layout, given: int, span: int) -> None:
    """Refuses callables of several layers each that cannot be dealt to the stages whole."""
    parts = layout.schedule.parts
    if layout.parallel.pipeline.layers or given % parts:
        cut = (
            f"layers={tuple(layout.parallel.pipeline.layers)}" if layout.parallel.pipeline.layers else f"{parts} parts"
        )
        raise refuse(
            f"{layout.blueprint.name} gives jp.pipelined {given} callables of {span} layers each, for {cut}",
            rule="where a callable runs several layers, every part of the pipeline has as many callables",
            fix=f"a number of parts that divides {given}, and no layers=",
        )


def _fix(programs: "list[_Program]") -> str:
    """Returns how to make layers equal: those of several kinds in turns are called by turns."""
    count = len(programs)
    for kinds in range(2, count):
        if count % kinds == 0 and all(program == programs[i % kinds] for i, program in enumerate(programs)):
            return f"layers of {kinds} kinds in turns as one callable for each turn: {_by_turns(kinds)}"
    return (
        "a number that differs by layer as an array, jp.pipelined(layers, x, numbers); layers of another kind before "
        "or after the equal ones: jp.pipelined(self.blocks[1:], self.blocks[0](x))"
    )


def _by_turns(kinds: int) -> str:
    """Returns the call of `jp.pipelined` whose callables run a layer of each kind."""
    names = [chr(ord("a") + i) for i in range(kinds)]
    call = "x"
    for name in names:
        call = f"{name}({call})"
    values, lists = (f"{name}={name}" for name in names), (f"layers[{i}::{kinds}]" for i in range(kinds))
    return f"jp.pipelined([lambda x, {', '.join(values)}: {call} for {', '.join(names)} in zip({', '.join(lists)})], x)"


def layers_of(layout: Layout) -> str:
    """Returns the layers of a list for a message: `blocks/0 ... blocks/7`."""
    kinds = modules_of(layout.lists)
    return f"{kinds[0][0]} ... {kinds[-1][-1]}"


@dataclass(frozen=True)
class _Program:
    """What a layer computes, and of what.

    Attributes:
      text: Its jaxpr, with variables named in the order of their use: equal programs are equal texts.
      inputs: What each variable is that it does not make itself: a path, or the value of a constant.
    """

    text: str
    inputs: tuple[Any, ...]

    def difference(self, first: "_Program") -> str:
        """Returns where it differs from the program of layer 0."""
        for own, other in zip_longest(self.text.splitlines(), first.text.splitlines(), fillvalue="nothing"):
            if own != other:
                return f"`{own.strip():.160}` and not `{other.strip():.160}`"
        for own, other in zip_longest(self.inputs, first.inputs):
            if own != other:
                return f"it reads {_shown(own)} and not {_shown(other)}"
        return "in nothing that can be printed"


def _programs(traced: Traced, layout: Layout, span: int) -> list[_Program]:
    """Returns each callable's program, with the names of what it reads."""
    closed = traced.flat
    jaxpr = closed.jaxpr
    keys, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(traced.inputs, range(len(jaxpr.invars))))
    paths = {jaxpr.invars[i]: path_of(key) for key, i in keys}
    names: dict[Var, Any] = dict(zip(jaxpr.constvars, map(_value, closed.consts), strict=True))
    outs = jax.tree.unflatten(traced.outputs, jaxpr.outvars)
    return [
        _program(jaxpr, jax.tree.leaves(out), range(i * span, (i + 1) * span), paths, names, layout)
        for i, out in enumerate(outs)
    ]


def _program(jaxpr, outs: list, members: range, paths: dict, names: dict, layout: Layout) -> _Program:
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
    known = [None if is_key(var) else names[var] if var in names else _own(paths[var], members, layout) for var in free]
    text = str(jaxpr.replace(constvars=(), invars=list(free), outvars=outs, eqns=eqns))
    return _Program(text, tuple(known))


def _own(path: str, members: range, layout: Layout) -> str:
    """Returns a path of layer 3 as that of any layer: `0/blocks/3/w` as `0/blocks/*/w`.

    Of several layers that one callable runs, the second's as `0/blocks/*+1/w`.
    """
    start, kinds = next(iter(layout.lists)).index("*"), modules_of(layout.lists)
    which, _, own = path.partition("/")
    for place, (group, modules) in enumerate(product(members, kinds)):
        mine = modules[group] + "/"
        if own.startswith(mine):
            return f"{which}/{mine[:start]}*{f'+{place}' if place else ''}/{own[len(mine) :]}"
    return path


def _shown(item: Any) -> str:
    """Returns an input of a program for a message."""
    if isinstance(item, str):
        return item.partition("/")[2] or item
    return "nothing" if item is None else "another constant array"


def _value(const: Any) -> Any:
    """Returns a constant so that equal ones compare equal; one that is traced is equal to itself alone."""
    return id(const) if isinstance(const, jax.core.Tracer) else (str(const.dtype), np.asarray(const).tobytes())
