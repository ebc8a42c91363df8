"""The subject of an inspection: a lowered program, and its user's names for its array arguments.

Of a training step, every array has the name that the model gives it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from jaxpar.errors import refuse, user_code_errors
from jaxpar.exchange.collectives import algorithms
from jaxpar.hlo.attribution import Argument
from jaxpar.hlo.flop_share import FlopShare
from jaxpar.hlo.text import BITS
from jaxpar.html.charts import Card
from jaxpar.mesh.chips import find_chip
from jaxpar.parallel.declaration import IMAGE
from jaxpar.parallel.layout import Layout, replica_messages, sync_note
from jaxpar.parallel.shard_cards import cards
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.sharding.names import format_path, shard_shape
from jaxpar.step.model_flop import model_flop
from jaxpar.step.shard_batch import check_dict
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.units import show_seconds

ROLES = ("parameters", "optimizer state", "other state", "batch", "arguments")
# in the flattening order of a state, which is the order of the program's arguments
_ROLES = {"step": "other state", "params": "parameters", "optimizer": "optimizer state", "model_state": "other state",
          "exchange": "other state"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A program to be inspected.

    Attributes:
      title: Name of the program.
      lowered: Result of `jax.jit(...).lower`.
      mesh: Mesh on which it runs.
      arguments: Every array argument.
      used: Maps the path of a parameter to the shape with which one device computes.
      loss: (file, function) of functions that compute the loss.
      model_flop: FLOP of a step over all devices, without recomputation; None if unknown.
      share: The matmuls of the traced program, of which each device should compute an equal part; None if unknown.
      precision: `bf16` if matmuls should run in 16 bits.
      batch_axes: Mesh axes that split examples, or images.
      unsharded_gradient_axes: The axes among `batch_axes` that are not meant to split any gradient, even if they split
        its parameter.
      axes_without_traffic: Mesh axes over which this program is meant to send nothing.
      microbatches: Number of microbatches in a step.
      updates: Number of weight updates in a step.
      schedule: The schedule of its pipeline; None without one.
      cards: The shards of its parameters, and the devices that hold them.
      notes: Remarks for the reader of a report.
      cacheable: Whether its compiled form may be cached by its text: not if a user's `jit` may have compiler options,
        which the text does not show.
      compiler_options: Compiler options of XLA when the program is compiled to be run.
    """

    title: str
    lowered: Any = field(repr=False)
    mesh: Mesh
    arguments: tuple[Argument, ...]
    used: Mapping[str, Sequence[int]] = field(default_factory=dict)
    loss: tuple[tuple[str, str], ...] = ()
    model_flop: float | None = None
    share: FlopShare | None = field(default=None, repr=False)
    precision: str = ""
    batch_axes: tuple[str, ...] = ()
    unsharded_gradient_axes: tuple[str, ...] = ()
    axes_without_traffic: tuple[str, ...] = ()
    microbatches: int = 1
    updates: int = 1
    schedule: Schedule | None = field(default=None, repr=False)
    cards: tuple[Card, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    cacheable: bool = False
    compiler_options: Mapping[str, Any] = field(default_factory=dict)


def argument(
    path: str,
    role: str,
    leaf: jax.Array | jax.ShapeDtypeStruct,
    sharding: Sharding,
    *,
    names: Sequence[str | None] = (),
) -> Argument:
    """Describes one array for the inspector.

    Args:
      path: The user's name of the array.
      role: One of `ROLES`.
      leaf: Anything with shape and dtype.
      sharding: Its sharding.
      names: Names of its dims, if it has any.
    """
    shape, shard = tuple(leaf.shape), tuple(sharding.shard_shape(tuple(leaf.shape)))
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # a random key is an array of integers
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        tail = data.shape[len(shape) :]
        shape, shard, dtype = (*shape, *tail), (*shard, *tail), data.dtype
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    sizes = dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {}
    dims, shard_axes = [], []
    for dim, size in enumerate(shape):
        entry = spec[dim] if dim < len(spec) else None
        axes = [a for a in ((entry,) if isinstance(entry, str) else entry or ()) if sizes.get(a, 1) > 1]
        shard_axes += axes
        name = names[dim] if dim < len(names) and names[dim] else str(size)
        dims.append("/".join([str(name), *axes]))
    return Argument(
        path=path, role=role, dtype=hlo_dtype(dtype), shape=shape, shard=shard,
        placed=f"{hlo_dtype(dtype)}[{', '.join(dims)}]", axes=tuple(shard_axes),
        stacked=names[0] == "layers" if names else len(shape) > 2,
        host=getattr(sharding, "memory_kind", None) == "pinned_host",
    )  # fmt: skip


def hlo_dtype(dtype: DTypeLike) -> str:
    """A dtype's name in HLO.

    >>> hlo_dtype("bfloat16")
    'bf16'
    """
    name = jnp.dtype(dtype).name
    short = {"bool": "pred", "complex64": "c64", "complex128": "c128"}.get(name)
    short = short or name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u")
    short = f"s{name[3:]}" if name.startswith("int") else short.replace("_", "")
    return short if short in BITS else name


def from_function(function: Any, args: tuple, kwargs: dict, *, roles: Sequence[str], mesh: Mesh | None) -> Subject:
    """Lowers any jitted function with its arguments, as a subject.

    Raises:
      JaxparError: If it is not jitted, or its arguments are on several meshes.
    """
    if isinstance(function, str | Path) or not hasattr(function, "lower"):
        raise refuse(
            f"inspect({getattr(function, '__name__', function)!r:.60}, ...)",
            rule="jp.inspect takes a jitted function, or a step of jp.train_step",
            fix="jaxpar inspect JOB, for the file of a job"
            if isinstance(function, str | Path)
            else "jax.jit(f), with arguments that have shardings",
        )
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise refuse(
            f"roles={roles!r:.60}", rule="roles are a tuple, one for each argument", fix='roles=("parameters",)'
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise refuse(f"mesh={mesh!r:.60}", rule="a mesh is a jax.sharding.Mesh", fix="leave it out")
    for role in roles:
        if role not in ROLES:
            raise refuse(
                f"roles={tuple(roles)}", rule=f"a role is one of {', '.join(ROLES)}", fix='roles=("parameters",)'
            )
    if len(roles) > len(args):
        raise refuse(
            f"{len(roles)} roles for {len(args)} arguments", rule="one role for each argument", fix="fewer roles"
        )
    flat = jax.tree_util.tree_leaves_with_path((args, kwargs))
    meshes: list[Mesh] = [
        leaf.sharding.mesh for _, leaf in flat if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]
    if mesh is None and meshes:
        mesh = meshes[0]
    if mesh is None:
        mesh = Mesh([jax.devices()[0]], ("device",))
    if any(m.shape != mesh.shape or m.device_ids.tolist() != mesh.device_ids.tolist() for m in meshes):
        raise refuse(
            f"arguments on meshes {', '.join(sorted({str(dict(m.shape)) for m in [mesh, *meshes]}))}",
            rule="all arguments are on one mesh",
            fix="shard every argument over the same mesh",
        )
    title = getattr(function, "__name__", "program")
    replicated = NamedSharding(mesh, PartitionSpec())
    with user_code_errors(
        title, rule="the arguments must be those of a call of the function", fix="the call it is made for"
    ):
        lowered = function.lower(*args, **kwargs)
    arguments = []
    for keys, leaf in flat:
        if not hasattr(leaf, "shape"):
            continue
        number = keys[1].idx if keys[0].idx == 0 else len(roles)
        role = roles[number] if number < len(roles) else "arguments"
        sharding = getattr(leaf, "sharding", None)
        path = "args" + jax.tree_util.keystr(keys[1:]) if keys[0].idx == 0 else jax.tree_util.keystr(keys[1:])
        arguments.append(argument(path, role, leaf, sharding if isinstance(sharding, NamedSharding) else replicated))
    batch_axes = {axis for array in arguments if array.role == "batch" for axis in array.axes}
    return Subject(
        title=getattr(function, "__name__", "program"), lowered=lowered, mesh=mesh, arguments=tuple(arguments),
        batch_axes=tuple(axis for axis in mesh.axis_names if axis in batch_axes or axis in ("data", "fsdp")),
    )  # fmt: skip


def step_subject(step: Step, batch: Mapping[str, object], *, sync_round: int = 0) -> Subject:
    """Lowers a step for a batch of these shapes, and names its arrays.

    Args:
      step: The step.
      batch: Anything with shape and dtype, by name.
      sync_round: The number of the sync round that ends the step, from 1; 0 for none.

    Raises:
      JaxparError: If the batch is not a dict of arrays or shapes, or the step refuses it.
    """
    check_dict(batch)
    layout, state = step.layout, step.abstract()
    batch = step.placement.shapes(batch)
    lowered = step.lower(state, batch, sync_round=sync_round)
    notes, code = tuple(_notes(step, layout)), _code(step.loss)
    return Subject(
        title=layout.summary(),
        lowered=lowered,
        mesh=layout.device_mesh,
        arguments=tuple(
            [*_state(step, state), *(argument(k, "batch", v, v.sharding) for k, v in sorted(batch.items()))]
        ),
        used={
            path: shard_shape(place.leaf.shape, place.used, layout.sizes) for path, place in layout.placements.items()
        }
        | {
            f"model_state/{path}": shard_shape(place.leaf.shape, place.used, layout.sizes)
            for path, place in layout.other_state.items()
        },
        loss=((code.co_filename, code.co_name),) if code else (),
        model_flop=model_flop(step, batch),
        share=step.compiler.share,
        precision=step.numerics.matmuls.compute,
        batch_axes=(*layout.parallel.batch_axes, *(axis for axis in IMAGE if axis in layout.sizes)),
        unsharded_gradient_axes=layout.parallel.zero_axes if layout.parallel.stage == 1 else (),
        axes_without_traffic=step.gradients.axes_without_traffic(
            sync_round=sync_round or step.gradients.sync_round(1) * (step.gradients.sync_every == 1)
        ),
        microbatches=step.numerics.accumulate * layout.microbatches,
        updates=step.gradients.updates,
        cards=tuple(cards(layout.placements, layout.sizes)),
        schedule=layout.schedule if layout.sizes["pipe"] > 1 else None,
        notes=notes,
        cacheable=True,
        compiler_options=step.compiler.options,
    )


def _notes(step: Step, layout: Layout) -> Iterator[str]:
    """Yields the remarks on a lowered step; `layout` is its layout before tracing, which adds notes."""
    yield from step.compiler.implementations
    platform = layout.device_mesh.devices.flat[0].platform
    attention = ""
    if platform != "cpu" and jax.default_backend() != "gpu" and step.numerics.dtype:
        if layout.sizes["context"] == 1:
            attention = (
                "attention is compiled as XLA's own: on a GPU, jaxpar's models take cuDNN's fused kernel in 16 bits, "
                "which keeps no [seq, seq] scores and is faster"
            )
        elif layout.parallel.implementations.get("context", "gather") == "gather":  # others have their own notes
            attention = "attention is XLA's own: cuDNN's kernel does not take pieces of a sequence, so scores are kept"
    if attention:
        yield attention
    prior = (*layout.notes, *step.compiler.implementations, attention)
    yield from (note for note in step.layout.notes if note not in prior)  # added by the trace
    if step.numerics.remat == "offload" and platform == "cpu":
        yield "XLA for processors has one memory: inputs of layers stay where they are, and nothing is freed"
    if step.numerics.offload:
        yield "optimizer state in host memory is counted apart from the device's"
    yield from step.compiler.matmuls.notes if step.compiler.matmuls else ()
    yield from step.gradients.notes
    yield from _synchronization(layout)


def _synchronization(layout: Layout) -> list[str]:
    """Describes how replicas synchronize, with the modelled time if the hardware's links are known."""
    if not sync_note(layout):
        return []
    chip = find_chip(layout.device_mesh.devices.flat[0].device_kind)
    hardware = HARDWARE.get(chip.key) if chip else None
    if hardware is None:
        return [sync_note(layout)]
    local = layout.devices // layout.sizes["pipe"] <= hardware.per_node  # `data` is the outermost axis inside `pipe`
    seconds = algorithms.traffic_seconds(replica_messages(layout), hardware.inside if local else hardware.between)
    return [f"{sync_note(layout)}, which takes {show_seconds(seconds)} (modelled)"]


def _state(step: Step, state: State) -> list[Argument]:
    """Lists the arrays of the state: parameters by path, others by part of the state and path."""
    layout, exchange = step.layout, step.layout.parallel.exchange
    places = {
        "params": (layout.placements, exchange.replicas_differ),
        "model_state": (layout.other_state, exchange.per_replica),
    }
    arguments = []
    for part, role in _ROLES.items():
        for keys, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, part)):
            path = format_path(keys)
            placements, per_replica = places.get(part, ({}, False))
            place = placements.get(path)
            name = path if part == "params" else f"{part}/{path}".rstrip("/")
            names = (("replica",) * per_replica + place.names) if place else ()
            arguments.append(argument(name, role, leaf, leaf.sharding, names=names))
    return arguments


def _code(function: object) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", None)
