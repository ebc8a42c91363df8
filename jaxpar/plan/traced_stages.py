"""Bytes and seconds of a traced model in a pipeline, from the parts in `model/stages.py`.

    step         span of the schedule's table, with the seconds of a stage's layers and of the head, and those of the
                 embedding, which a tick has besides; + exposed sharding + optimizer
    activations  kept bytes of a layer x layers of a part x (microbatch, chunk) pairs in flight, and messages
    moment       the largest live bytes in a tick: in the head, in one layer's backward, or in the embedding's backward

One program runs on all stages, so each stage holds the embedding and the head. During the loop over ticks it also holds
copies of its parameters, and sums of their gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Causes
from jaxpar.plan.enumeration import select
from jaxpar.plan.machine.hardware import SMALLEST_KERNEL, Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory, bytes_by_zero_stage
from jaxpar.plan.model.layer_bytes import updates_in_place
from jaxpar.plan.model.liveness import Estimate
from jaxpar.plan.model.program import value
from jaxpar.plan.model.stages import StageTrace
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques import pipe, span
from jaxpar.plan.techniques.base import Work
from jaxpar.plan.techniques.table import overlapped_seconds
from jaxpar.plan.time import StepTime, optimizer

CausesT = TypeVar("CausesT", bound=Causes)
SUM = 4  # bytes of a gradient that the table accumulates: float32
TICK = 16  # small kernels of a tick besides its layers: rows of the table, slots, messages; XLA 0.12 makes 12 to 20
MASKED_WRITE = 4  # bytes that a masked write into a slot moves for each that a forward writes anyway


def per_row(change: Callable[..., Mapping[str, float]], *columns: Any) -> dict[str, Any]:
    """Evaluates a scalar function for arrays of layouts, once per distinct set of values."""
    arrays = np.broadcast_arrays(*columns)
    keys = [*zip(*(array.ravel().tolist() for array in arrays), strict=True)]
    results = {key: change(*key) for key in dict.fromkeys(keys)}
    names = results[keys[0]]
    return {name: np.array([results[key][name] for key in keys]).reshape(arrays[0].shape) for name in names}


def evaluate_by_kind(
    candidate: Candidate, unpipelined: Callable[[Candidate], CausesT], staged: Callable[[Candidate], CausesT]
) -> CausesT:
    """Evaluates layouts without and with a pipeline, each by its own function; causes that one lacks are 0 in it."""
    piped = np.greater(candidate.pipe, 1)
    if not piped.any():
        return unpipelined(candidate)
    if piped.all():
        return staged(candidate)
    columns = candidate.map_fields(lambda column: np.broadcast_to(column, piped.shape))
    parts = [(~piped, unpipelined(select(columns, ~piped))), (piped, staged(select(columns, piped)))]
    amounts = {cause: np.zeros(piped.shape) for _, causes in parts for cause in causes}
    for mask, causes in parts:
        for cause, amount in causes.items():
            amounts[cause][mask] = amount
    return type(parts[0][1])(**amounts)


def supports(stages: StageTrace, candidate: Candidate) -> np.ndarray:
    """Whether jaxpar can compose each layout with a pipeline: its stages, replicas, and shards."""
    others = [np.equal(size, 1) for axis, size in candidate.sizes.items() if axis not in ("pipe", "data", "fsdp")]
    legal = per_row(lambda *sizes: {"legal": sizes in stages.shards}, candidate.pipe, candidate.fsdp)["legal"]
    return np.logical_and.reduce(np.broadcast_arrays(legal, *others))


def storage(amounts: Mapping[tuple[int, int], int], pipe: object, fsdp: object) -> Any:
    """Returns the amount that a device stores between steps, by the sizes of `pipe` and `fsdp`."""
    return per_row(lambda *sizes: {"amount": amounts[sizes]}, pipe, fsdp)["amount"]


def stages_memory(stages: StageTrace, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Memory:
    """Returns the bytes of a device, by cause; all layouts have a pipeline."""
    whole, shard = (storage(stages.shards, candidate.pipe, fsdp) for fsdp in (1, candidate.fsdp))
    parameters, _, moments = bytes_by_zero_stage(whole, shard, candidate, recipe)
    held = stages.parameters(candidate.pipe)
    sharded = np.greater(candidate.fsdp, 1)
    copies = np.where(sharded | stages.copies, software.wire[0] * held, 0.0)
    sums = SUM * held / np.where(np.equal(candidate.zero, 2), candidate.fsdp, 1)
    other = [storage(stages.other_state, candidate.pipe, fsdp) for fsdp in (1, candidate.fsdp)]
    extra = {"state": np.where(np.equal(candidate.zero, 0), *other)} if any(stages.other_state.values()) else {}

    (in_use, _), _ = pipe.in_flight(candidate)
    in_place = updates_in_place(candidate, software)
    kept = per_row(
        lambda rows, remat: {"bytes": float(value(stages.programs[remat].kept, rows))},
        candidate.microbatch,
        candidate.remat,
    )["bytes"]
    layers = candidate.layers(stages.layers)
    slots = layers * (in_use + ~in_place) * kept + (in_use + 1) * microbatch_bytes(stages.message, candidate)
    batch = candidate.microbatches * microbatch_bytes(stages.batch, candidate)
    # ticks that mix ops sum the gradients of all layers of a chunk at once
    unsummed = np.where(in_place, 0.0, software.wire[1] * (layers - 1) * stages.layer_parameters)
    fullest = _moment(stages, candidate, software)
    return Memory(
        parameters=parameters,
        gradients=sums + fullest["gradients"] + unsummed,
        optimizer=moments,
        activations=slots + batch + fullest["activations"],
        logits=fullest["logits"],
        working=copies + fullest["weights"],
    ).plus(extra)


def _moment(stages: StageTrace, candidate: Candidate, software: SoftwareModel) -> dict[str, Any]:
    """Returns the peak of live bytes within a tick, by class of array. The head's activations count as logits.

    While the next microbatch's logits exist, the head's gradient is already in float32, like its sum.
    """
    head_gradient = SUM / software.wire[1] * stages.head.gradient_bytes

    def fullest(rows: int, remat: str) -> dict[str, float]:
        head = stages.head.peak(rows)
        gradients = max(head["gradients"], head_gradient)
        moments = [{**head, "gradients": gradients, "logits": head["activations"], "activations": 0.0}]
        for program in (stages.programs[remat].backward, stages.embedding_gradient):
            moments.append({**program.peak(rows), "logits": 0.0})
        return max(moments, key=lambda moment: sum(moment.values()))

    return per_row(fullest, candidate.microbatch, candidate.remat)


def stages_time(
    stages: StageTrace, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, update: float
) -> StepTime:
    """Returns the seconds of a step, by cause; all layouts have a pipeline.

    Args:
      stages: The parts of the model.
      candidate: The layouts.
      hardware: The machines.
      software: The program.
      update: Bytes per parameter of the optimizer's step.
    """
    layers, held = candidate.layers(stages.layers), stages.parameters(candidate.pipe)
    layer, first, last = (_seconds(stages, candidate, hardware, part) for part in ("layer", "embedding", "head"))
    plain = _seconds(stages, replace(candidate, remat="none"), hardware, "layer")
    sizes = stages.layer_parameters, stages.end_parameters
    sums, end_sums = (
        np.maximum(hardware.stream(software.accumulate * size), SMALLEST_KERNEL * arrays)
        for size, arrays in zip(sizes, stages.arrays, strict=True)
    )
    forward = layers * layer["forward"] + TICK * SMALLEST_KERNEL
    backward = layers * (layer["backward"] + sums) + TICK * SMALLEST_KERNEL
    # the two halves of a backward are one op here, so only their sum matters
    times = (forward, backward / 2, backward / 2, last["forward"] + end_sums, 0.0)
    send = pipe.send_seconds(microbatch_bytes(stages.message, candidate), candidate, hardware, software)
    table = span.counts(
        *np.broadcast_arrays(candidate.schedule, candidate.pipe, candidate.microbatches, candidate.chunks, send)[:4],
        run=software.run,
    )
    embeddings = candidate.microbatches * (first["forward"] + first["backward"])
    alone, with_sends = (span.span(table, (*times, extra)) + embeddings for extra in (0.0, send))
    cells, ends = candidate.microbatches * candidate.chunks, candidate.microbatches
    count, busy = cells * layers, cells * (forward + backward) + ends * (last["forward"] + end_sums) + embeddings
    recompute = np.maximum(sum(layer[key] - plain[key] for key in ("forward", "backward")), 0.0)
    matmuls = count * plain["matmuls"] + ends * (first["matmuls"] + last["matmuls"])
    work = Work(parameters=held, layers=candidate.chunks * layers, compute=with_sends)
    zeros = 0.0 * with_sends
    return StepTime(
        matmuls=zeros + matmuls,
        attention=zeros,
        elementwise=np.maximum(busy - matmuls - count * recompute, 0.0),
        recompute=zeros + count * recompute,
        **overlapped_seconds(work, candidate, hardware, software),
        bubble=np.maximum(alone - busy, 0.0),
        send=np.maximum(with_sends - alone, 0.0),
        stragglers=with_sends * hardware.straggler_share(candidate.devices),
        optimizer=optimizer(held, candidate, hardware, replace(software, update=update))
        + SMALLEST_KERNEL * stages.update_kernels,
    ).times(hardware.calibration)


def microbatch_bytes(polynomial: np.ndarray, candidate: Candidate) -> Any:
    """Returns the bytes of a microbatch of each layout."""
    return per_row(lambda rows: {"bytes": float(value(polynomial, rows))}, candidate.microbatch)["bytes"]


def _seconds(stages: StageTrace, candidate: Candidate, hardware: Hardware, part: str) -> dict[str, Any]:
    """Returns the seconds of a part's forward and backward for a microbatch, and those of their matmuls."""

    def slot_bytes(rows: int, remat: str, masked: bool) -> dict[str, float]:
        # a forward copies residuals into a slot, and a backward out of it
        layer = stages.programs[remat]
        kept = hardware.stream(value(layer.kept, rows))
        copied = float(kept) if part == "layer" else 0.0
        programs: Mapping[str, tuple[Estimate, ...]] = {
            "layer": (layer.forward, layer.backward),
            "embedding": (stages.embedding, stages.embedding_gradient),
            "head": (stages.head,),
        }
        priced = [program.seconds(rows, hardware) for program in programs[part]]
        totals = [sum(seconds.values()) for seconds in priced]
        return {
            "forward": totals[0] + (MASKED_WRITE if masked else 1) * copied,
            "backward": sum(totals[1:]) + copied,
            "matmuls": sum(seconds["matmuls"] for seconds in priced),
        }

    (in_use, _), _ = pipe.in_flight(candidate)
    # idle stages have no free slot once all microbatches are in flight: see `jaxpar.pipeline.run.tick_program`
    masked = np.greater_equal(in_use, candidate.microbatches * candidate.chunks) & candidate.schedule_traits.phased
    return per_row(slot_bytes, candidate.microbatch, candidate.remat, masked)
