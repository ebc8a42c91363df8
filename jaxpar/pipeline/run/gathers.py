"""ZeRO-3 inside a table: gathers sharded parameters where a layer reads them, and reduce-scatters their gradients.

    shard ─► cast ─► all-gather ─► the layer ─► backward: float32 ─► reduce-scatter ─► gradient of the shard
                     in the dtype of matmuls                        in float32

A device holds one unsharded layer at a time. The backward gathers the parameters again, for any choice of residuals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from jaxpar.jaxprs.dataflow import REMAT, Env, Scan, Traced, primitives, split_groups
from jaxpar.pipeline.run.gradient_sums import reduce_scatter, with_manual_axes


@dataclass(frozen=True, kw_only=True)
class Gather:
    """The axis, dim and dtype with which one parameter is gathered.

    Attributes:
      axis: A manual mesh axis that splits examples.
      dim: The dim of the parameter that the axis splits.
      dtype: Dtype of the gathered parameter.
      shard_dtype: Dtype of the shard, and of its gradient.
      other_axes: Further axes that are manual only during the gather; XLA handles all others.
      spec: The dims that `other_axes` split.
    """

    axis: str
    dim: int
    dtype: Any
    shard_dtype: Any
    other_axes: tuple[str, ...]
    spec: PartitionSpec


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_parameter(shard: jax.Array, gather: Gather) -> jax.Array:
    """Gathers a parameter; its gradient is reduce-scattered over the axis in float32."""
    # casts before the gather, so that bfloat16 halves the bytes to send
    all_gather = partial(jax.lax.all_gather, axis_name=gather.axis, axis=gather.dim, tiled=True)
    return with_manual_axes(all_gather, gather.other_axes, gather.spec)(shard.astype(gather.dtype))


def _forward(shard: jax.Array, gather: Gather):
    return gather_parameter(shard, gather), None


def _backward(gather: Gather, _, gradient: jax.Array):
    # the transpose of the forward would sum in the dtype of the gather, and bfloat16 sums over many devices lose digits
    scatter = partial(reduce_scatter, axis=gather.axis, dim=gather.dim)
    return (with_manual_axes(scatter, gather.other_axes, gather.spec)(gradient).astype(gather.shard_dtype),)


gather_parameter.defvjp(_forward, _backward)


def regather_in_backward(stage: Callable) -> Callable:
    """Wraps a function so that its backward gathers parameters again, and saves all other residuals.

    In a scan over layers the backward gathers one layer at a time, else each parameter before it is read. A function
    that contains `jax.checkpoint` is unchanged, because an outer policy overrides an inner one; jaxpar's own policies
    save at most results of matmuls, hence no gathered parameter.
    """

    def run(*args: Any) -> Any:
        traced = Traced(stage, *args)
        if primitives(traced.closed.jaxpr.eqns).intersection(REMAT):
            return traced(*args)
        # a checkpoint around a scan would save its inputs and run all of it again; around the scan's body it gathers
        # one layer at a time
        jaxpr = traced.flat.jaxpr
        scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan" and _gathers(eqn.params)]
        if not scans:
            return jax.checkpoint(traced, policy=_is_saved)(*args)
        env = Env(jaxpr, traced.flat.consts, zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        for eqn in jaxpr.eqns:
            if any(eqn is scan for scan in scans):
                out = _run_checkpointed_scan(Scan(eqn), [env[var] for var in eqn.invars])
                env.update(zip(eqn.outvars, out, strict=True))
            else:
                env.run(eqn)
        return jax.tree.unflatten(traced.outputs, [env[var] for var in jaxpr.outvars])

    return run


def _run_checkpointed_scan(scan: Scan, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs a scan with a checkpointed body, so that the backward gathers the body's parameters again."""
    fixed, first, xs = split_groups(values, [scan.consts, scan.carry, scan.xs])
    body = jaxpr_as_fun(ClosedJaxpr(scan.body, scan.body_consts))

    # inside a scan XLA cannot merge forward and recomputation, so barriers of `prevent_cse` would only hinder fusion
    @partial(jax.checkpoint, policy=_is_saved, prevent_cse=False)
    def step(carry, xs):
        out = body(*fixed, *carry, *xs)
        return out[: scan.carry], out[scan.carry :]

    last, ys = jax.lax.scan(step, first, xs, length=scan.length, reverse=scan.reverse)
    return [*last, *ys]


# a reshaped parameter is as large as the parameter: saving it would save the gathered parameter
_MOVES = ("reshape", "squeeze", "transpose")


def _is_saved(primitive: Primitive, *_: Any, **params: Any) -> bool:
    """The checkpoint policy: saves all results except gathered parameters (a jitted call) and their reshapes."""
    return primitive.name not in _MOVES and not _gathers(params)


def _gathers(params: Mapping[str, Any]) -> bool:
    return any("all_gather" in primitives(jaxpr.eqns) for jaxpr in jaxprs_in_params(params))
