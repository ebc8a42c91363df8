"""Finds the specs that an author gives to values of parameters instead of variables, as in JAX's explicit style.

    nnx.Param(init(key, shape, out_sharding=P("model", None)))        an initializer's result
    self.param("w", partial(init, out_sharding=P("model", None)), ..) likewise
    nnx.Param(jax.device_put(x, NamedSharding(mesh, P("model"))))     a value that was placed
    jax.lax.with_sharding_constraint(x, P("model", None))             a value that was constrained

JAX keeps such a spec in the type of the array. jaxpar initializes a model without a mesh, so it records the spec as the
name of an identity in the program, and follows it from there through elementwise operations to the parameter.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
)
from jax.sharding import PartitionSpec

Spec = tuple[str | tuple[str, ...] | None, ...]  # an entry per dim, with axes of the author's mesh

_PREFIX = "jaxpar:out_sharding "
_ELEMENTWISE = frozenset(
    "mul add sub div neg abs sign exp log sqrt cos tanh erf_inv max min clamp select_n convert_element_type copy copy_p"
    " name optimization_barrier sharding_constraint".split()
)
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters of equations that hold an inner jaxpr
_noted: ContextVar[list[Spec] | None] = ContextVar("noted_specs", default=None)


@contextmanager
def recording_specs() -> Iterator[list[Spec]]:
    """Context in which a model is initialized abstractly: it records the specs that are given to values."""
    noted: list[Spec] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def record_spec(x: object, spec: PartitionSpec) -> Any:
    """Tags arrays with a spec inside of `recording_specs`; else returns them unchanged."""
    noted = _noted.get()
    if noted is None:
        return x

    def name_array(x: jax.Array) -> jax.Array:
        entries = (*spec, *(None,) * (x.ndim - len(spec)))
        noted.append(tuple(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in entries))
        return checkpoint_name(x, _PREFIX + json.dumps(noted[-1]))

    return jax.tree.map(name_array, x)


def is_recording() -> bool:
    """Whether `recording_specs` is open."""
    return _noted.get() is not None


def value_specs(function: Callable, *args: Any) -> list[Spec | None]:
    """Returns the spec of each array that a function returns, in the order of leaves; None for an array without one.

    Args:
      function: Returns a tree of arrays.
      *args: Arguments of the function.
    """
    with recording_specs():
        closed = jax.make_jaxpr(function)(*args)
    return _outputs(closed.jaxpr, [None] * len(closed.jaxpr.invars))


def _outputs(jaxpr: Jaxpr, inputs: Sequence[Spec | None]) -> list[Spec | None]:
    """Returns the spec of each output of a program."""
    specs = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        operand_specs = [None if isinstance(var, Literal) else specs.get(var) for var in eqn.invars]
        specs.update(zip(eqn.outvars, _equation(eqn, operand_specs), strict=True))
    return [None if isinstance(var, Literal) else specs.get(var) for var in jaxpr.outvars]


def _equation(eqn: JaxprEqn, operand_specs: list[Spec | None]) -> list[Spec | None]:
    name, params = eqn.primitive.name, eqn.params
    if name == "name" and params["name"].startswith(_PREFIX):
        entries = json.loads(params["name"].removeprefix(_PREFIX))
        return [tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)]
    inner = next((params[key] for key in _CALLS if key in params), None)
    if inner is not None:
        body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
        same = name != "scan" and len(body.invars) == len(operand_specs)
        outputs = _outputs(body, operand_specs if same else [None] * len(body.invars))
        return outputs if len(outputs) == len(eqn.outvars) else [None] * len(eqn.outvars)
    if name == "transpose" and operand_specs[0] is not None:
        order, shift = params["permutation"], len(params["permutation"]) - len(operand_specs[0])
        return (
            [tuple(operand_specs[0][dim - shift] for dim in order[shift:])] if min(order[shift:]) >= shift else [None]
        )
    if name == "broadcast_in_dim" and operand_specs[0] is not None:  # one member for all, where `vmap` does not apply
        rank, out_shape = len(_shape(eqn.invars[0])), _shape(eqn.outvars[0])
        stacked = params["broadcast_dimensions"] == (*range(len(out_shape) - rank, len(out_shape)),)
        return [operand_specs[0] if stacked and out_shape[len(out_shape) - rank :] == _shape(eqn.invars[0]) else None]
    if name in _ELEMENTWISE:
        shape = _shape(eqn.outvars[0])
        matches = (spec for spec, var in zip(operand_specs, eqn.invars, strict=True) if spec and _shape(var) == shape)
        return [next(matches, None)] if len(eqn.outvars) == 1 else list(operand_specs)
    return [None] * len(eqn.outvars)


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))
