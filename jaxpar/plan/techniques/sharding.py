"""ZeRO and FSDP with data parallelism: parameters gathered, gradients scattered and reduced, and how much is hidden.

    fsdp     zero 0: all-reduce of gradients; 1: scatter once a step, or an all-reduce with data for every one of
             several microbatches; 2: scatter for every microbatch; 1 and 2: parameters gathered once a step;
             3: parameters gathered going forward and backward, for every microbatch, and scatter; jaxpar's own
             steps keep them for the backward pass where nothing is recomputed
    data     all-reduce of gradients, and so over context, of fsdp's share where it shards them; once a step, or as the
             software has it

Parameters and gradients travel as the software has them; gradients that a table has summed, in float32. Source:
Rajbhandari et al. 2019, arXiv:1910.02054, section 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Look
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.dims import Named
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques.base import Technique, Work
from jaxpar.plan.techniques.sharding_bytes import gathered

SUMMED = 4  # of a gradient that one program on all stages has summed over its table: reduced as it is, in float32

ENDS = 3  # gathers with nothing to hide behind: embedding and first layer going forward, last layer going backward


def pieces(layers: Any, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns in how many collectives a device's parameters are gathered, or its gradients reduced.

    A scan over `layers` has one for each, all weights of a layer together; embedding and head make one more. Around
    the table of a pipeline, and where the software keeps gradients in one buffer, all travel at once.
    """
    together = software.everywhere & np.greater(candidate.pipe, 1)
    return np.where(together | (not software.layerwise), 1, layers + 1)


def buckets(parameters: Any, count: Any, software: SoftwareModel) -> Any:
    """Returns in how many collectives so many gradients are reduced: in `count`, or bucket by bucket."""
    return np.ceil(software.wire[1] * parameters / software.bucket) if software.bucket else count


def updated(parameters: Any, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, layers: Any) -> Any:
    """Returns the seconds in which devices of fsdp send each other what each has updated, once a step.

    One gather of all shards. Or one broadcast for every device that owns arrays; embedding, head and last norm are
    among them. They follow each other, and each passes through a ring of all devices, so that they take

        min(devices, arrays) (launch + hops) + bytes / bandwidth

    By ZeRO-1 and 2: else nothing.

    Sources: NCCL, src/device/broadcast.h, a chain through the ring; internlm/solver/optimizer/hybrid_zero_optim.py
    @fa7337b3, `_partition_param_list` and `broadcast_params`.
    """
    sharers, stride = _over(candidate, software)
    size, count = software.wire[0] * parameters, 1
    if software.broadcast_arrays:
        count = np.minimum(sharers, software.broadcast_arrays * layers + 3)
        size = size * sharers / np.maximum(sharers - 1, 1)  # each link carries all bytes, where a gather spares a share
    return np.where(np.isin(candidate.zero, (1, 2)), hardware.gather(size, sharers, stride, pieces=count), 0.0)


def gradients(
    parameters: Any, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, layers: Any
) -> tuple[Any, Any]:
    """Returns the seconds of fsdp's collectives for so many parameters of a device: per microbatch, and per step.

    The parameters are those of `layers`, and of embedding and head. One program on all stages gathers and reduces once,
    around its table; but stage 2 scatters in every tick that makes gradients, of those that are idle too. What stages 1
    and 2 gather once for all of a step comes at once, and is no part of it where nothing hides it: see `updated`.
    """
    over, count = _over(candidate, software), pieces(layers, candidate, software)
    around = software.everywhere & np.greater(candidate.pipe, 1)
    wires = software.wire[0], np.where(around, SUMMED, software.wire[1])
    # gradients of the head are scattered when they are made, by themselves
    counts = count, buckets(parameters, count + np.greater(count, 1), software)
    gather, scatter = (
        hardware.gather(size * parameters, *over, pieces=pieces) for size, pieces in zip(wires, counts, strict=True)
    )
    whole = 0.0
    if not software.exposed_update:
        whole = updated(parameters, candidate, hardware, software, layers=layers)
    ticks = np.where(around, 1 + (candidate.pipe - 1) / (candidate.microbatches * candidate.chunks), 1.0)
    eager = _eager(candidate, software)
    summed = eager | software.reduce_whole
    zero = [np.equal(candidate.zero, stage) for stage in (0, 1, 2, 3)]
    nothing = 0.0 * gather
    gathers = np.where(software.keeps_gathered(candidate), 1, 2)
    each = np.select(zero, [nothing, nothing, ticks * scatter, ~around * (gathers * gather + scatter)])
    once = [2 * scatter, ~summed * scatter + whole, nothing + whole, around * (gather + scatter)]
    return each, np.select(zero, once)


