"""Names dims of activations at lines of the model's source, as if these lines called `jp.constrain`.

The loss is traced, and a constraint follows each equation that the line computes. A line is the innermost one outside
of libraries. Functions with a custom gradient keep their bodies; their results are named.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxpar.errors import JaxparError, Problem
from jaxpar.hlo.attribution import equation_frame
from jaxpar.hlo.text import SourceFrame
from jaxpar.jaxprs.dataflow import rewrite, rewrite_param, shapes
from jaxpar.models.dim_names import constrain
from jaxpar.sharding.source_lines import SourceLine, parse_line

_OWN = ("custom_", "shard_map")  # custom gradients and shard_map bodies are not rewritten

Names = tuple[str | None, ...]


def name_lines(function: Callable, activations: Mapping[str, Sequence[str | None]], *, all_used: bool) -> Callable:
    """Wraps a function of pytrees of arrays to name the dims of its activations.

    Args:
      function: The function.
      activations: As in `jaxpar.parallel.declaration.Parallel`.
      all_used: Whether every key must match an array.

    Raises:
      JaxparError: At a call, if a key matches no array.
    """
    lines = {line: tuple(names) for key, names in activations.items() if (line := parse_line(key))}

    def run(*args: Any) -> Any:
        used: set[SourceLine] = set()
        result = rewrite(function, lambda jaxpr: _named(jaxpr, lines, used))(*args)
        if all_used and (missing := lines.keys() - used):
            raise JaxparError(*(_unused(line, lines[line]) for line in missing))
        return result

    return run


def lines_used(jaxpr: Jaxpr, activations: Mapping[str, Sequence[str | None]]) -> set[str]:
    """Returns the keys of `activations` that name an array of a jaxpr."""
    lines = {line: tuple(names) for key, names in activations.items() if (line := parse_line(key))}
    return {str(line) for line in _used(jaxpr, lines, None)}


def _used(jaxpr: Jaxpr, lines: Mapping[SourceLine, Names], enclosing: SourceFrame | None) -> Iterator[SourceLine]:
    for eqn in jaxpr.eqns:
        frame = equation_frame(eqn, enclosing)
        yield from filter(None, (_line_of(frame, shape.shape, lines) for shape in shapes(eqn.outvars)))
        if not eqn.primitive.name.startswith(_OWN):
            for inner in jaxprs_in_params(eqn.params):
                yield from _used(inner, lines, frame)


def _unused(line: SourceLine, names: Names) -> Problem:
    return Problem(
        f"activations={{{str(line)!r}: {names}}}: the line computes no such array of {len(names)} dims",
        "every key names an array of the model's forward pass: a line, the sizes of its last dims, a name for each dim",
        "`jaxpar specs JOB`, or jp.find_specs, for the lines of today's source",
    )


def _named(
    jaxpr: Jaxpr, lines: Mapping[SourceLine, Names], used: set[SourceLine], enclosing: SourceFrame | None = None
) -> Jaxpr:
    return jaxpr.replace(eqns=[new for eqn in jaxpr.eqns for new in _equations(eqn, lines, used, enclosing)])


def _equations(
    eqn: JaxprEqn, lines: Mapping[SourceLine, Names], used: set[SourceLine], enclosing: SourceFrame | None
) -> Iterator[JaxprEqn]:
    frame = equation_frame(eqn, enclosing)
    if not eqn.primitive.name.startswith(_OWN):
        change = lambda inner: _named(inner, lines, used, frame)  # noqa: E731
        eqn = eqn.replace(params={name: rewrite_param(value, change) for name, value in eqn.params.items()})
    outs, constraints = list(eqn.outvars), []
    for index, (var, shape) in enumerate(zip(eqn.outvars, shapes(eqn.outvars), strict=True)):
        line = _line_of(frame, shape.shape, lines)
        if line is None:
            continue
        used.add(line)
        # a parameter that is broadcast to examples has the same rank
        names = tuple(None if size == 1 else name for size, name in zip(shape.shape, lines[line], strict=True))
        placed = jax.make_jaxpr(lambda x, names=names: constrain(x, *names))(shape).jaxpr
        if not placed.eqns:  # no name of these has a rule
            continue
        outs[index] = placed.invars[0]
        *first, last = placed.eqns
        constraints += [*first, last.replace(outvars=[var], source_info=eqn.source_info)]
    yield eqn.replace(outvars=outs) if constraints else eqn
    yield from constraints


def _line_of(frame: SourceFrame | None, shape: Sequence[int], lines: Mapping[SourceLine, Names]) -> SourceLine | None:
    """Returns the key, with the most sizes, of an array of this shape that a line computes; None if there is none."""
    if frame is None:
        return None
    found = [
        line for line, names in lines.items()
        if len(names) == len(shape) and line.matches(frame.file, frame.line, shape)
    ]  # fmt: skip
    return max(found, key=lambda line: len(line.sizes), default=None)
