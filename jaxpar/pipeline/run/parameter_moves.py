"""Moves parameters from where they are stored to the stage and the layer that read them, and gradients back.

ZeRO-3 inside a table: gathers sharded parameters where a layer reads them, and reduce-scatters their gradients.

    shard ─► cast ─► all-gather ─► the layer ─► backward: float32 ─► reduce-scatter ─► gradient of the shard
                     in the dtype of matmuls                        in float32

A device holds one unsharded layer at a time. The backward gathers the parameters again, for any choice of residuals.

Layers move from the stages that store them to the stages that run them:

    stored   stage d holds layers  d L/P ... (d+1) L/P - 1       in order of depth, for every schedule
    running  stage d holds its chunks in sequence

With one chunk both are the same. With v chunks each parameter is sent once along `pipe` per step, in v permutes of 1/v
of a stage each, and each gradient is sent back. If each part is an edge from its storing to its running stage, the
parts form a bipartite graph of degree v, which splits into v permutations (König 1916).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh, PartitionSpec

from jaxpar.jaxprs.dataflow import REMAT, Env, Scan, Traced, primitives, split_groups
from jaxpar.pipeline.run.stage_gradients import reduce_scatter, with_manual_axes
from jaxpar.pipeline.tables.schedule import StageCut


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


def _gather_forward(shard: jax.Array, gather: Gather):
    return gather_parameter(shard, gather), None


def _gather_backward(gather: Gather, _, gradient: jax.Array):
    # the transpose of the forward would sum in the dtype of the gather, and bfloat16 sums over many devices lose digits
    scatter = partial(reduce_scatter, axis=gather.axis, dim=gather.dim)
    return (with_manual_axes(scatter, gather.other_axes, gather.spec)(gradient).astype(gather.shard_dtype),)


gather_parameter.defvjp(_gather_forward, _gather_backward)


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


def _gathers(params: Mapping[str, object]) -> bool:
    return any("all_gather" in primitives(jaxpr.eqns) for jaxpr in jaxprs_in_params(params))


def permutation_rounds(cut: StageCut) -> list[list[int]]:
    """Splits the parts into rounds, in which every stage sends one part and receives one.

    A bipartite graph with v edges at every node splits into v perfect matchings; each is found by augmenting paths.
    """
    unsent = [set(range(stage * cut.chunks, (stage + 1) * cut.chunks)) for stage in range(cut.stages)]
    permutations = []
    # after each round every stage has one part less to send and to receive, so another perfect matching exists
    for _ in range(cut.chunks):
        sends: dict[int, int] = {}  # stage that runs to the part that goes there

        def match(stage: int, visited: set[int], sends=sends) -> bool:
            # finds a receiver for this stage; a taken one is freed if its sender finds another
            for part in sorted(unsent[stage]):
                receiver, _ = cut.locate(part)
                if receiver not in visited:
                    visited.add(receiver)
                    if receiver not in sends or match(sends[receiver] // cut.chunks, visited):
                        sends[receiver] = part
                        return True
            return False

        for stage in range(cut.stages):
            match(stage, set())
        parts = sorted(sends.values())
        permutations.append(parts)
        for stage, part in enumerate(parts):
            unsent[stage].remove(part)
    return permutations


def padded_layers(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Pads stages with different numbers of layers; returns the layer at each place, and the place of each layer.

    Arrays sharded over `pipe` need the same number of places on all stages; spare places hold layer 0, unused.

    >>> padded_layers((2, 1))
    (array([0, 1, 2, 0]), array([0, 1, 2]))
    """
    longest, starts = max(counts), np.cumsum([0, *counts[:-1]])
    places = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    layers = [layer for stage_places in places for layer in [*stage_places, *[0] * (longest - len(stage_places))]]
    return np.array(layers), np.concatenate([longest * s + np.arange(n) for s, n in enumerate(counts)])


def redistribute_layers(mesh: Mesh, cut: StageCut, layers: object, *, reverse: bool = False) -> Any:
    """Moves layers from the stages that store them to the stages that run them.

    Args:
      mesh: A mesh with an axis `pipe`.
      cut: The parts of the model and their stages.
      layers: Arrays whose dim 0 is layers, sharded over `pipe`; the sharding of other dims does not change.
      reverse: Whether to move them from the running to the storing stages instead.
    """
    if all(cut.locate(part) == divmod(part, cut.chunks) for part in range(cut.parts)):
        return layers  # every stage runs the parts that it stores
    order = permutation_rounds(cut)
    stored = np.array([[part % cut.chunks for part in parts] for parts in order], np.int32)
    run = np.zeros_like(stored)
    for index, parts in enumerate(order):
        for part in parts:
            stage, chunk = cut.locate(part)
            run[index, stage] = chunk
    pairs = [[(part // cut.chunks, cut.locate(part)[0]) for part in parts] for parts in order]
    if reverse:
        stored, run = run, stored
        pairs = [[(receiver, origin) for origin, receiver in entry] for entry in pairs]

    def redistribute(sources, targets, layers):
        def redistribute_array(x):
            x = x.reshape(cut.chunks, -1, *x.shape[1:])
            out = jnp.zeros_like(x)
            for index, entry in enumerate(pairs):  # one permute per round: each stage sends one part and receives one
                piece = jax.lax.dynamic_index_in_dim(x, sources[index, 0], 0, keepdims=False)
                piece = jax.lax.ppermute(piece, "pipe", entry)
                out = jax.lax.dynamic_update_index_in_dim(out, piece, targets[index, 0], 0)
            return out.reshape(-1, *x.shape[2:])

        return jax.tree.map(redistribute_array, layers)

    entry = PartitionSpec(None, "pipe")
    specs: Mapping = {"in_specs": (entry, entry, PartitionSpec("pipe")), "out_specs": PartitionSpec("pipe")}
    return jax.shard_map(redistribute, mesh=mesh, axis_names={"pipe"}, check_vma=False, **specs)(stored, run, layers)
