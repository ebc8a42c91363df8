"""Checks that the layers of a list have one program, and differ only in parameters and state.

A stage runs all its layers with the program of layer 0. So this check traces all layers together, and compares their
equations, constants and reads of parameters. It ignores equations that derive random keys.
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
from jaxpar.jaxprs.dataflow import Traced, is_key, variables
from jaxpar.models.stack import SequentialLayers, call_at_layers
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.infer_stacks import layer_modules
from jaxpar.sharding.names import Tree, format_path, pick
from jaxpar.step.pipelined.layer_state import makes_keys


def check_equal(layout: Layout, run: Callable, params: Tree, model_state: Tree, batch: Tree, call: tuple) -> None:
    """Refuses layers that are not the layout's list, and layers with unequal programs.

    Args:
      layout: A layout with a list of layers.
      run: Maps (params, model_state, batch) to a function without arguments that computes the loss.
      params: The stored parameters.
      model_state: The model state before the step.
      batch: One microbatch.
      call: The arguments of `jp.pipelined`: layers, x, and per-layer values.
    """
    layers, x, per_layer = call
    count = len(next(iter(layout.lists.values()), ()))
    num_callables = len(layers.layers) if isinstance(layers, SequentialLayers) else 0
    if not count and not num_callables:
        return
    if not num_callables:
        raise _wrong_layers_error(layout, num_callables, count)

    def shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def apply_layers(params, model_state, batch, x, layer_args):
        return call_at_layers(
            run(params, model_state, batch), lambda layers, *_: [layer(x, *layer_args) for layer in layers.layers]
        )

    layer_args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), per_layer)
    traced = Traced(apply_layers, params, model_state, batch, jax.tree.map(shape, x), layer_args)
    span = count // num_callables
    if span * num_callables != count or not count:
        raise _wrong_layers_error(layout, num_callables, count, traced)
    programs = _programs(traced, layout, span)
    for i, program in enumerate(programs):
        if program == programs[0]:
            continue
        # programs that differ only in their inputs may be of another list, or not adjacent
        if program.text == programs[0].text and (span > 1 or not _reads_list(layout, traced)):
            raise _wrong_layers_error(layout, num_callables, count, traced)
        raise refuse(
            f"layer {i} of {format_layers(layout)} is another program than layer 0: {program.difference(programs[0])}",
            rule="a stage runs all of its layers by one program: nothing but their parameters differs",
            fix=_suggest_fix(programs),
        )
    if span > 1:
        _check_spans(layout, num_callables, span)


def _wrong_layers_error(layout: Layout, given: int, count: int, traced: Traced | None = None) -> JaxparError:
    """Returns the error for a call of `jp.pipelined` with layers that are not the layout's list or stack."""
    got = f"{given} layers" if given else "a function"
    layers = f"list of equal layers is {format_layers(layout)}, {count} of them" if count else "is a stack"
    fix = "x = jp.pipelined(self.blocks, x)" if count else "x = jp.pipelined(lambda x: scan(x, self.blocks), x)"
    if given > 1 and not count:  # layers with unequal parameters or names are not recognized as a list
        fix = (
            "layers with parameters of equal names and shapes, in modules whose names end with numbers: blocks_0, "
            f"blocks_1, ...; of layers of several kinds one callable for each turn, {_call_of_all_kinds(2)}; or pipe=1"
        )
    elif traced is not None and (read_paths := _read_paths(layout, traced)) and not _reads_list(layout, traced):
        prefix = _common_prefix(read_paths)
        fix = f'jp.Pipeline(stack="{prefix}") for the layers given, which read {read_paths[0]}; or pipe=1'
    elif count and given == count * (kinds := len(layer_modules(layout.lists))) and kinds > 1:
        fix = f"layers of {kinds} kinds in turns as one callable for each turn: {_call_of_all_kinds(kinds)}"
    chosen = "chosen" if layout.parallel.pipeline.stack else "largest"
    return refuse(
        f"{layout.blueprint.name} gives jp.pipelined {got}, and its {chosen} {layers}",
        rule="a pipeline runs the largest stack or list of equal layers, or the one that jp.Pipeline(stack=) names: a "
        "stack by a function, a list one by one",
        fix=fix,
    )


def _common_prefix(paths: list[str]) -> str:
    """Returns the common prefix of paths: `text_h_` of `text_h_0/w` and `text_h_1/w`."""
    first, last = min(paths), max(paths)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length].rstrip("/")


def _read_paths(layout: Layout, traced: Traced) -> list[str]:
    """Returns the paths of parameters read by the layers passed to `jp.pipelined`."""
    reads = traced.reads()[0]
    return [path for path in layout.placements if pick(reads, tuple(path.split("/")))]


def _reads_list(layout: Layout, traced: Traced) -> bool:
    """Whether the layers passed to `jp.pipelined` read parameters of the layout's list."""
    members = {path for paths in layout.lists.values() for path in paths}
    return not members.isdisjoint(_read_paths(layout, traced))


