"""Moves the sum of stacked layers' gradients over replicas out of the backward scan.

    by default      backward scan: gradient of a layer ─► sum over `data` ─► stack            a sum per layer
    summed once     backward scan: each replica's gradient of a layer ─► stack ─► sum over `data`
    scattered       backward scan: each device's gradient of a layer ─► explicit reduce-scatter ─► stack
    shards at end   backward scan: the same in each replica ─► stack of its shards ─► sum over `data`
    both at the end backward scan: each device's gradient of a layer ─► stack ─► reduce-scatter ─► sum over `data`

The last operation of a gradient, of a matmul or an elementwise op, is a sum over examples. It is split into a sum over
the examples of each replica, and a sum over replicas. All other computation is unchanged, even if layers read the whole
batch.

A sum per layer overlaps with the next layer's computation, so this rewrite is for layers whose all-reduce takes little
longer than its launch. If replicas shard the gradient, its reduce-scatter stays in the scan but becomes explicit,
however large it is: XLA overlaps explicit reduce-scatters with the next iteration of a loop, but not those that it
makes of all-reduces itself, because it makes them after that pass. With `data` too, each replica's shards are summed
over `data` after the scan: inside of it XLA would copy the layers' gradients to send them together, without overlap.
Gradients of experts [experts, tokens, ...], which are not summed over the axis `expert`, are summed over `data` after
the scan too. The reduce-scatter itself leaves the scan if the unreduced gradients of all layers take little memory.
"""

import math
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

from jaxpar.jaxprs.dataflow import Env, Scan, rewrite, shapes, split_groups
from jaxpar.jaxprs.gradient_sums import (
    FREE,
    ExampleSum,
    find_shard_sums,
    find_sums,
    is_cast,
    scan_body,
    split_dim,
)
from jaxpar.models.dim_names import constrain_to, spec_axes

WAITING = 2**23  # bytes per device: most extra memory for unreduced gradients until a reduce-scatter after the scan
Axes = str | tuple[str, ...]


def hoist_gradient_sums(
    function: Callable,
    axis: str,
    ways: int,
    *,
    rows: int,
    shards: tuple[str, int] | None = None,
    limit: float = math.inf,
) -> Callable:
    """Rewrites a function so that sums over an axis come after its scans over layers instead of inside of them.

    Args:
      function: Computes gradients of pytrees of arrays, by scans that are top-level equations. A gradient that it
        constrains to be split over the axis is scattered in the scan.
      axis: The outermost mesh axis that splits dim 0 of activations.
      ways: Size of the axis.
      rows: Number of examples: the size of dim 0 of activations, or a divisor of it if batch and sequence are one dim.
        Sums over another dim 0, such as the sequence of a sequence-first model, are left to XLA: the axis does not
        split that dim, so a sum per replica would first reshard the activations.
      shards: A second axis that splits dim 0, inside of the first, and its size: constraints split gradients over it.
        Its reduce-scatter may leave the scan too.
      limit: Most bytes per device of a layer's gradient shards if their sum over `axis` is to come after the scan.
    """

    def change(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[_rewrite_scan(eqn, axis, ways, rows, shards, limit) for eqn in jaxpr.eqns])

    return rewrite(function, change)


