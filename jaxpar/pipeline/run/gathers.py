"""Sharded parameters inside a table: gathered where a layer reads them, their gradients scattered again at once.

    shard ─► cast ─► all-gather ─► the layer ─► backward: float32 ─► reduce-scatter ─► gradient of the shard
                     in the dtype of matmuls                        in float32

A device holds one whole layer at a time. A layer's parameters are gathered again for its backward, whatever else is
kept for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from jaxpar.pipeline.jaxprs.dataflow import REMAT, Env, Scan, Traced, parts, primitives
from jaxpar.pipeline.run.sum_shards import beside, scattered


@dataclass(frozen=True, kw_only=True)
class Gather:
    """The axis, dim and dtype with which one parameter is gathered.

    Attributes:
      axis: A manual mesh axis, whose devices have different examples.
      dim: The dim of the parameter that it splits.
      dtype: Of the whole parameter.
      stored: Dtype of the shard, and of its gradient.
      others: Axes that XLA handles elsewhere and that are made manual for the gather; empty leaves them to XLA.
      spec: The dims that `others` split.
    """

    axis: str
    dim: int
    dtype: Any
    stored: Any
    others: tuple[str, ...]
    spec: PartitionSpec


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(shard: jax.Array, how: Gather) -> jax.Array:
    """Returns the whole parameter; the gradient of the shard is summed over the axis in float32 and scattered."""
    # cast before the gather: bfloat16 sends half of the bytes
    whole = partial(jax.lax.all_gather, axis_name=how.axis, axis=how.dim, tiled=True)
    return beside(whole, how.others, how.spec)(shard.astype(how.dtype))


def _forward(shard: jax.Array, how: Gather):
    return gathered(shard, how), None


def _backward(how: Gather, _, gradient: jax.Array):
    # not the transpose of the forward, which would sum in the dtype of the gather: a sum of bfloat16 gradients over
    # many devices loses digits
    scatter = partial(scattered, axis=how.axis, dim=how.dim)
    return (beside(scatter, how.others, how.spec)(gradient).astype(how.stored),)


gathered.defvjp(_forward, _backward)


def gathered_again(stage: Callable) -> Callable:
    """Returns a function whose backward keeps all its residuals but gathered parameters, which it gathers again.

    In a scan over layers they are gathered one layer at a time, else each before it is read. A function that contains
    `jax.checkpoint` is left alone, as an inner policy does not count inside of an outer one; its own policy keeps
    results of matmuls at most, and a gathered parameter is none.
    """

    def run(*args: Any) -> Any:
        traced = Traced(stage, *args)
        if primitives(traced.closed.jaxpr.eqns).intersection(REMAT):
            return traced(*args)
        # a checkpoint around a whole scan would keep its inputs and run all of it again; around the body of the scan
        # it gathers one layer at a time
        jaxpr = traced.flat.jaxpr
        loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan" and _gathers(eqn.params)]
        if not loops:
            return jax.checkpoint(traced, policy=_kept)(*args)
        env = Env(jaxpr, traced.flat.consts, zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        for eqn in jaxpr.eqns:
            if any(eqn is loop for loop in loops):
                out = _one_by_one(Scan(eqn), [env[var] for var in eqn.invars])
                env.update(zip(eqn.outvars, out, strict=True))
            else:
                env.run(eqn)
        return jax.tree.unflatten(traced.outputs, [env[var] for var in jaxpr.outvars])

    return run


def _one_by_one(scan: Scan, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs a scan whose steps gather their parameters again in the backward."""
    fixed, first, xs = parts(values, [scan.consts, scan.carry, scan.xs])
    body = jaxpr_as_fun(ClosedJaxpr(scan.body, scan.body_consts))

    # inside a scan XLA cannot merge forward and recomputation, which `prevent_cse` is there to prevent; its barriers
    # would only keep XLA from fusing
    @partial(jax.checkpoint, policy=_kept, prevent_cse=False)
    def step(carry, xs):
        out = body(*fixed, *carry, *xs)
        return out[: scan.carry], out[scan.carry :]

    last, ys = jax.lax.scan(step, first, xs, length=scan.length, reverse=scan.reverse)
    return [*last, *ys]


# a reshaped parameter is as large as the parameter: keeping it would keep what must be gathered again
_MOVES = ("reshape", "squeeze", "transpose")


def _kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """Returns whether a result is kept for the backward: those of `gathered`, which is a call, are not."""
    return primitive.name not in _MOVES and not _gathers(params)


def _gathers(params: Mapping[str, Any]) -> bool:
    return any("all_gather" in primitives(jaxpr.eqns) for jaxpr in jaxprs_in_params(params))