def replicas(
    parameters: Any, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, layers: Any
) -> tuple[Any, Any]:
    """Returns the seconds of all-reduces of so many gradients over data and context: per microbatch, and per step.

    One for both axes, in as many pieces as fsdp's; and for fsdp too where stage 1 reduces every one of several
    microbatches, or sums whole gradients. Where context shares what fsdp shards, it is none of them. Around a table
    data comes once a step, after fsdp; context inside of it, where fsdp has not sharded anything yet.
    """
    eager = _eager(candidate, software)
    whole = (eager | software.reduce_whole) & np.equal(candidate.zero, 1)
    sharers = software.sharers(candidate)
    shard = np.where(np.greater(candidate.zero, 0) & ~whole, sharers, 1)
    table = software.everywhere & np.greater(candidate.pipe, 1)
    # an exchange by which replicas step apart is priced by itself: see `data.py`
    data = 1 if software.exchange.apart else candidate.data
    size, context = software.wire[1] * parameters, candidate.context * candidate.fsdp // sharers
    near, far = (
        hardware.members(size, candidate.stride(axis)) for axis, size in (("context", context), ("data", data))
    )
    count = buckets(parameters, pieces(layers, candidate, software), software)
    ways = np.where(whole, sharers, 1)
    members = near * far * np.where(whole, hardware.members(*_over(candidate, software)), 1)
    both = 2 * hardware.gather(size / shard, data * context * ways, candidate.tensor, members=members, pieces=count)
    around = 2 * hardware.gather(SUMMED * parameters / shard, data, candidate.stride("data"), pieces=count)
    inside = 2 * hardware.gather(size, context, candidate.tensor, pieces=count)
    return np.where(table, inside, eager * both), np.where(table, around, ~eager * both)


def _over(candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns how many devices share what fsdp shards, and how many lie between two of them."""
    sharers = software.sharers(candidate)
    return sharers, np.where(np.greater(sharers, candidate.fsdp), candidate.stride("context"), candidate.stride("fsdp"))


def _eager(candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns whether gradients are reduced for every one of several microbatches."""
    return software.eager & np.equal(candidate.pipe, 1) & np.greater(candidate.microbatches, 1)


def exposed(traffic: Any, compute: Any, overlap: float) -> Any:
    """Returns the seconds of traffic that computation does not hide: `overlap` of it can be, as far as there is any."""
    return traffic - np.minimum(overlap * traffic, compute)


def around(work: Work, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> Mapping[str, Any]:
    """Returns the exposed seconds of fsdp's and data's collectives.

    What comes once a step runs beside the last microbatch's backward, two thirds of it; what comes for every
    microbatch, beside the rest. Waiting for other stages and for their messages hides them as well. Gathers at the ends
    of a pass have nothing to hide behind, and what is hidden may slow the computation beside it.
    """
    parts = work.parameters, candidate
    shards, copies = (price(*parts, hardware, software, layers=work.layers) for price in (gradients, replicas))
    last = work.compute / candidate.microbatches * 2 / 3
    room, share = work.compute - last, software.overlap
    if software.bucket:  # the last of them is full when nothing is left to hide it
        share = share * (1 - 1 / buckets(work.parameters, 1, software))
    if software.copies is None:
        each, once = (one + other for one, other in zip(shards, copies, strict=True))
        left = exposed(each * candidate.microbatches, room, share) + exposed(once, last, share)
    else:
        left = sum(
            exposed(each * candidate.microbatches, room, hidden) + exposed(once, last, hidden)
            for (each, once), hidden in ((shards, share), (copies, software.copies))
        )
    if software.interference:
        near = replace(hardware, between=replace(hardware.inside, latency=0.0), launch=0.0)
        near = replace(near, inside=replace(near.inside, latency=0.0), per_node=1)
        pair = (price(*parts, near, software, layers=work.layers) for price in (gradients, replicas))
        left = left + software.interference * sum(each * candidate.microbatches + once for each, once in pair)
    if software.ends and software.layerwise:
        layer = software.wire[0] * work.parameters / (work.layers + 1)
        alone = ENDS * hardware.gather(layer, *_over(candidate, software)) * candidate.microbatches
        left = left + np.where(np.equal(candidate.zero, 3), alone, 0.0)
    if software.exposed_update:
        left = left + updated(*parts, hardware, software, layers=work.layers)
    return {"sharding": left}


def stages(size: int) -> Sequence[Mapping[str, int]]:
    """Returns the stages of ZeRO that so many devices can share: of one device none, or it would be data."""
    return [{"zero": zero} for zero in ((1, 2, 3) if size > 1 else (0,))]


def working(model: Named, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Mapping[str, Any]:
    """Returns the bytes of a decoder's parameters that are gathered to work with; jaxpar's own are with its moments."""
    if not isinstance(model, Shape) or software.everywhere:
        return {}
    return {"working": gathered(model, candidate, software, recipe)}


SHARDING = Technique(
    axis="fsdp",
    variants=stages,
    bytes=working,
    around=around,
    looks={"sharding": Look(letter="S", shade=220, light="#e3a712", dark="#f2cb52")},
    complexity=1.0,
)