def _rewrite_scan(
    eqn: JaxprEqn, axis: str, ways: int, rows: int, shards: tuple[str, int] | None, limit: float
) -> JaxprEqn:
    """Returns an equivalent equation, rewritten if it is a scan with sums to move."""
    sums = find_sums(eqn, axis, ways, rows)
    in_scan, after_scan = partial(_replica_gradient, axis, ways), partial(_sum_over_replicas, axis)
    if shards is not None and rows % (ways * shards[1]) == 0:
        axes, devices = (axis, shards[0]), ways * shards[1]
        shard_sums = find_shard_sums(eqn, axis, ways, rows, shards[0], limit)
        if shard_sums and (not sums or any(gradient.dim for gradient in shard_sums.values())):
            sums, in_scan = shard_sums, partial(_replica_shard, axes, ways, devices)
        elif sums and _take_little_memory(sums, shards[0], eqn.params["length"]):
            in_scan, after_scan = partial(_device_gradient, axes, devices), partial(_sum_over_devices, axes, devices)
    if not sums:
        return eqn

    def summed_once(*args: jax.Array) -> list[jax.Array]:
        return _run(eqn, sums, args, in_scan, after_scan)

    (call,) = jax.make_jaxpr(jax.jit(summed_once))(*shapes(eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _take_little_memory(sums: dict[int, ExampleSum], axis: str, layers: int) -> bool:
    """Whether the gradients of all layers take little memory before their reduce-scatter over an axis."""
    fit = all(gradient.can_wait(axis) for gradient in sums.values())
    return fit and layers * sum(gradient.extra_bytes(axis) for gradient in sums.values()) <= WAITING


def _run(
    eqn: JaxprEqn,
    sums: dict[int, ExampleSum],
    args: Sequence[jax.Array],
    in_scan: Callable[[ExampleSum, Env], jax.Array],
    after_scan: Callable[[ExampleSum, jax.Array], jax.Array],
) -> list[jax.Array]:
    """Runs a scan: `in_scan` computes a sum's entry of its stack in the body, `after_scan` the gradients from it."""
    scan = Scan(eqn)
    body, body_consts = scan_body(scan)
    consts, first, xs = split_groups(args, [scan.consts, scan.carry, scan.xs])
    replaced = {id(body_eqn) for gradient in sums.values() for body_eqn in (gradient.eqn, *gradient.later_equations)}

    def step(carry, xs):
        env = Env(body, body_consts, zip(body.invars, [*consts, *carry, *xs], strict=True))
        for body_eqn in body.eqns:
            if id(body_eqn) not in replaced:
                env.run(body_eqn)
        stacked = [in_scan(sums[i], env) if i in sums else env[var] for i, var in enumerate(body.outvars[scan.carry :])]
        return [env[var] for var in body.outvars[: scan.carry]], stacked

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, ys = jax.lax.scan(step, first, xs, **params)
    return [*last, *(after_scan(sums[i], y) if i in sums else y for i, y in enumerate(ys))]


def _replica_gradient(axis: str, ways: int, one: ExampleSum, env: Env) -> jax.Array:
    """Returns the gradient per replica, shape [replica, ...]; if the scan scatters it, the sum over replicas.

    Casts follow the reduce-scatter: devices send the dtype of the sum, as XLA does.
    """
    index = one.scatter_index(axis)
    casts = [eqn for eqn in one.later_equations[:index] if is_cast(eqn)]
    x, scattered = _partial_sums(one, env, axis, ways), False
    for i, eqn in enumerate(one.later_equations):
        if scattered:
            env[eqn.invars[0]] = x
            env.run(eqn)
            x = env[eqn.outvars[0]]
        elif scattered := i == index:
            x = _with_source_info(eqn, partial(_reduce_scatter, eqn, axis), x)
            for cast in casts:
                to_dtype = partial(jax.lax.convert_element_type, new_dtype=cast.params["new_dtype"])
                x = _with_source_info(cast, to_dtype, x)
        elif not is_cast(eqn):
            x = _with_source_info(eqn, partial(_apply_to_replicas, eqn, axis), x)
    return x if scattered else _shard_dim(x, axis)


def _sum_over_replicas(axis: str, one: ExampleSum, y: jax.Array) -> jax.Array:
    """Sums the stacked gradients, shape [layer, replica, ...], over replicas, unless the scan has scattered them.

    Casts follow this sum too.
    """
    if one.scatter_index(axis) is not None:
        return y
    y = _with_source_info(one.eqn, partial(jax.lax.reduce_sum, axes=(1,)), y)
    for eqn in filter(is_cast, one.later_equations):
        y = _with_source_info(eqn, partial(_apply_to_layers, eqn), y)
    return y


def _replica_shard(axes: tuple[str, str], ways: int, devices: int, one: ExampleSum, env: Env) -> jax.Array:
    """Returns the gradient per replica along the first axis, shape [replica, ...], scattered over the second axis.

    Stacked over layers, it takes as many bytes per device as the stack of gradients summed over replicas.
    """
    index = one.scatter_index(axes[1])
    x = _partial_sums(one, env, axes[0], ways) if index is None else _partial_sums(one, env, axes, devices)
    for i, eqn in enumerate(one.later_equations):
        if i == index:
            x = _with_source_info(eqn, partial(_reduce_scatter, eqn, axes[1], replicas=axes[0]), x)
        elif not is_cast(eqn):
            over = axes if index is not None and i < index else axes[0]
            x = _with_source_info(eqn, partial(_apply_to_replicas, eqn, over), x)
    return _shard_dim(x, axes[0]) if index is None else x


def _device_gradient(axes: tuple[str, ...], ways: int, one: ExampleSum, env: Env) -> jax.Array:
    """Returns the gradient per device, shape [device, ...], with its final sharding except for the last axis."""
    x = _partial_sums(one, env, axes, ways)
    remaining = one.remaining_equations(axes[-1])
    for eqn in one.later_equations[: len(one.later_equations) - len(remaining)]:
        x = _with_source_info(eqn, partial(_apply_to_replicas, eqn, axes), x)
    if not remaining:
        return _shard_dim(x, axes)
    sharding = remaining[0].params["sharding"]
    other_axes = (tuple(axis for axis in spec_axes(entry) if axis not in axes) or None for entry in sharding.spec)
    return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec(axes, *other_axes)))


