"""Work, depth and average parallelism of a function, counted in its jaxpr.

    a ─┐                work   3: all operations, the steps of one processor
       + ─┐             depth  2: operations on the longest path, the steps of unboundedly many processors
    b ─┘  │             work / depth = 1.5, the average parallelism
          + ─►
    c ─┐  │
       + ─┘
    d ─┘

Work and depth for arrays of n elements:

    elementwise ops               n, in 1 step
    matmuls, convolutions         2 per multiplication, as in `forward_flop`; sums of k in 1 + ceil(lg k) steps
    reductions of k to 1          k - 1 each, in ceil(lg k) steps
    sorts, cumulative sums        n ceil(lg k) along k, in ceil(lg k) steps (Cole; Hillis and Steele)
    reshapes, slices, casts       0: they only move data

A scan multiplies the work and the depth of its body by its length. A `cond` has the work, and the depth, of its larger
branch. A loop whose length depends on the data counts once.

Source: Brent (1974); the words are Blelloch's, Programming parallel algorithms (1996).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.hlo.flop import matmul_flop

_MOVES = frozenset(
    "all_gather all_to_all axis_index bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy "
    "copy_p device_put dynamic_slice dynamic_update_slice expand_dims gather iota name optimization_barrier pad "
    "ppermute pvary random_seed random_unwrap random_wrap reshape rev scatter sharding_constraint slice split squeeze "
    "stop_gradient transpose".split()
)
_COMBINE = ("reduce", "scatter", "select_and_")  # their inner jaxprs combine two numbers into one


@dataclass(frozen=True, slots=True)
class WorkDepth:
    """Operations of a program.

    Attributes:
      work: All operations.
      depth: Operations on the longest path.
      unknown: Whether a loop has a data-dependent length, and counts once.
    """

    work: int
    depth: int
    unknown: bool = False

    @property
    def parallelism(self) -> float:
        """Average number of busy processors; 0 for a program without operations."""
        return self.work / self.depth if self.depth else 0.0

    def then(self, other: "WorkDepth", times: int = 1) -> "WorkDepth":
        """Returns this program followed by another one, repeated `times` times."""
        return WorkDepth(
            self.work + times * other.work, self.depth + times * other.depth, self.unknown or other.unknown
        )


def work_depth(function: Callable, *args: Any) -> WorkDepth:
    """Counts work and depth of one evaluation of a function.

    Args:
      function: The function; it is traced, not run.
      *args: Arrays or `jax.ShapeDtypeStruct`s.

    >>> square = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> work_depth(lambda a, b, c: a @ b @ c, square, square, square)
    WorkDepth(work=2048, depth=8, unknown=False)
    """
    return of_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def of_jaxpr(jaxpr: Jaxpr) -> WorkDepth:
    """Counts work and depth of one evaluation of a jaxpr."""
    return _walk(jaxpr, [0] * len(jaxpr.invars))[0]


def _walk(jaxpr: Jaxpr, starts: Sequence[int]) -> tuple[WorkDepth, list[int]]:
    """Returns work and last step of a jaxpr, and the step at which each result is ready.

    Its arguments are ready at the steps `starts`.
    """
    ready = dict(zip(jaxpr.invars, starts, strict=True))

    def ready_steps(variables: Sequence[Any]) -> list[int]:
        return [0 if isinstance(variable, Literal) else ready.get(variable, 0) for variable in variables]

    counted = WorkDepth(0, max(starts, default=0))
    for equation in jaxpr.eqns:
        cost, ends = _equation(equation, ready_steps(equation.invars))
        counted = WorkDepth(counted.work + cost.work, max(counted.depth, cost.depth), counted.unknown or cost.unknown)
        ready.update(zip(equation.outvars, ends, strict=True))
    return counted, ready_steps(jaxpr.outvars)


def _equation(equation: JaxprEqn, starts: Sequence[int]) -> tuple[WorkDepth, list[int]]:
    name, params = equation.primitive.name, equation.params
    first_step, results = max(starts, default=0), len(equation.outvars)
    inner = [] if name.startswith(_COMBINE) else list(_jaxprs(params))
    if name == "cond":
        branches = [_walk(entry, [max(start, starts[0]) for start in starts[1:]]) for entry in inner]
        ends = [max(column) for column in zip(*(entry for _, entry in branches), strict=True)]
        works = [cost for cost, _ in branches]
        largest = WorkDepth(
            max(entry.work for entry in works),
            max(first_step, *(entry.depth for entry in works)),
            any(work.unknown for work in works),
        )
        return largest, ends
    if not inner:
        leaf_cost = _leaf(equation)
        end = first_step + leaf_cost.depth
        return WorkDepth(leaf_cost.work, end), [end] * results
    if name not in ("scan", "while") and len(inner) == 1 and len(inner[0].invars) == len(starts):  # inlined like a call
        cost, ends = _walk(inner[0], starts)
        manual = params["newly_manual_axes"] if name == "shard_map" else ()  # the inner jaxpr is of one device
        devices = math.prod(params["mesh"].shape[axis] for axis in manual)
        return WorkDepth(devices * cost.work, cost.depth, cost.unknown), ends
    body = WorkDepth(0, 0, unknown=name == "while")
    for entry in inner:
        body = body.then(of_jaxpr(entry))
    loop = WorkDepth(0, first_step).then(body, params["length"] if name == "scan" else 1)
    return loop, [loop.depth] * results


def _leaf(equation: Any) -> WorkDepth:
    """Counts work and depth of an equation without inner jaxprs."""
    name, params = equation.primitive.name, equation.params
    out_size = max((_size(variable) for variable in equation.outvars), default=0)
    in_size = max((_size(variable) for variable in equation.invars), default=0)
    if name in _MOVES or not out_size:
        return WorkDepth(0, 0)
    if flop := matmul_flop(equation):
        summed = max(flop // (2 * out_size), 1)
        return WorkDepth(flop, 1 + _lg(summed))
    if name.startswith(("reduce_window", "select_and_")):
        window = math.prod(params["window_dimensions"])
        return WorkDepth(min(out_size, in_size) * window, _lg(window))
    if (name.startswith("reduce") and name != "reduce_precision") or name in ("argmax", "argmin"):
        return WorkDepth(max(in_size - out_size, 0), _lg(in_size // out_size))
    if name.startswith("cum") or name in ("sort", "top_k"):
        shape = equation.invars[0].aval.shape
        steps = _lg(shape[params.get("axis", params.get("dimension", -1))])
        return WorkDepth(in_size * steps, steps)
    if name.startswith("scatter"):  # depth of the worst case: all updates at one index
        updates = _size(equation.invars[2])
        return WorkDepth(updates, _lg(_size(equation.invars[1])) + 1)
    return WorkDepth(out_size, 1)


def _size(variable: Var | Literal) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def _lg(count: int) -> int:
    """Returns the steps of a pairwise reduction of this many numbers."""
    return max(count - 1, 0).bit_length()


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for entry in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner := getattr(entry, "jaxpr", entry), "eqns"):
                yield inner
