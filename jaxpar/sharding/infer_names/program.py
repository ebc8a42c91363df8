"""Follows the dims of a model's parameters through its program."""

from collections.abc import Sequence

from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

from jaxpar.sharding.infer_names.dim_pieces import Dim, flat, fresh, join
from jaxpar.sharding.infer_names.operations import CALLS, OPERATIONS, TracedArray, elementwise


def follow_dims(jaxpr: Jaxpr, paths: Sequence[str]) -> dict[str, tuple[Dim, ...]]:
    """Returns the dims of every parameter, with their use in the program.

    Args:
      jaxpr: The model's program.
      paths: Paths of the parameters that are its first arguments.
    """
    inputs = [new_array(var, frozenset()) for var in jaxpr.invars]
    for index, path in enumerate(paths):
        inputs[index] = TracedArray(inputs[index].dims, frozenset({path}))
    _run(jaxpr, inputs)
    return {path: array.dims for path, array in zip(paths, inputs, strict=False)}


def new_array(var, source: frozenset[str] | None = None) -> TracedArray:
    """Returns an array with the shape of a variable, and without facts."""
    return TracedArray(tuple(fresh(size) for size in getattr(var.aval, "shape", ())), source)


def _run(jaxpr: Jaxpr, inputs: Sequence[TracedArray]) -> list[TracedArray]:
    arrays: dict[Var, TracedArray] = dict(zip(jaxpr.invars, inputs, strict=True))
    arrays |= {var: new_array(var, frozenset()) for var in jaxpr.constvars}

    def read_var(var) -> TracedArray:
        return new_array(var, frozenset()) if isinstance(var, Literal) else arrays[var]

    for eqn in jaxpr.eqns:
        arrays.update(zip(eqn.outvars, _equation(eqn, [read_var(var) for var in eqn.invars]), strict=True))
    return [read_var(var) for var in jaxpr.outvars]


def _equation(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(eqn, arrays)
    if name == "while":
        first = params["cond_nconsts"]
        body, consts = params["body_jaxpr"].jaxpr, params["body_nconsts"]
        carry = [TracedArray(array.dims, None) for array in arrays[first + consts :]]
        return _join_carry(_run(body, [*arrays[first : first + consts], *carry]), carry)
    if name == "cond":
        results = [_run(branch.jaxpr, arrays[1:]) for branch in params["branches"]]
        return [_join_branches(result) for result in zip(*results, strict=True)]
    if name not in ("reduce", "reduce_window") and (key := next((key for key in CALLS if key in params), None)):
        return _run(_open(params[key]), arrays)
    return OPERATIONS.get(name, elementwise)(eqn, arrays)


def _scan(eqn: JaxprEqn, arrays: list[TracedArray]) -> list[TracedArray]:
    # by ranks, as releases of JAX name the equation's parameters differently: a stacked array has one more dim
    body = _open(eqn.params["jaxpr"])
    scanned = sum(_is_stack(*pair) for pair in zip(eqn.invars, body.invars, strict=True))
    carried = sum(not _is_stack(*pair) for pair in zip(eqn.outvars, body.outvars, strict=True))
    consts = len(arrays) - scanned - carried
    carry = [TracedArray(array.dims, None) for array in arrays[consts : consts + carried]]
    stacks = arrays[consts + carried :]
    for array in stacks:
        for piece in flat(array.dims[0]):
            piece.facts.scanned = True
    out = _run(body, [*arrays[:consts], *carry, *(TracedArray(array.dims[1:], array.source) for array in stacks)])
    stacked = [TracedArray((fresh(eqn.params["length"]), *array.dims), array.source) for array in out[carried:]]
    return [*_join_carry(out[:carried], carry), *stacked]


def _is_stack(outer, inner) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def _join_carry(out: list[TracedArray], carry: list[TracedArray]) -> list[TracedArray]:
    """Joins the dims of a loop's carry: the result of an iteration is the input of the next."""
    return [_join_branches(pair) for pair in zip(carry, out, strict=True)]


def _join_branches(arrays: Sequence[TracedArray]) -> TracedArray:
    for array in arrays[1:]:
        for first, dim in zip(arrays[0].dims, array.dims, strict=True):
            join(first, dim)
    return arrays[0]


def _open(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
