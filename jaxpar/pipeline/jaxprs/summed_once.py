"""Gradients of stacked layers, whose sum over replicas is taken out of the scan that makes them.

    as XLA has it   backward scan: gradient of a layer ─► sum over `data` ─► stack            a sum per layer
    summed once     backward scan: each replica's gradient of a layer ─► stack ─► sum over `data`
    scattered       backward scan: each device's gradient of a layer ─► reduce-scatter, written as such ─► stack

The sum over examples that ends a gradient, of a matmul or of an elementwise op, is taken apart: over the examples of
each replica, then over replicas. What a model computes is left as it is, also where its layers look at the whole batch.

A sum per layer travels while the next layer is computed, so this is for layers whose sum takes no longer than to start
it. Where replicas share the gradient it stays in the scan, but XLA moves a reduce-scatter that it finds, not one that
it makes itself, into the next turn; the gathers of the first turn then go with those of the forward pass.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.models.named import axes_of
from jaxpar.pipeline.jaxprs.dataflow import REMAT, Env, Scan, consts_of, jaxpr_of, parts, rewritten, shapes, variables
from jaxpar.sharding.shard_bytes import pieces

FREE = PartitionSpec.UNCONSTRAINED
SMALL = 2**23  # bytes of a layer's gradients: over NVLink some 50 us, little more than a sum costs to start


@dataclass(frozen=True)
class Sum:
    """A gradient of a layer: a sum over examples, and what is done to it.

    Attributes:
      eqn: The equation that sums, over dim 0 of what it reads among others.
      after: Equations of one input that make the gradient of it.
    """

    eqn: JaxprEqn
    after: tuple[JaxprEqn, ...]

    def scatters(self, axis: str) -> int | None:
        """Returns the number of the equation after which an axis cuts the gradient; None where it cuts none."""
        return next((i for i, eqn in enumerate(self.after) if axis in _axes(eqn)), None)

    def fits(self, axis: str) -> bool:
        """Returns whether the gradient can be of [replica, ...] until one reduce-scatter over the axis, or to the end.

        It cannot where the axis shares a dim with another one, or cuts it into pieces that are not equal; nor where
        it is cast before it travels: devices send the bits that the sum has.
        """
        at = self.scatters(axis)
        if any(map(_is_cast, self.after[:at])):
            return False
        return at is None or _cut(self.after[at], axis) is not None


def summed_once(function: Callable, axis: str, ways: int, *, rows: int) -> Callable:
    """Returns a function of pytrees of arrays, whose scans over layers leave sums over an axis for after them.

    Args:
      function: Makes gradients, by scans that are equations of its own. Where it constrains one to be cut along the
        axis, it is scattered in the scan.
      axis: Of the mesh, the outermost that cuts dim 0 of activations.
      ways: Its size.
      rows: Examples of the batch: so long is dim 0 of activations, or a multiple where tokens are rows of a matrix.
        What sums over another dim 0, such as the sequence of a model that has it first, is left to XLA: cut there,
        activations would travel.
    """

    def change(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[_changed_scan(eqn, axis, ways, rows) for eqn in jaxpr.eqns])

    return rewritten(function, change)


def _changed_scan(eqn: JaxprEqn, axis: str, ways: int, rows: int) -> JaxprEqn:
    """Returns an equation that computes the same, by another scan where it is one over layers."""
    if not (sums := _sums(eqn, axis, ways, rows)):
        return eqn

    def summed_once(*args: jax.Array) -> list[jax.Array]:
        return _run(eqn, sums, args, axis, ways)

    (call,) = jax.make_jaxpr(jax.jit(summed_once))(*shapes(eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _body(scan: Scan) -> tuple[Jaxpr, Sequence]:
    """Returns the body of a scan, of one layer that is computed again also that of the layer."""
    body, consts = scan.body, scan.body_consts
    if len(body.eqns) == 1 and body.eqns[0].primitive.name in REMAT and not body.eqns[0].params["prevent_cse"]:
        (eqn,) = body.eqns
        inner = jaxpr_of(eqn.params["jaxpr"])
        ends = [*eqn.invars, *body.outvars]
        plain = not consts and len(variables(ends)) == len(ends) and {*eqn.invars} == {*body.invars}
        if plain and {*body.outvars} <= {*eqn.outvars}:
            own: dict[Any, Any] = dict(zip(eqn.invars, inner.invars, strict=True))
            made: dict[Any, Any] = dict(zip(eqn.outvars, inner.outvars, strict=True))
            ins, outs = [own[var] for var in body.invars], [made[var] for var in body.outvars]
            return inner.replace(invars=ins, outvars=outs), consts_of(eqn.params["jaxpr"])
    return body, consts


def _sums(eqn: JaxprEqn, axis: str, ways: int, rows: int) -> dict[int, Sum]:
    """Returns the sums over examples among the stacks that a scan makes, by their number; none where they are large."""
    if eqn.primitive.name != "scan":
        return {}
    scan = Scan(eqn)
    body, _ = _body(scan)
    made = {var: each for each in body.eqns for var in each.outvars}
    read = [*body.outvars, *(var for each in body.eqns for var in each.invars)]
    times = Counter(var for var in read if not isinstance(var, Literal))
    found = {}
    for i, var in enumerate(body.outvars[scan.carry :]):
        if rows % ways == 0 and (one := _sum(var, made, times, rows)) and one.fits(axis):
            found[i] = one
    size = sum(body.outvars[scan.carry + i].aval.size * body.outvars[scan.carry + i].aval.dtype.itemsize for i in found)
    return found if size <= SMALL else {}


def _sum(var: Any, made: dict[Var, JaxprEqn], times: Counter[Var], rows: int) -> Sum | None:
    after: list[JaxprEqn] = []
    while not isinstance(var, Literal) and (eqn := made.get(var)) is not None and times[var] == 1:
        name = eqn.primitive.name
        if name == "transpose" or _is_constraint(eqn) or _is_cast(eqn):
            after.append(eqn)
            var = eqn.invars[0]
            continue
        if name == "dot_general":
            (left, right), batch = eqn.params["dimension_numbers"]
            over = any(pair == (0, 0) for pair in zip(left, right, strict=True)) and not any(batch)
        else:
            over = name == "reduce_sum" and 0 in eqn.params["axes"]
        return Sum(eqn, tuple(after[::-1])) if over and _of_examples(shapes(eqn.invars)[0].shape, rows) else None
    return None


def _of_examples(shape: tuple[int, ...], rows: int) -> bool:
    """Returns whether dim 0 of an activation is the examples of a batch, or all of their tokens."""
    return shape[0] == rows or (len(shape) == 2 and shape[0] % rows == 0)


def _run(eqn: JaxprEqn, sums: dict[int, Sum], args: Sequence[jax.Array], axis: str, ways: int) -> list[jax.Array]:
    scan = Scan(eqn)
    body, body_consts = _body(scan)
    consts, first, xs = parts(args, [scan.consts, scan.carry, scan.xs])
    apart = {id(each) for one in sums.values() for each in (one.eqn, *one.after)}

    def step(carry, xs):
        inside = Env(body, body_consts, zip(body.invars, [*consts, *carry, *xs], strict=True))
        for each in body.eqns:
            if id(each) not in apart:
                inside.run(each)
        made = [
            _of_each(sums[i], inside, axis, ways) if i in sums else inside[var]
            for i, var in enumerate(body.outvars[scan.carry :])
        ]
        return [inside[var] for var in body.outvars[: scan.carry]], made

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, ys = jax.lax.scan(step, first, xs, **how)
    of_each = {i for i, one in sums.items() if one.scatters(axis) is None}
    ys = [_as(sums[i].eqn, partial(jax.lax.reduce_sum, axes=(1,)), y) if i in of_each else y for i, y in enumerate(ys)]
    return [*last, *ys]


def _of_each(one: Sum, env: Env, axis: str, ways: int) -> jax.Array:
    """Returns a gradient of each replica's examples, shape [replica, ...]; where it is scattered, that of all."""
    x, scattered = _as(one.eqn, partial(_summed, one.eqn, axis, ways), *(env[var] for var in one.eqn.invars)), False
    for i, eqn in enumerate(one.after):
        if scattered:
            env[eqn.invars[0]] = x
            env.run(eqn)
            x = env[eqn.outvars[0]]
        elif scattered := i == one.scatters(axis):
            x = _as(eqn, partial(_scattered, eqn, axis), x)
        else:
            x = _as(eqn, partial(_changed, eqn, axis), x)
    return x if scattered else _on(x, axis)


