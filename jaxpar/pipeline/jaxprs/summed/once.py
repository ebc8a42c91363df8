"""Gradients of stacked layers, whose sum over replicas is taken out of the scan that makes them.

    as XLA has it   backward scan: gradient of a layer ─► sum over `data` ─► stack            a sum per layer
    summed once     backward scan: each replica's gradient of a layer ─► stack ─► sum over `data`
    scattered       backward scan: each device's gradient of a layer ─► reduce-scatter, written as such ─► stack
    both at the end backward scan: each device's gradient of a layer ─► stack ─► reduce-scatter ─► sum over `data`

The sum over examples that ends a gradient, of a matmul or of an elementwise op, is taken apart: over the examples of
each replica, then over replicas. What a model computes is left as it is, also where its layers look at the whole batch.

A sum per layer travels while the next layer is computed, so this is for layers whose sum takes no longer than to start
it. Where replicas share the gradient it stays in the scan, but XLA moves a reduce-scatter that it finds, not one that
it makes itself, into the next turn; the gathers of the first turn then go with those of the forward pass. With `data`
besides, the reduce-scatter leaves the scan too, where the gradients of all layers can wait for it in little memory.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    jaxpr_as_fun,
)
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.models.named import axes_of, constrain_to
from jaxpar.pipeline.jaxprs.dataflow import Env, Scan, parts, rewritten, shapes
from jaxpar.pipeline.jaxprs.summed.sums import FREE, Sum, body_of, cut_along, is_cast, sums_of

WAITING = 2**23  # bytes of a device by which gradients that wait for one reduce-scatter are larger than their shards
Axes = str | tuple[str, ...]


def summed_once(
    function: Callable, axis: str, ways: int, *, rows: int, shards: tuple[str, int] | None = None
) -> Callable:
    """Returns a function of pytrees of arrays, whose scans over layers leave sums over an axis for after them.

    Args:
      function: Makes gradients, by scans that are equations of its own. Where it constrains one to be cut along the
        axis, it is scattered in the scan.
      axis: Of the mesh, the outermost that cuts dim 0 of activations.
      ways: Its size.
      rows: Examples of the batch: so long is dim 0 of activations, or a multiple where tokens are rows of a matrix.
        What sums over another dim 0, such as the sequence of a model that has it first, is left to XLA: cut there,
        activations would travel.
      shards: Another axis that cuts dim 0, inside of the first, and its size: it is what constraints cut gradients
        along. Its reduce-scatter may leave the scan too.
    """

    def change(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[_changed_scan(eqn, axis, ways, rows, shards) for eqn in jaxpr.eqns])

    return rewritten(function, change)


def _changed_scan(eqn: JaxprEqn, axis: str, ways: int, rows: int, shards: tuple[str, int] | None) -> JaxprEqn:
    """Returns an equation that computes the same, by another scan where it is one over layers."""
    if not (sums := sums_of(eqn, axis, ways, rows)):
        return eqn
    wait = shards is not None and rows % (ways * shards[1]) == 0 and _little(sums, shards[0], eqn.params["length"])

    def summed_once(*args: jax.Array) -> list[jax.Array]:
        if shards is not None and wait:
            return _run(eqn, sums, args, (axis, shards[0]), ways * shards[1])
        return _run(eqn, sums, args, axis, ways)

    (call,) = jax.make_jaxpr(jax.jit(summed_once))(*shapes(eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _little(sums: dict[int, Sum], axis: str, layers: int) -> bool:
    """Returns whether gradients of all layers can wait for their reduce-scatter over an axis, in little memory."""
    fit = all(one.fits(axis) for one in sums.values())
    return fit and layers * sum(one.more(axis) for one in sums.values()) <= WAITING


def _run(eqn: JaxprEqn, sums: dict[int, Sum], args: Sequence[jax.Array], axes: Axes, ways: int) -> list[jax.Array]:
    scan = Scan(eqn)
    body, body_consts = body_of(scan)
    consts, first, xs = parts(args, [scan.consts, scan.carry, scan.xs])
    apart = {id(each) for one in sums.values() for each in (one.eqn, *one.after)}

    def step(carry, xs):
        inside = Env(body, body_consts, zip(body.invars, [*consts, *carry, *xs], strict=True))
        for each in body.eqns:
            if id(each) not in apart:
                inside.run(each)
        made = [
            _of_each(sums[i], inside, axes, ways) if i in sums else inside[var]
            for i, var in enumerate(body.outvars[scan.carry :])
        ]
        return [inside[var] for var in body.outvars[: scan.carry]], made

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, ys = jax.lax.scan(step, first, xs, **how)
    if not isinstance(axes, str):
        return [*last, *(_together(sums[i], axes, ways, y) if i in sums else y for i, y in enumerate(ys))]
    of_each = {i for i, one in sums.items() if one.scatters(axes) is None}
    ys = [_as(sums[i].eqn, partial(jax.lax.reduce_sum, axes=(1,)), y) if i in of_each else y for i, y in enumerate(ys)]
    return [*last, *ys]


def _of_each(one: Sum, env: Env, axes: Axes, ways: int) -> jax.Array:
    """Returns a gradient of each replica's examples, shape [replica, ...]; where it is scattered, that of all."""
    if not isinstance(axes, str):
        return _of_device(one, env, axes, ways)
    x, scattered = _as(one.eqn, partial(_summed, one.eqn, axes, ways), *(env[var] for var in one.eqn.invars)), False
    for i, eqn in enumerate(one.after):
        if scattered:
            env[eqn.invars[0]] = x
            env.run(eqn)
            x = env[eqn.outvars[0]]
        elif scattered := i == one.scatters(axes):
            x = _as(eqn, partial(_scattered, eqn, axes), x)
        else:
            x = _as(eqn, partial(_changed, eqn, axes), x)
    return x if scattered else _on(x, axes)


