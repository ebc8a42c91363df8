"""How `context` splits a model that calls `jp.attention`: along the dims that the model names, as in a step.

The loss is traced as a step of two devices of `context` traces it, on an abstract mesh. Its sharding constraints show:

    dims that `context` splits                ──► the share of each array that a device has
    keys and values that each device gathers  ──► traffic; their gradients are scattered
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.techniques.all_techniques import ModelUse, tracing
from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.sharding.names import Blueprint
from jaxpar.specs.names import add_joined
from jaxpar.specs.program import TracedProgram
from jaxpar.specs.shares import cached_program, share_of_variable

AXIS = "context"
_SAME_ENTRIES = ("transpose", "convert_element_type", "reshape", "squeeze", "expand_dims", "name", "copy", "copy_p")


@contextmanager
def sequences_split(blueprint: Blueprint) -> Iterator[set[str]]:
    """Context in which a loss is traced as in a step of two devices of `context`, without devices.

    Yields:
      The names of dims that the model uses and that `context` splits; complete when the context ends.
    """
    layout, model_use, names = compose(blueprint, Parallel(context=2), 2), ModelUse(), set()
    axis_types = (AxisType.Auto,) * len(layout.sizes)
    mesh = AbstractMesh(tuple(layout.sizes.values()), tuple(layout.sizes), axis_types=axis_types)
    with tracing(layout, model_use), jax.sharding.use_abstract_mesh(mesh):
        yield names
    names |= {name for name in model_use.names if AXIS in spec_axes(layout.names.get(name))}


class SequenceShares:
    """The share of each array that a device of `context` has, in a program traced in `sequences_split`."""

    def __init__(self, size: int):
        self.size = size

    def __call__(
        self, jaxpr: Jaxpr, paths: Sequence[str], batch: Sequence[int], gradients: Sequence[int]
    ) -> Callable[[Any], float]:
        """Returns the share of the array of each variable; see `jaxpar.specs.program.follow_dims` for the arguments."""
        program = cached_program(jaxpr, tuple(paths), tuple(batch), tuple(gradients))
        cut = {piece: {0} for piece in sequence_pieces(program, jaxpr)}
        share, whole = share_of_variable(program, cut, (self.size,)), {*map(id, jaxpr.invars[: len(paths)])}
        whole |= _gathered_views(jaxpr, frozenset(id(variable) for variable, _, _ in gathered_arrays(jaxpr)))
        return lambda variable: 1.0 if id(variable) in whole else share(variable)  # a table of positions is whole


def sequence_pieces(program: TracedProgram, jaxpr: Jaxpr) -> set[DimPiece]:
    """Returns the pieces of dims that `context` splits, in the program of a jaxpr traced in `sequences_split`."""
    pieces: set[DimPiece] = set()
    for variable, dim in split_dims(jaxpr):
        array = program.of_variable.get(variable)
        pieces |= {*[*flat(array.dims[dim])][:1]} if array else set()
    add_joined(program, pieces)
    return pieces


def split_dims(jaxpr: Jaxpr) -> Iterator[tuple[Any, int]]:
    """Yields (variable, dim) of each dim that a constraint splits over `context`."""
    for eqn in jaxpr.eqns:
        if (spec := _spec(eqn)) is not None:
            yield from ((eqn.outvars[0], dim) for dim, entry in enumerate(spec) if _is_split([entry]))
        for inner in jaxprs_in_params(eqn.params):
            yield from split_dims(inner)


def gathered_arrays(jaxpr: Jaxpr) -> list[tuple[Any, int, int]]:
    """Returns (variable, bytes, number of runs) of each array that `context` splits in one constraint, not in the next.

    These are keys and values, of which every device needs those of all tokens.
    """
    return [*_gathered_arrays(jaxpr, {})]


def _gathered_arrays(jaxpr: Jaxpr, specs: dict[int, tuple], times: int = 1) -> Iterator[tuple[Any, int, int]]:
    for eqn in jaxpr.eqns:
        if (spec := _spec(eqn)) is not None:
            variable: Any = eqn.outvars[0]
            if _is_split(specs.get(id(eqn.invars[0]), ())) and not _is_split(spec):
                yield variable, math.prod(variable.aval.shape) * variable.aval.dtype.itemsize, times
            specs[id(variable)] = spec
        runs = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jaxprs_in_params(eqn.params):
            yield from _gathered_arrays(inner, specs, runs)


def _gathered_views(jaxpr: Jaxpr, arrays: frozenset[int], parameters: Collection[int] = ()) -> set[int]:
    """Returns the ids of gathered arrays, and of their transposes, casts and reshapes, in calls and scans too.

    Not followed are branches, and what an iteration of a scan hands on to the next.

    Args:
      jaxpr: The program.
      arrays: Ids of the gathered arrays, those of inner programs too.
      parameters: Ids of the program's parameters that are gathered.
    """
    gathered = {*arrays, *parameters}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _SAME_ENTRIES and id(eqn.invars[0]) in gathered:
            gathered.add(id(eqn.outvars[0]))
        for inner in jaxprs_in_params(eqn.params):
            parameters = []
            if len(inner.invars) == len(eqn.invars):
                arguments = zip(eqn.invars, inner.invars, strict=True)
                parameters = [id(parameter) for argument, parameter in arguments if id(argument) in gathered]
            inside = _gathered_views(inner, arrays, parameters)  # of this call: two calls of a function share a jaxpr
            if len(inner.outvars) == len(eqn.outvars):
                results = zip(eqn.outvars, inner.outvars, strict=True)
                gathered |= {id(result) for result, value in results if id(value) in inside}
            gathered |= inside
    return gathered


def _spec(eqn: Any) -> tuple | None:
    return tuple(eqn.params["sharding"].spec) if eqn.primitive.name == "sharding_constraint" else None


def _is_split(spec: Sequence[Any]) -> bool:
    return any(AXIS in spec_axes(entry) for entry in spec)
