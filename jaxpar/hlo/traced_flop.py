"""Counts the FLOP of matmuls and convolutions in a jaxpr, before compilation and sharding.

`forward_flop` excludes recomputation, as in MFU (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
`traced_matmuls` has all matmuls of a step: with the user's rematerialization, and the idle ticks of a pipeline.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Jaxpr

from jaxpar.hlo.trip_counts import branch_runs
from jaxpar.sharding.names import CHOICE

if TYPE_CHECKING:  # a plain step loads no pipeline
    from jaxpar.pipeline.tables.schedule import Schedule


def forward_flop(function: Callable, *args: Any) -> int:
    """Counts the FLOP of one evaluation, of matmuls and convolutions only.

    Args:
      function: A function, which is traced but not run.
      *args: Arrays or `jax.ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def traced_matmuls(
    jaxpr: Jaxpr,
    schedule: "Schedule | None" = None,
    times: float | None = 1,
    *,
    skip: Callable[[Any], bool] = lambda equation: False,
) -> Iterator[tuple[Any, Any]]:
    """Yields (equation, FLOP) of each matmul and convolution that a traced step runs, over all devices.

    FLOP are None inside a loop whose trip count depends on the data. All branches of a conditional count, as in
    `hardware_flop`.

    Args:
      jaxpr: The jaxpr of `jax.jit(...).trace(...)`.
      schedule: The table that it runs, if it has a pipeline.
      times: Number of runs of the jaxpr.
      skip: Returns whether to omit an equation and its inner jaxprs.
    """
    for equation in jaxpr.eqns:
        if skip(equation):
            continue
        if flop := matmul_flop(equation):
            yield equation, None if times is None else times * flop
            continue
        name, params = equation.primitive.name, equation.params
        inner_times = times
        if name == "while":
            inner_times = None
        elif times is not None and name == "scan":
            inner_times = times * params["length"]
        elif times is not None and name == "shard_map":  # its body is one device's along the manual axes
            inner_times = times * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        elif times is not None and schedule and str(equation.source_info.name_stack).endswith(CHOICE):
            # the loops around it count ticks, but a stage takes each branch once for every microbatch and chunk
            branches = params.get("branches", ())
            for index, branch in enumerate(branches):
                runs = times * branch_runs(schedule, len(branches), index) / schedule.ticks
                yield from traced_matmuls(branch.jaxpr, schedule, runs, skip=skip)
            continue
        for value in params.values():
            for inner in _jaxprs(value):
                yield from traced_matmuls(inner, schedule, inner_times, skip=skip)


def matmul_flop(equation: Any) -> int:
    """Returns the FLOP of one matmul or convolution; 0 for any other equation.

    Of a ragged matmul they are those of each entry with the matrix of its own group; see `ragged_groups`.
    """
    name = equation.primitive.name
    if name == "dot_general":
        (contract, _), _ = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[dim] for dim in contract)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        feature_dim = equation.params["dimension_numbers"].rhs_spec[0]
        zeros = math.prod(equation.params["lhs_dilation"])  # zeros between the inputs are not multiplied
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[feature_dim] // zeros
    if name == "ragged_dot_general":
        numbers = equation.params["ragged_dot_dimension_numbers"]
        (_, contract), (_, batch) = numbers.dot_dimension_numbers
        lhs, rhs = (operand.aval.shape for operand in equation.invars[:2])
        shared = {*contract, *batch, *numbers.rhs_group_dimensions}
        return 2 * math.prod(lhs) * math.prod(size for dim, size in enumerate(rhs) if dim not in shared)
    return 0


def ragged_groups(equation: Any) -> int:
    """Returns the number of groups of a ragged matmul, as experts; 1 for any other equation.

    XLA multiplies each entry by the matrices of all groups, on CPUs and GPUs (jax 0.12.0).
    """
    return equation.invars[2].aval.shape[-1] if equation.primitive.name == "ragged_dot_general" else 1


def equation_flop(equation: Any) -> int:
    """Returns the FLOP of an equation with its inner jaxprs; of a conditional, those of its largest branch."""
    name = equation.primitive.name
    times = equation.params.get("length", 1) if name == "scan" else 1
    inner = [_count(sub) for value in equation.params.values() for sub in _jaxprs(value)]
    return matmul_flop(equation) + (max(inner, default=0) if name == "cond" else times * sum(inner))


def _count(jaxpr: Jaxpr) -> int:
    return sum(map(equation_flop, jaxpr.eqns))


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    """Yields the jaxprs in a parameter of an equation: a jaxpr, or those of a sequence."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)
