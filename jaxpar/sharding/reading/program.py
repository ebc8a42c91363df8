"""Follows the dims of a model's parameters through its program."""

from collections.abc import Sequence

from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

from jaxpar.sharding.reading.operations import CALLS, OPERATIONS, Array, otherwise
from jaxpar.sharding.reading.pieces import Dim, flat, fresh, join


def follow(jaxpr: Jaxpr, paths: Sequence[str]) -> dict[str, tuple[Dim, ...]]:
    """Returns the dims of every parameter, with what the program does with them.

    Args:
      jaxpr: The model's program.
      paths: Of the parameters that are its first arguments.
    """
    inputs = [new(var, frozenset()) for var in jaxpr.invars]
    for index, path in enumerate(paths):
        inputs[index] = Array(inputs[index].dims, frozenset({path}))
    _run(jaxpr, inputs)
    return {path: array.dims for path, array in zip(paths, inputs, strict=False)}


def new(var, source: frozenset[str] | None = None) -> Array:
    """Returns an array of which nothing is known but its shape."""
    return Array(tuple(fresh(size) for size in getattr(var.aval, "shape", ())), source)


def _run(jaxpr: Jaxpr, inputs: Sequence[Array]) -> list[Array]:
    known: dict[Var, Array] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {var: new(var, frozenset()) for var in jaxpr.constvars}

    def read(var) -> Array:
        return new(var, frozenset()) if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _equation(eqn, [read(var) for var in eqn.invars]), strict=True))
    return [read(var) for var in jaxpr.outvars]


def _equation(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(eqn, arrays)
    if name == "while":
        first = params["cond_nconsts"]
        body, consts = params["body_jaxpr"].jaxpr, params["body_nconsts"]
        carry = [Array(array.dims, None) for array in arrays[first + consts :]]
        return _again(_run(body, [*arrays[first : first + consts], *carry]), carry)
    if name == "cond":
        ways = [_run(branch.jaxpr, arrays[1:]) for branch in params["branches"]]
        return [_one_of(way) for way in zip(*ways, strict=True)]
    if key := next((key for key in CALLS if key in params), None):
        return _run(_open(params[key]), arrays)
    return OPERATIONS.get(name, otherwise)(eqn, arrays)


def _scan(eqn: JaxprEqn, arrays: list[Array]) -> list[Array]:
    # read off the ranks, as releases of JAX name the equation's parameters differently: what is stacked has a dim more
    body = _open(eqn.params["jaxpr"])
    rows = sum(_stacked(*pair) for pair in zip(eqn.invars, body.invars, strict=True))
    carried = sum(not _stacked(*pair) for pair in zip(eqn.outvars, body.outvars, strict=True))
    consts = len(arrays) - rows - carried
    carry = [Array(array.dims, None) for array in arrays[consts : consts + carried]]
    stacks = arrays[consts + carried :]
    for array in stacks:
        for piece in flat(array.dims[0]):
            piece.facts.scanned = True
    out = _run(body, [*arrays[:consts], *carry, *(Array(array.dims[1:], array.source) for array in stacks)])
    stacked = [Array((fresh(eqn.params["length"]), *array.dims), array.source) for array in out[carried:]]
    return [*_again(out[:carried], carry), *stacked]


def _stacked(outer, inner) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def _again(out: list[Array], carry: list[Array]) -> list[Array]:
    """Returns what a loop carries: what a turn leaves is what the next one begins with."""
    return [_one_of(pair) for pair in zip(carry, out, strict=True)]


def _one_of(arrays: Sequence[Array]) -> Array:
    for other in arrays[1:]:
        for one, dim in zip(arrays[0].dims, other.dims, strict=True):
            join(one, dim)
    return arrays[0]


def _open(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
