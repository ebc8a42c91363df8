"""Traces a function on shapes: its matmuls, and what its backward pass keeps."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxpar.errors import refuse
from jaxpar.models.settings.computing import POLICIES, by_model

ROWS = 2, 4  # rows that a model is traced with: a single one could be broadcast

Kind = Literal["weights", "batched", "convolution"]


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul, or several alike.

    Attributes:
      flop: FLOP of one, per row.
      times: How many a forward pass has.
      kind: With weights, with a batch dim, or a convolution.
    """

    flop: float
    times: int
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A forward pass and what it leaves.

    Attributes:
      matmuls: Of a forward pass.
      kept: Remat policy to the bytes that a row leaves for the backward pass.
      blocks: Parts that remat is placed around; 0 where the model places none.
    """

    matmuls: tuple[Matmul, ...]
    kept: Mapping[str, float]
    blocks: int


def trace(
    forward: Callable[[str], Callable], params: Any, known: Callable[[int], Any], *, takes_remat: bool, name: str
) -> Trace:
    """Returns what tracing shows; nothing is compiled and no array is made.

    Args:
      forward: Remat policy to a function (params, known) to the loss.
      params: Shapes of the parameters.
      known: Rows to the shapes of what else the function takes: a batch, and state that is no parameter.
      takes_remat: Whether the model places remat itself; around the whole of a model it saves nothing.
      name: Of the model, for messages.

    Raises:
      JaxparError: If nothing that is kept grows with the rows.
    """
    few, more = (known(rows) for rows in ROWS)
    kept = {}
    for policy in [name for name in POLICIES if by_model(name) == name] if takes_remat else ["none"]:
        function = forward(policy)
        kept[policy] = (_left(function, params, more) - _left(function, params, few)) / (ROWS[1] - ROWS[0])
    if kept["none"] <= 0:
        raise refuse(
            f"{name}: its backward pass keeps nothing of a row",
            rule="what is planned is a loss that depends on parameters and on rows",
            fix="a model and a loss that read the batch",
        )
    one = jax.make_jaxpr(forward("none"))(params, few).jaxpr
    again = jax.make_jaxpr(forward("full"))(params, few).jaxpr if takes_remat else None
    return Trace(
        matmuls=tuple(Matmul(flop=flop / ROWS[0], times=times, kind=kind) for flop, times, kind in _matmuls(one)),
        kept=kept,
        blocks=_blocks(again) if again is not None else 0,
    )


def _left(forward: Callable, params: Any, known: Any) -> int:
    """Returns the bytes that `jax.vjp` by the parameters keeps."""

    def pull(params, known):
        return jax.vjp(lambda params: forward(params, known), params)[1]

    left = jax.tree.leaves(jax.eval_shape(pull, params, known))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in left)


def _matmuls(jaxpr: Any, times: int = 1) -> Iterator[tuple[float, int, Kind]]:
    """Yields (FLOP of one, how many, kind) of each matmul in a jaxpr; a loop of unknown length counts once."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            flop = 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
            yield flop, times, "batched" if batched else "weights"
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            yield 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / outputs, times, "convolution"
        else:
            for inner in _inner(eqn):
                yield from _matmuls(inner, times * eqn.params["length"] if name == "scan" else times)


def _blocks(jaxpr: Any, times: int = 1) -> int:
    """Returns how many parts of a jaxpr are computed again as a whole."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("checkpoint", "remat2"):
            count += times
        else:
            again = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            count += sum(_blocks(inner, again) for inner in _inner(eqn))
    return count


def _inner(eqn: Any) -> list[Any]:
    """Returns the jaxprs within an equation; of a choice, the first."""
    if eqn.primitive.name == "cond":
        return [eqn.params["branches"][0].jaxpr]
    closed = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
    return [each for each in closed if hasattr(each, "eqns")]
