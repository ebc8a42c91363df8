"""Work, depth and average parallelism of a function, counted in its jaxpr: how many processors have something to do.

    a ─┐                work   3: all operations, the steps of one processor
       + ─┐             depth  2: those of the longest path, the steps of any number of processors
    b ─┘  │             work / depth = 1.5, the average parallelism
          + ─►
    c ─┐  │
       + ─┘
    d ─┘

What counts, of arrays of n elements:

    elementwise ops               n, in 1 step
    matmuls, convolutions         2 for each multiplication, as in `forward_flop`; sums of k in 1 + ceil(lg k) steps
    reductions of k to 1          k - 1 each, in ceil(lg k) steps
    sorts, sums so far            n ceil(lg k) along k, in ceil(lg k) steps (Cole; Hillis and Steele)
    reshapes, slices, casts       nothing: they move what there is

A scan has as many times the work of its body, and its depth as many times too: turns come one after the other. A
conditional has the work, and the depth, of its larger branch. A loop that turns as often as the data says counts once.

Source: Brent (1974); the words are Blelloch's, Programming parallel algorithms (1996).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

from jaxpar.hlo.traced_flop import matmul_flop

_MOVES = frozenset(
    "all_gather all_to_all axis_index bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy "
    "copy_p device_put dynamic_slice dynamic_update_slice expand_dims gather iota name optimization_barrier pad "
    "ppermute pvary random_seed random_unwrap random_wrap reshape rev scatter sharding_constraint slice split squeeze "
    "stop_gradient transpose".split()
)
_COMBINE = ("reduce", "scatter", "select_and_")  # the jaxprs in them say how two numbers become one


@dataclass(frozen=True, slots=True)
class WorkDepth:
    """Operations of a program.

    Attributes:
      work: All of them.
      depth: Those of its longest path.
      unknown: Whether some stand in a loop that turns as often as the data says, and count once.
    """

    work: int
    depth: int
    unknown: bool = False

    @property
    def parallelism(self) -> float:
        """How many processors have something to do, in the mean; 0 where there is nothing to do."""
        return self.work / self.depth if self.depth else 0.0

    def then(self, other: "WorkDepth", times: int = 1) -> "WorkDepth":
        """Returns this program with so many of another, one after the other, behind it."""
        return WorkDepth(
            self.work + times * other.work, self.depth + times * other.depth, self.unknown or other.unknown
        )


def work_depth(function: Callable, *args: Any) -> WorkDepth:
    """Returns what one evaluation of a function does.

    Args:
      function: Traced, not run.
      *args: Arrays or `jax.ShapeDtypeStruct`s.

    >>> square = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> work_depth(lambda a, b, c: a @ b @ c, square, square, square)
    WorkDepth(work=2048, depth=8, unknown=False)
    """
    return of_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def of_jaxpr(jaxpr: Any) -> WorkDepth:
    """Returns what one evaluation of a jaxpr does."""
    return _walk(jaxpr, [0] * len(jaxpr.invars))[0]


def _walk(jaxpr: Any, starts: Sequence[int]) -> tuple[WorkDepth, list[int]]:
    """Returns what a jaxpr does, and after how many steps each result is there, its arguments being there at `starts`.

    The depth is the number of the last step.
    """
    ready = dict(zip(jaxpr.invars, starts, strict=True))

    def at(variables: Sequence[Any]) -> list[int]:
        return [0 if isinstance(each, Literal) else ready.get(each, 0) for each in variables]

    done = WorkDepth(0, max(starts, default=0))
    for equation in jaxpr.eqns:
        found, ends = _equation(equation, at(equation.invars))
        done = WorkDepth(done.work + found.work, max(done.depth, found.depth), done.unknown or found.unknown)
        ready.update(zip(equation.outvars, ends, strict=True))
    return done, at(jaxpr.outvars)


def _equation(equation: Any, starts: Sequence[int]) -> tuple[WorkDepth, list[int]]:
    name, params = equation.primitive.name, equation.params
    begin, results = max(starts, default=0), len(equation.outvars)
    inner = [] if name.startswith(_COMBINE) else list(_jaxprs(params))
    if name == "cond":
        branches = [_walk(each, [max(start, starts[0]) for start in starts[1:]]) for each in inner]
        ends = [max(column) for column in zip(*(each for _, each in branches), strict=True)]
        works = [found for found, _ in branches]
        largest = WorkDepth(
            max(each.work for each in works), max(begin, *(each.depth for each in works)), any(e.unknown for e in works)
        )
        return largest, ends
    if not inner:
        own = _own(equation)
        end = begin + own.depth
        return WorkDepth(own.work, end), [end] * results
    if name not in ("scan", "while") and len(inner) == 1 and len(inner[0].invars) == len(starts):  # a call: inlined
        found, ends = _walk(inner[0], starts)
        manual = params["newly_manual_axes"] if name == "shard_map" else ()  # what is inside is one device's
        devices = math.prod(params["mesh"].shape[axis] for axis in manual)
        return WorkDepth(devices * found.work, found.depth, found.unknown), ends
    turn = WorkDepth(0, 0, unknown=name == "while")
    for each in inner:
        turn = turn.then(of_jaxpr(each))
    whole = WorkDepth(0, begin).then(turn, params["length"] if name == "scan" else 1)
    return whole, [whole.depth] * results


def _own(equation: Any) -> WorkDepth:
    """Returns what an equation does that has no other inside."""
    name, params = equation.primitive.name, equation.params
    made = max((_size(each) for each in equation.outvars), default=0)
    taken = max((_size(each) for each in equation.invars), default=0)
    if name in _MOVES or not made:
        return WorkDepth(0, 0)
    if flop := matmul_flop(equation):
        summed = max(flop // (2 * made), 1)
        return WorkDepth(flop, 1 + _lg(summed))
    if name.startswith(("reduce_window", "select_and_")):
        window = math.prod(params["window_dimensions"])
        return WorkDepth(min(made, taken) * window, _lg(window))
    if (name.startswith("reduce") and name != "reduce_precision") or name in ("argmax", "argmin"):
        return WorkDepth(max(taken - made, 0), _lg(taken // made))
    if name.startswith("cum") or name in ("sort", "top_k"):
        shape = equation.invars[0].aval.shape
        steps = _lg(shape[params.get("axis", params.get("dimension", -1))])
        return WorkDepth(taken * steps, steps)
    if name.startswith("scatter"):  # as deep as where all meet in one place
        updates = _size(equation.invars[2])
        return WorkDepth(updates, _lg(_size(equation.invars[1])) + 1)
    return WorkDepth(made, 1)


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def _lg(count: int) -> int:
    """Returns the steps in which so many numbers become one, two at a time."""
    return max(count - 1, 0).bit_length()


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner := getattr(each, "jaxpr", each), "eqns"):
                yield inner