def _cut(eqn: JaxprEqn, axis: str) -> int | None:
    """Returns the dim that an equation constrains to be cut along an axis and no other; None where it does not.

    None also where pieces are not equal or a dim is left to XLA, for which there is no reduce-scatter.
    """
    if axis not in _axes(eqn):
        return None
    on, shape = eqn.params["sharding"], shapes(eqn.outvars)[0].shape
    if FREE in on.spec:
        return None
    if any(size % ways for size, ways in zip(shape, pieces(on.spec, len(shape), on.mesh.shape), strict=True)):
        return None
    return next((dim for dim, entry in enumerate(on.spec) if axes_of(entry) == (axis,)), None)


def _is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _is_constraint(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "sharding_constraint" and isinstance(eqn.params["sharding"], NamedSharding)


def _axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the axes that an equation constrains its array to be cut along."""
    spec = eqn.params["sharding"].spec if _is_constraint(eqn) else ()
    return tuple(axis for entry in spec for axis in axes_of(entry))


def _scattered(eqn: JaxprEqn, axis: str, x: jax.Array) -> jax.Array:
    """Returns the sum of [replica, ...], cut as an equation says, by a reduce-scatter."""
    dim, spec = _cut(eqn, axis) or 0, tuple(eqn.params["sharding"].spec)
    whole = PartitionSpec(axis, *(None if i == dim else entry for i, entry in enumerate(spec)))

    def scatter(own: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(own[0], axis, scatter_dimension=dim, tiled=True)

    return jax.shard_map(scatter, in_specs=whole, out_specs=PartitionSpec(*spec), check_vma=False)(x)


def _summed(eqn: JaxprEqn, axis: str, ways: int, *args: jax.Array) -> jax.Array:
    rows = [_on(x.reshape(ways, x.shape[0] // ways, *x.shape[1:]), axis) for x in args]
    params = eqn.params
    if eqn.primitive.name == "reduce_sum":
        return jnp.sum(rows[0], axis=tuple(dim + 1 for dim in params["axes"]))
    left, right = ([dim + 1 for dim in side] for side in params["dimension_numbers"][0])
    how = {name: params[name] for name in ("precision", "preferred_element_type")}
    return jax.lax.dot_general(rows[0], rows[1], ((left, right), ([0], [0])), **how)


def _changed(eqn: JaxprEqn, axis: str, x: jax.Array) -> jax.Array:
    """Returns what an equation makes of an array, of [replica, ...]."""
    if eqn.primitive.name == "transpose":
        return jnp.transpose(x, (0, *(dim + 1 for dim in eqn.params["permutation"])))
    on = eqn.params["sharding"]
    return jax.lax.with_sharding_constraint(x, NamedSharding(on.mesh, PartitionSpec(axis, *on.spec)))


def _as(eqn: JaxprEqn, function: Callable, *args: jax.Array) -> jax.Array:
    """Returns a function of arrays under the scope and source line of an equation: the inspector tells both."""
    closed = jax.make_jaxpr(function)(*args)
    eqns = [each.replace(source_info=eqn.source_info) for each in closed.jaxpr.eqns]
    (out,) = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts))(*args)
    return out


def _on(x: jax.Array, axis: str) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axis, *(FREE,) * (x.ndim - 1)))
