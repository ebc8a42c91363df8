"""How `context` splits a model that calls `jp.attention`: along the dims that the model names, as in a step.

The loss is traced as a step of two devices of `context` traces it, on an abstract mesh. Its sharding constraints show:

    dims that `context` splits                ──► the share of each array that a device has
    keys and values that each device gathers  ──► traffic; their gradients are scattered
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from jaxpar.errors import JaxparError
from jaxpar.models.dim_names import spec_axes
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.techniques.all_techniques import ModelUse, tracing
from jaxpar.plan.model.splits import ModelSplit, SplitTraffic
from jaxpar.sharding.infer_names.dim_pieces import DimPiece, flat
from jaxpar.sharding.names import Blueprint
from jaxpar.specs.names import add_joined
from jaxpar.specs.shares import cached_program, share_of_variable
from jaxpar.specs.trace import summed_loss
from jaxpar.step.numerics import DTYPES

AXIS = "context"
ROWS = 2  # examples of the trace: a dim of size 1 is not followed


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
        pieces: set[DimPiece] = set()
        for variable, dim, _ in _split_dims(jaxpr):
            array = program.of_variable.get(variable)
            pieces |= {*[*flat(array.dims[dim])][:1]} if array else set()
        add_joined(program, pieces)
        cut = {piece: {0} for piece in pieces}
        share, params = share_of_variable(program, cut, (self.size,)), {*map(id, jaxpr.invars[: len(paths)])}
        return lambda variable: 1.0 if id(variable) in params else share(variable)  # a table of positions is whole


def sequence_splits(
    blueprint: Blueprint, loss: Callable, batch: Mapping[str, Any], *, sizes: Collection[int], precision: str
) -> tuple[dict[int, ModelSplit], str]:
    """Returns the traffic of each size of `context` that divides the dims it splits; or none, and the reason.

    Args:
      blueprint: A model that calls `jp.attention`.
      loss: A function of (model, batch), or of (model, batch, key).
      batch: Shapes and dtypes by name; the first dim is that of examples.
      sizes: Sizes to try, of at least 2.
      precision: Dtype of matmuls: "fp32" or "bf16".
    """
    params, model_state = jax.eval_shape(lambda: blueprint.init(jax.random.key(0)))
    rows = {name: jax.ShapeDtypeStruct((ROWS, *leaf.shape[1:]), leaf.dtype) for name, leaf in batch.items()}
    try:
        with sequences_split(blueprint) as names:
            summed = summed_loss(blueprint, loss, DTYPES[precision])
            jaxpr = jax.make_jaxpr(lambda *args: summed(*args)[0])(params, model_state, rows).jaxpr
    except JaxparError as error:  # the model does not support context: a plan says so, and has its other axes
        return {}, error.problems[0].got
    if not names:
        return {}, f'{blueprint.name} names no dim seq; jp.constrain(x, "batch", "seq", "embed") on its stream does'
    gathered = [*_gathers(jaxpr, {})]
    lengths = {length for _, _, length in _split_dims(jaxpr)}
    traffic = tuple(
        SplitTraffic(axis=AXIS, kind=kind, payload_per_row=size / ROWS, payload=0.0, times=times)
        for size, times in gathered
        for kind in ("all-gather", "reduce-scatter")
    )
    divided = [size for size in sizes if all(length % size == 0 for length in lengths)]
    if not divided:
        return {}, f"none of {', '.join(map(str, sizes))} divides the {max(lengths):,} tokens of a row"
    return dict.fromkeys(divided, ModelSplit(traffic=traffic)), ""


def _split_dims(jaxpr: Jaxpr) -> Iterator[tuple[Any, int, int]]:
    """Yields (variable, dim, size of the dim) of each dim that a constraint splits over `context`."""
    for eqn in jaxpr.eqns:
        if (spec := _spec(eqn)) is not None:
            result: Any = eqn.outvars[0]
            yield from ((result, dim, result.aval.shape[dim]) for dim, entry in enumerate(spec) if _is_split([entry]))
        for inner in jaxprs_in_params(eqn.params):
            yield from _split_dims(inner)


def _gathers(jaxpr: Jaxpr, specs: dict[int, tuple], times: int = 1) -> Iterator[tuple[int, int]]:
    """Yields the bytes of each array that `context` splits in one constraint and not in the next, and its runs."""
    for eqn in jaxpr.eqns:
        if (spec := _spec(eqn)) is not None:
            result: Any = eqn.outvars[0].aval
            if _is_split(specs.get(id(eqn.invars[0]), ())) and not _is_split(spec):
                yield math.prod(result.shape) * result.dtype.itemsize, times
            specs[id(eqn.outvars[0])] = spec
        runs = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jaxprs_in_params(eqn.params):
            yield from _gathers(inner, specs, runs)


def _spec(eqn: Any) -> tuple | None:
    return tuple(eqn.params["sharding"].spec) if eqn.primitive.name == "sharding_constraint" else None


def _is_split(spec: Sequence[Any]) -> bool:
    return any(AXIS in spec_axes(entry) for entry in spec)