def _check_spans(layout: Layout, given: int, span: int) -> None:
    """Refuses callables of several layers if a callable's layers would be on several stages."""
    parts = layout.schedule.parts
    if layout.parallel.pipeline.layers or given % parts:
        partition = (
            f"layers={tuple(layout.parallel.pipeline.layers)}" if layout.parallel.pipeline.layers else f"{parts} parts"
        )
        raise refuse(
            f"{layout.blueprint.name} gives jp.pipelined {given} callables of {span} layers each, for {partition}",
            rule="where a callable runs several layers, every part of the pipeline has as many callables",
            fix=f"a number of parts that divides {given}, and no layers=",
        )


def _suggest_fix(programs: "list[_Program]") -> str:
    """Suggests a way to make layers equal: one callable per period of alternating kinds."""
    count = len(programs)
    for kinds in range(2, count):
        if count % kinds == 0 and all(program == programs[i % kinds] for i, program in enumerate(programs)):
            return f"layers of {kinds} kinds in turns as one callable for each turn: {_call_of_all_kinds(kinds)}"
    return (
        "a number that differs by layer as an array, jp.pipelined(layers, x, numbers); layers of another kind before "
        "or after the equal ones: jp.pipelined(self.blocks[1:], self.blocks[0](x))"
    )


def _call_of_all_kinds(kinds: int) -> str:
    names = [chr(ord("a") + i) for i in range(kinds)]
    call = "x"
    for name in names:
        call = f"{name}({call})"
    values, lists = (f"{name}={name}" for name in names), (f"layers[{i}::{kinds}]" for i in range(kinds))
    return f"jp.pipelined([lambda x, {', '.join(values)}: {call} for {', '.join(names)} in zip({', '.join(lists)})], x)"


def format_layers(layout: Layout) -> str:
    """Formats the layers of a list for a message: `blocks/0 ... blocks/7`."""
    kinds = layer_modules(layout.lists)
    return f"{kinds[0][0]} ... {kinds[-1][-1]}"


@dataclass(frozen=True)
class _Program:
    """The program of a layer.

    Attributes:
      text: Its jaxpr, with variables named in order of use, so that equal programs have equal texts.
      inputs: Its free variables, each as the path of a parameter or the value of a constant.
    """

    text: str
    inputs: tuple[Any, ...]

    def difference(self, first: "_Program") -> str:
        """Describes the first difference to the program of layer 0."""
        for actual, reference in zip_longest(self.text.splitlines(), first.text.splitlines(), fillvalue="nothing"):
            if actual != reference:
                return f"`{actual.strip():.160}` and not `{reference.strip():.160}`"
        for actual, reference in zip_longest(self.inputs, first.inputs):
            if actual != reference:
                return f"it reads {_format_input(actual)} and not {_format_input(reference)}"
        return "in nothing that can be printed"


def _programs(traced: Traced, layout: Layout, span: int) -> list[_Program]:
    closed = traced.flat
    jaxpr = closed.jaxpr
    keys, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(traced.inputs, range(len(jaxpr.invars))))
    paths = {jaxpr.invars[i]: format_path(key) for key, i in keys}
    names: dict[Var, Any] = dict(zip(jaxpr.constvars, map(_value, closed.consts), strict=True))
    outs = jax.tree.unflatten(traced.outputs, jaxpr.outvars)
    return [
        _program(jaxpr, jax.tree.leaves(out), range(i * span, (i + 1) * span), paths, names, layout)
        for i, out in enumerate(outs)
    ]


def _program(jaxpr, outs: list, members: range, paths: dict, names: dict, layout: Layout) -> _Program:
    # backwards from the layer's results, which drops other layers; equations that make keys are dropped too, since
    # layer i folds in or splits off another number than layer 0
    eqns, reads = [], variables(outs)
    for eqn in reversed(jaxpr.eqns):
        if reads.intersection(eqn.outvars) and not makes_keys(eqn):
            eqns.append(eqn)
            reads |= variables(eqn.invars)
    eqns.reverse()
    bound = {var for eqn in eqns for var in eqn.outvars}
    free = dict.fromkeys(var for eqn in eqns for var in eqn.invars if not isinstance(var, Literal) and var not in bound)
    items = [
        None if is_key(var) else names[var] if var in names else _mask_layer_number(paths[var], members, layout)
        for var in free
    ]
    text = str(jaxpr.replace(constvars=(), invars=list(free), outvars=outs, eqns=eqns))
    return _Program(text, tuple(items))


def _mask_layer_number(path: str, members: range, layout: Layout) -> str:
    """Replaces the layer number in a path: `0/blocks/3/w` becomes `0/blocks/*/w`.

    If one callable runs several layers, the second's becomes `0/blocks/*+1/w`.
    """
    start, kinds = next(iter(layout.lists)).index("*"), layer_modules(layout.lists)
    root, _, param_path = path.partition("/")
    for offset, (group, modules) in enumerate(product(members, kinds)):
        module = modules[group] + "/"
        if param_path.startswith(module):
            return f"{root}/{module[:start]}*{f'+{offset}' if offset else ''}/{param_path[len(module) :]}"
    return path


def _format_input(item: object) -> str:
    if isinstance(item, str):
        return item.partition("/")[2] or item
    return "nothing" if item is None else "another constant array"


def _value(const: jax.Array | np.ndarray) -> Any:
    """Converts a constant so that it compares by value, or by identity if it is a tracer."""
    return id(const) if isinstance(const, jax.core.Tracer) else (str(const.dtype), np.asarray(const).tobytes())