def _sum_over_devices(axes: tuple[str, ...], ways: int, one: ExampleSum, y: jax.Array) -> jax.Array:
    """Sums the stacked gradients, shape [layer, device, ...], over devices."""
    # by a matmul, as the gradient of any other matrix ends with one: XLA combines collectives that look alike
    y = _with_source_info(one.eqn, partial(_sum_einsum, ways), y)
    for eqn in one.remaining_equations(axes[-1]):
        y = _with_source_info(eqn, partial(_apply_to_layers, eqn), y)
    return y


def _sum_einsum(ways: int, y: jax.Array) -> jax.Array:
    return jnp.einsum("e,le...->l...", jnp.ones(ways, y.dtype), y, precision=jax.lax.Precision.HIGHEST)


def _apply_to_layers(eqn: JaxprEqn, y: jax.Array) -> jax.Array:
    """Applies an equation to each layer of a stack, shape [layer, ...]."""
    if is_cast(eqn):
        return y.astype(eqn.params["new_dtype"])
    if eqn.primitive.name == "transpose":
        return jnp.transpose(y, (0, *(dim + 1 for dim in eqn.params["permutation"])))
    sharding = eqn.params["sharding"]
    return jax.lax.with_sharding_constraint(y, NamedSharding(sharding.mesh, PartitionSpec(FREE, *sharding.spec)))


def _reduce_scatter(eqn: JaxprEqn, axis: str, x: jax.Array, *, replicas: str | None = None) -> jax.Array:
    """Reduce-scatters [device, ...] over an axis to the sharding of an equation.

    With an axis of `replicas`, outside of the first: dim 0 is split over both, and the result is [replica, ...].
    """
    dim, spec = split_dim(eqn, axis) or 0, tuple(eqn.params["sharding"].spec)
    outer = () if replicas is None else (replicas,)
    in_spec = PartitionSpec((*outer, axis), *(None if i == dim else entry for i, entry in enumerate(spec)))

    def scatter(local: jax.Array) -> jax.Array:
        result = jax.lax.psum_scatter(local[0], axis, scatter_dimension=dim, tiled=True)
        return result if replicas is None else result[None]

    return jax.shard_map(scatter, in_specs=in_spec, out_specs=PartitionSpec(*outer, *spec), check_vma=False)(x)


def _partial_sums(one: ExampleSum, env: Env, axes: Axes, ways: int) -> jax.Array:
    """Sums over the examples of each shard of the batch separately. Shape [shard, ...]."""
    return _with_source_info(one.eqn, partial(_sum_parts, one, axes, ways), *(env[var] for var in one.eqn.invars))


def _sum_parts(one: ExampleSum, axes: Axes, ways: int, *args: jax.Array) -> jax.Array:
    dim, params = one.dim, one.eqn.params
    split = [x.reshape(*x.shape[:dim], ways, x.shape[dim] // ways, *x.shape[dim + 1 :]) for x in args]
    parts = [_shard_dim(x, axes, dim) for x in split]
    if one.eqn.primitive.name == "reduce_sum":
        return jnp.sum(parts[0], axis=tuple(dim + 1 for dim in params["axes"]))
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    over, batch = ([i + 1 for i in left], [i + 1 for i in right]), ([dim, *left_batch], [dim, *right_batch])
    options = {name: params[name] for name in ("precision", "preferred_element_type")}
    return jax.lax.dot_general(parts[0], parts[1], (over, batch), **options)


def _apply_to_replicas(eqn: JaxprEqn, axes: Axes, x: jax.Array) -> jax.Array:
    """Applies an equation to each entry of [replica, ...]."""
    if eqn.primitive.name == "transpose":
        return jnp.transpose(x, (0, *(dim + 1 for dim in eqn.params["permutation"])))
    sharding = eqn.params["sharding"]
    return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, PartitionSpec(axes, *sharding.spec)))


def _with_source_info(eqn: JaxprEqn, function: Callable, *args: jax.Array) -> jax.Array:
    """Runs a function with the named scope and source line of an equation, which the inspector reports."""
    closed = jax.make_jaxpr(function)(*args)
    eqns = [new_eqn.replace(source_info=eqn.source_info) for new_eqn in closed.jaxpr.eqns]
    (out,) = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts))(*args)
    return out


def _shard_dim(x: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
    return constrain_to(x, PartitionSpec(*(axes if i == dim else FREE for i in range(x.ndim))))
