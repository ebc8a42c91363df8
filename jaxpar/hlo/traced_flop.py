"""FLOP of the model, counted in a jaxpr, before anything is compiled or split: of matmuls and convolutions alone.

`forward_flop` has no recomputation in it, as in MFU (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
`traced_matmuls` has all that a step was asked to do: rematerialization that the user chose, and what the stages of a
pipeline run in ticks that are idle.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.sharding.names import CHOICE


def forward_flop(function: Callable, *args: Any) -> int:
    """Returns the FLOP of one evaluation, of matmuls and convolutions only.

    Args:
      function: Traced, not run.
      *args: Arrays or `jax.ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def traced_matmuls(
    jaxpr: Any,
    schedule: Schedule | None = None,
    times: float | None = 1,
    *,
    skip: Callable[[Any], bool] = lambda equation: False,
) -> Iterator[tuple[Any, Any]]:
    """Yields (equation, FLOP) of each matmul and convolution that a traced step runs, over all devices.

    FLOP are None where the equation stands in a loop that turns as often as the data says. Branches of a conditional
    all count, as they do in `hardware_flop`.

    Args:
      jaxpr: As `jax.jit(...).trace(...)` has it.
      schedule: The table that it runs, where it is a pipeline's.
      times: How often the jaxpr is run.
      skip: Whether an equation is left out, with all that it calls.
    """
    for equation in jaxpr.eqns:
        if skip(equation):
            continue
        if flop := matmul_flop(equation):
            yield equation, None if times is None else times * flop
            continue
        name, params = equation.primitive.name, equation.params
        each = times
        if name == "while":
            each = None
        elif times is not None and name == "scan":
            each = times * params["length"]
        elif times is not None and name == "shard_map":  # what is inside is one device's, of the axes that are manual
            each = times * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        elif times is not None and schedule and str(equation.source_info.name_stack).endswith(CHOICE):
            # the loops around it count ticks, but a stage takes each branch once for every microbatch and chunk
            each = times * schedule.microbatches * schedule.chunks / schedule.ticks
        for value in params.values():
            for inner in _jaxprs(value):
                yield from traced_matmuls(inner, schedule, each, skip=skip)


def matmul_flop(equation: Any) -> int:
    """Returns the FLOP of one matmul or convolution; 0 of any other equation."""
    name = equation.primitive.name
    if name == "dot_general":
        (contract, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contract)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_features = equation.params["dimension_numbers"].rhs_spec[0]
        zeros = math.prod(equation.params["lhs_dilation"])  # between the inputs: not multiplied
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[out_features] // zeros
    return 0


def _count(jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        total += matmul_flop(equation)
        times = equation.params.get("length", 1) if name == "scan" else 1
        inner = [_count(sub) for value in equation.params.values() for sub in _jaxprs(value)]
        total += max(inner, default=0) if name == "cond" else times * sum(inner)
    return total


def _jaxprs(value):
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)
