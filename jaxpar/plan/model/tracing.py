"""Traces a function on shapes: its matmuls, and the residuals of its backward pass."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.errors import refuse
from jaxpar.models.settings.computing import POLICIES, model_policy
from jaxpar.sharding.names import DISPATCH

ROWS = 2, 4  # batch sizes for tracing: a single row could be broadcast

Kind = Literal["weights", "batched", "convolution"]


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul, or several equal ones.

    Attributes:
      flop: FLOP of one, per row.
      times: Number of them in a forward pass.
      kind: "weights", "batched" (has a batch dim) or "convolution".
    """

    flop: float
    times: int
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Matmuls and residuals of a forward pass.

    Attributes:
      matmuls: Matmuls of a forward pass.
      residual_bytes: Remat policy to the bytes of residuals per row.
      blocks: Number of blocks under remat; 0 if the model has none.
      slots: Of each mixture of experts (`jp.mixture`), the elements of its slots per row, and the number of such
        mixtures in a forward pass.
    """

    matmuls: tuple[Matmul, ...]
    residual_bytes: Mapping[str, float]
    blocks: int
    slots: tuple[tuple[float, int], ...] = ()


def trace(
    forward: Callable[[str], Callable], params: Any, inputs: Callable[[int], Any], *, takes_remat: bool, name: str
) -> ModelTrace:
    """Traces a loss and its backward pass, without compiling and without arrays.

    Args:
      forward: Remat policy to a function (params, known) that returns the loss.
      params: Shapes of the parameters.
      inputs: Rows to the shapes of the other inputs: a batch, and state that is not a parameter.
      takes_remat: Whether the model applies remat to its blocks; remat around a whole model saves nothing.
      name: Name of the model, for messages.

    Raises:
      JaxparError: If no residual grows with the rows.
    """
    small, large = (inputs(rows) for rows in ROWS)
    residuals = {}
    for policy in [name for name in POLICIES if model_policy(name) == name] if takes_remat else ["none"]:
        function = forward(policy)
        residuals[policy] = (_residual_bytes(function, params, large) - _residual_bytes(function, params, small)) / (
            ROWS[1] - ROWS[0]
        )
    if residuals["none"] <= 0:
        raise refuse(
            f"{name}: its backward pass keeps nothing of a row",
            rule="a plan needs a loss that depends on the parameters and on the rows of the batch",
            fix="a model and a loss that read the batch",
        )
    jaxpr = jax.make_jaxpr(forward("none"))(params, small).jaxpr
    remat_jaxpr = jax.make_jaxpr(forward("full"))(params, small).jaxpr if takes_remat else None
    return ModelTrace(
        matmuls=tuple(Matmul(flop=flop / ROWS[0], times=times, kind=kind) for flop, times, kind in _matmuls(jaxpr)),
        residual_bytes=residuals,
        blocks=_blocks(remat_jaxpr) if remat_jaxpr is not None else 0,
        slots=tuple((elements / ROWS[0], times) for elements, times in _slots(jaxpr)),
    )


def _residual_bytes(forward: Callable, params: Any, inputs: Any) -> int:
    """Returns the bytes of residuals of `jax.vjp` with respect to the parameters."""

    def pull(params, known):
        return jax.vjp(lambda params: forward(params, known), params)[1]

    residuals = jax.tree.leaves(jax.eval_shape(pull, params, inputs))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in residuals)


def _matmuls(jaxpr: Any, times: int = 1) -> Iterator[tuple[float, int, Kind]]:
    """Yields (FLOP, count, kind) of each matmul in a jaxpr; a loop of unknown length counts once."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
            lhs_shape = eqn.invars[0].aval.shape
            flop = 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs_shape[dim] for dim in contracted)
            yield flop, times, "batched" if batched else "weights"
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            yield 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / outputs, times, "convolution"
        else:
            for inner in _inner(eqn):
                yield from _matmuls(inner, times * eqn.params["length"] if name == "scan" else times)


def _slots(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[int, int]]:
    """Yields the elements of the slots of each mixture of experts, and its number of runs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("custom_vjp_call") and DISPATCH in str(eqn.source_info.name_stack):
            slots: Any = eqn.outvars[0].aval
            yield math.prod(slots.shape), times
        else:
            for inner in _inner(eqn):
                yield from _slots(inner, times * eqn.params["length"] if eqn.primitive.name == "scan" else times)


def _blocks(jaxpr: Jaxpr, times: int = 1) -> int:
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("checkpoint", "remat2"):
            count += times
        else:
            inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            count += sum(_blocks(inner, inner_times) for inner in _inner(eqn))
    return count


def _inner(eqn: JaxprEqn) -> list[Any]:
    """Returns the jaxprs inside an equation; of a `cond`, the first branch."""
    if eqn.primitive.name == "cond":
        return [eqn.params["branches"][0].jaxpr]
    closed = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
    return [jaxpr for jaxpr in closed if hasattr(jaxpr, "eqns")]
