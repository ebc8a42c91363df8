"""Makes a training step the subject of an inspection: names every array of the step as the model does."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax

from jaxpar.exchange.collectives import algorithms
from jaxpar.hlo.attribution import Argument
from jaxpar.inspector.subject import Subject, argument
from jaxpar.mesh.chips import find_chip
from jaxpar.parallel.declaration import IMAGE
from jaxpar.parallel.layout import Layout, replica_messages, sync_note
from jaxpar.parallel.shard_cards import cards
from jaxpar.plan.machine.hardware import HARDWARE
from jaxpar.sharding.names import path_of, shard_shape
from jaxpar.step.model_flop import model_flop
from jaxpar.step.shard_batch import check_dict
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.units import show_seconds

# in the flattening order of a state, which is the order of the program's arguments
_ROLES = {"step": "other state", "params": "parameters", "optimizer": "optimizer state", "model_state": "other state",
          "exchange": "other state"}  # fmt: skip


def step_subject(step: Step, batch: Mapping[str, Any], *, sync_round: int = 0) -> Subject:
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
            path = path_of(keys)
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
