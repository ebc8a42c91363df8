"""Names dims of activations at lines of the model's source, as if these lines called `jp.constrain`.

The loss is traced, and a sharding constraint is inserted after each equation of the line that computes an activation.
The line of an equation is the innermost one outside of libraries. The bodies of functions with a custom gradient are
not changed, but their results get constraints.

A convolution's kernel may have the rank and the last sizes of its result: `[7, 7, 3, 16]` and `[examples, 32, 32, 16]`.
A constraint on it would split its windows, and XLA, as of jaxlib 0.12, computes wrong numbers from some that are split
unevenly. So every array is classified: constant, learned (computed from parameters and constants only), or activation
(computed from the batch or the model state, or by a matmul of a parameter and a constant). Only activations get names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxpar.errors import JaxparError, Problem
from jaxpar.hlo.source_frames import equation_frame
from jaxpar.hlo.text import SourceFrame
from jaxpar.jaxprs.dataflow import OPAQUE, rewrite, rewrite_param, shapes
from jaxpar.models.dim_names import constrain
from jaxpar.sharding.source_lines import SourceLine, parse_line

_CONSTANT, _LEARNED, _ACTIVATION = range(3)
_LOOPS = ("scan", "while")
_MATMULS = ("dot_general", "conv_general_dilated", "gather")

Origins = dict[Any, int]  # variable to _CONSTANT, _LEARNED or _ACTIVATION
Names = tuple[str | None, ...]


def name_lines(function: Callable, activations: Mapping[str, Sequence[str | None]], *, all_used: bool) -> Callable:
    """Wraps a function of (params, model state, batch) to name the dims of its activations.

    Args:
      function: The function.
      activations: As in `jaxpar.parallel.declaration.Parallel`.
      all_used: Whether every key must match an array: an activation, or one that this function makes of constants.

    Raises:
      JaxparError: At a call, if a key matches no array.
    """

    def run(params: object, *others: Any) -> Any:
        naming = _LineNamer(activations)
        learned = len(jax.tree.leaves(params))
        result = rewrite(function, lambda jaxpr: naming.jaxpr(jaxpr, _argument_origins(jaxpr, learned), None)[0])(
            params, *others
        )
        if all_used and (missing := naming.lines.keys() - naming.used - naming.constant):
            raise JaxparError(*(_unused_problem(line, naming.lines[line]) for line in missing))
        return result

    return run


def lines_used(jaxpr: Jaxpr, learned: int, activations: Mapping[str, Sequence[str | None]]) -> set[str]:
    """Returns the keys of `activations` that name an array of a jaxpr.

    Args:
      jaxpr: A program.
      learned: Number of its first arguments that are parameters.
      activations: As in `jaxpar.parallel.declaration.Parallel`.
    """
    naming = _LineNamer(activations)
    naming.jaxpr(jaxpr, _argument_origins(jaxpr, learned), None)
    return {str(line) for line in naming.used}


def _argument_origins(jaxpr: Jaxpr, learned: int) -> list[int]:
    return [_LEARNED] * learned + [_ACTIVATION] * (len(jaxpr.invars) - learned)


def _unused_problem(line: SourceLine, names: Names) -> Problem:
    return Problem(
        f"activations={{{str(line)!r}: {names}}}: the line computes no such array of {len(names)} dims",
        "every key names an array of the model's forward pass: a line, perhaps the column of an expression (not with "
        "python -X no_debug_ranges), the sizes of the last dims, and a name for each dim",
        "`jaxpar specs JOB`, or jp.find_specs of this loss, for the lines of today's source",
    )


class _LineNamer:
    """Adds constraints to a jaxpr and to those of its calls.

    Attributes:
      lines: Line to the names of the dims of its activations.
      used: The lines that compute such an activation.
      constant: The lines that compute such an array from constants alone: from a mask of ones that the loss creates,
        say, while in the model's example call it was an input.
    """

    def __init__(self, activations: Mapping[str, Sequence[str | None]]):
        self.lines = {line: tuple(names) for key, names in activations.items() if (line := parse_line(key))}
        self.used: set[SourceLine] = set()
        self.constant: set[SourceLine] = set()

    def jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[int], enclosing: SourceFrame | None) -> tuple[Jaxpr, list[int]]:
        """Returns the jaxpr with constraints, and the origins of its results."""
        origins: Origins = dict(zip(jaxpr.invars, inputs, strict=True))
        eqns = [new for eqn in jaxpr.eqns for new in self.equation(eqn, origins, enclosing)]
        return jaxpr.replace(eqns=eqns), [_origin(var, origins) for var in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, origins: Origins, enclosing: SourceFrame | None) -> Iterator[JaxprEqn]:
        """Yields the equation, and the constraints on its results; records the origins of these."""
        frame, inputs = equation_frame(eqn, enclosing), [_origin(var, origins) for var in eqn.invars]
        results = [_result_origin(eqn.primitive.name, inputs)] * len(eqn.outvars)
        if eqn.primitive.name == "optimization_barrier":  # the identity of each operand, before any convolution
            results = inputs
        if not eqn.primitive.name.startswith(OPAQUE):
            eqn, results = self.calls(eqn, inputs, results, frame)
        origins.update(zip(eqn.outvars, results, strict=True))
        outs, constraints = list(eqn.outvars), []
        for index, (var, shape) in enumerate(zip(eqn.outvars, shapes(eqn.outvars), strict=True)):
            line = _find_line(frame, shape.shape, self.lines)
            if line is not None and origins[var] == _CONSTANT:
                self.constant.add(line)
            if line is None or origins[var] != _ACTIVATION:
                continue
            self.used.add(line)
            # a parameter that is broadcast to examples has the same rank
            names = tuple(None if size == 1 else name for size, name in zip(shape.shape, self.lines[line], strict=True))
            placed = jax.make_jaxpr(lambda x, names=names: constrain(x, *names))(shape).jaxpr
            if not placed.eqns:  # no axis splits any of these names
                continue
            outs[index] = placed.invars[0]
            *first, last = placed.eqns
            constraints += [*first, last.replace(outvars=[var], source_info=eqn.source_info)]
        yield eqn.replace(outvars=outs) if constraints else eqn
        yield from constraints

    def calls(
        self, eqn: JaxprEqn, inputs: Sequence[int], results: list[int], frame: SourceFrame | None
    ) -> tuple[JaxprEqn, list[int]]:
        """Returns an equation with constraints in its inner programs, and the origins of its results."""
        if eqn.primitive.name in _LOOPS and _ACTIVATION in inputs:  # a carry that begins as zeros
            inputs = [_ACTIVATION if origin == _CONSTANT else origin for origin in inputs]
        made: list[list[int]] = []

        def change(inner: Jaxpr) -> Jaxpr:
            # the last operands: before them are those of a loop's condition, or the index of a branch
            changed, origins = self.jaxpr(inner, inputs[len(inputs) - len(inner.invars) :], frame)
            made.append(origins)
            return changed

        eqn = eqn.replace(params={name: rewrite_param(value, change) for name, value in eqn.params.items()})
        return eqn, made[0] if len(made) == 1 and len(made[0]) == len(results) else results


def _origin(var: object, origins: Origins) -> int:
    return _CONSTANT if isinstance(var, Literal) else origins.get(var, _CONSTANT)


def _result_origin(primitive: str, inputs: Sequence[int]) -> int:
    """Returns the origin of an equation's results."""
    if primitive in _MATMULS and {*inputs} == {_CONSTANT, _LEARNED}:  # the constant is noise, or positions
        return _ACTIVATION
    return max(inputs, default=_CONSTANT)


def _find_line(frame: SourceFrame | None, shape: Sequence[int], lines: Mapping[SourceLine, Names]) -> SourceLine | None:
    """Returns the key of an array of this shape that a line computes; None if there is none.

    Of several it is one with a column, or that with the most sizes.
    """
    if frame is None:
        return None
    found = [
        line for line, names in lines.items()
        if len(names) == len(shape) and line.matches(frame.file, frame.line, shape, frame.column)
    ]  # fmt: skip
    return max(found, key=lambda line: (line.column is not None, len(line.sizes)), default=None)