def _of_device(one: Sum, env: Env, axes: tuple[str, ...], ways: int) -> jax.Array:
    """Returns a gradient of each device's examples, shape [device, ...], cut as it will be but along the last axis."""
    x = _as(one.eqn, partial(_summed, one.eqn, axes, ways), *(env[var] for var in one.eqn.invars))
    later = one.later(axes[-1])
    for eqn in one.after[: len(one.after) - len(later)]:
        x = _as(eqn, partial(_changed, eqn, axes), x)
    if not later:
        return _on(x, axes)
    on = later[0].params["sharding"]
    rest = (tuple(axis for axis in axes_of(entry) if axis not in axes) or None for entry in on.spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(on.mesh, PartitionSpec(axes, *rest)))


def _together(one: Sum, axes: tuple[str, ...], ways: int, y: jax.Array) -> jax.Array:
    """Returns gradients of all layers of each device's examples, shape [layer, device, ...], summed over devices."""
    # a matmul, as the gradient of any other matrix is the end of one: XLA combines what it writes alike
    y = _as(one.eqn, partial(_added_up, ways), y)
    for eqn in one.later(axes[-1]):
        y = _as(eqn, partial(_of_all, eqn), y)
    return y


def _added_up(ways: int, y: jax.Array) -> jax.Array:
    return jnp.einsum("e,le...->l...", jnp.ones(ways, y.dtype), y, precision=jax.lax.Precision.HIGHEST)


def _of_all(eqn: JaxprEqn, y: jax.Array) -> jax.Array:
    """Returns what an equation makes of each layer."""
    if is_cast(eqn):
        return y.astype(eqn.params["new_dtype"])
    if eqn.primitive.name == "transpose":
        return jnp.transpose(y, (0, *(dim + 1 for dim in eqn.params["permutation"])))
    on = eqn.params["sharding"]
    return jax.lax.with_sharding_constraint(y, NamedSharding(on.mesh, PartitionSpec(FREE, *on.spec)))


def _scattered(eqn: JaxprEqn, axis: str, x: jax.Array) -> jax.Array:
    """Returns the sum of [replica, ...], cut as an equation says, by a reduce-scatter."""
    dim, spec = cut_along(eqn, axis) or 0, tuple(eqn.params["sharding"].spec)
    whole = PartitionSpec(axis, *(None if i == dim else entry for i, entry in enumerate(spec)))

    def scatter(own: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(own[0], axis, scatter_dimension=dim, tiled=True)

    return jax.shard_map(scatter, in_specs=whole, out_specs=PartitionSpec(*spec), check_vma=False)(x)


def _summed(eqn: JaxprEqn, axes: Axes, ways: int, *args: jax.Array) -> jax.Array:
    rows = [_on(x.reshape(ways, x.shape[0] // ways, *x.shape[1:]), axes) for x in args]
    params = eqn.params
    if eqn.primitive.name == "reduce_sum":
        return jnp.sum(rows[0], axis=tuple(dim + 1 for dim in params["axes"]))
    left, right = ([dim + 1 for dim in side] for side in params["dimension_numbers"][0])
    how = {name: params[name] for name in ("precision", "preferred_element_type")}
    return jax.lax.dot_general(rows[0], rows[1], ((left, right), ([0], [0])), **how)


def _changed(eqn: JaxprEqn, axes: Axes, x: jax.Array) -> jax.Array:
    """Returns what an equation makes of an array, of [replica, ...]."""
    if eqn.primitive.name == "transpose":
        return jnp.transpose(x, (0, *(dim + 1 for dim in eqn.params["permutation"])))
    on = eqn.params["sharding"]
    return jax.lax.with_sharding_constraint(x, NamedSharding(on.mesh, PartitionSpec(axes, *on.spec)))


def _as(eqn: JaxprEqn, function: Callable, *args: jax.Array) -> jax.Array:
    """Returns a function of arrays under the scope and source line of an equation: the inspector tells both."""
    closed = jax.make_jaxpr(function)(*args)
    eqns = [each.replace(source_info=eqn.source_info) for each in closed.jaxpr.eqns]
    (out,) = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts))(*args)
    return out


def _on(x: jax.Array, axes: Axes) -> jax.Array:
    return constrain_to(x, PartitionSpec(axes, *(FREE,) * (x.ndim - 1)))
