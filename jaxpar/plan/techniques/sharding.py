"""ZeRO and FSDP with data parallelism: gathers of parameters, reductions of gradients, and their exposed share.

    fsdp     zero 0: all-reduce of gradients; 1: reduce-scatter once a step, or an all-reduce together with data for
             each of several microbatches; 2: reduce-scatter per microbatch; 1 and 2: all-gather of parameters once a
             step; 3: all-gathers of parameters in the forward and the backward pass of every microbatch, and
             reduce-scatter; jaxpar's own steps save the gathered ones for the backward pass without recomputation
    data     all-reduce of gradients, or of fsdp's shards, also over context; once a step, or per microbatch, depending
             on the software

Dtypes of parameters and gradients are the software's; gradients that a pipeline has accumulated are float32. Source:
Rajbhandari et al. 2019, arXiv:1910.02054, section 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Style
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques.base import PlanTechnique, Work
from jaxpar.plan.techniques.span import gathered_bytes

SUM_BYTES = 4  # bytes of a gradient that one program on all stages has accumulated over its table: float32
ENDS = 3  # exposed gathers: embedding and first layer in the forward pass, last layer in the backward pass


def collective_count(layers: np.ndarray | float, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the number of collectives that gather a device's parameters, or reduce its gradients.

    A scan has one per layer, and embedding and head make one more. A pipeline's program, and software with a single
    gradient buffer, have one in total.
    """
    single = software.spmd & np.greater(candidate.pipe, 1)
    return np.where(single | (not software.layerwise), 1, layers + 1)


def bucket_count(parameters: np.ndarray | float, count: np.ndarray | float, software: SoftwareModel) -> Any:
    """Returns the number of collectives that reduce the gradients: one per bucket, or `count` without buckets."""
    return np.ceil(software.wire[1] * parameters / software.bucket) if software.bucket else count


def update_seconds(
    parameters: np.ndarray | float,
    candidate: Candidate,
    hardware: Hardware,
    software: SoftwareModel,
    *,
    layers: np.ndarray | float,
) -> Any:
    """Returns the seconds of distributing updated parameters over fsdp, once a step, with ZeRO-1 and 2; 0 otherwise.

    One gather of all shards. Or one broadcast per device that owns arrays, including embedding, head and last norm.
    Broadcasts run one after another, each through a ring of all devices, and take

        min(devices, arrays) (launch + hops) + bytes / bandwidth

    Sources: NCCL, src/device/broadcast.h, a chain through the ring; internlm/solver/optimizer/hybrid_zero_optim.py
    @fa7337b3, `_partition_param_list` and `broadcast_params`.
    """
    sharers, stride = _over(candidate, software)
    size, count = software.wire[0] * parameters, 1
    if software.broadcast_arrays:
        count = np.minimum(sharers, software.broadcast_arrays * layers + 3)
        size = size * sharers / np.maximum(sharers - 1, 1)  # a link carries all bytes; in a gather, all but one shard
    return np.where(np.isin(candidate.zero, (1, 2)), hardware.gather(size, sharers, stride, pieces=count), 0.0)


def fsdp_seconds(
    parameters: np.ndarray | float,
    candidate: Candidate,
    hardware: Hardware,
    software: SoftwareModel,
    *,
    layers: np.ndarray | float,
) -> tuple[Any, Any]:
    """Returns the seconds of fsdp's collectives: (per microbatch, per step).

    `parameters` counts a device's parameters in its `layers`, the embedding and the head. If one program runs on all
    stages, it gathers parameters once before the loop over ticks and reduces gradients once after it; but ZeRO-2
    reduce-scatters in every tick with gradients, also on idle stages. The gather of ZeRO-1 and 2 after the update is
    included unless it is exposed.
    """
    group, count = _over(candidate, software), collective_count(layers, candidate, software)
    in_table = software.spmd & np.greater(candidate.pipe, 1)
    wires = software.wire[0], np.where(in_table, SUM_BYTES, software.wire[1])
    # gradients of the head have their own scatter
    counts = count, bucket_count(parameters, count + np.greater(count, 1), software)
    gather, scatter = (
        hardware.gather(size * parameters, *group, pieces=pieces) for size, pieces in zip(wires, counts, strict=True)
    )
    update = 0.0
    if not software.exposed_update:
        update = update_seconds(parameters, candidate, hardware, software, layers=layers)
    ticks = np.where(in_table, 1 + (candidate.pipe - 1) / (candidate.microbatches * candidate.chunks), 1.0)
    reduces_each = _eager(candidate, software)
    whole_sums = reduces_each | software.reduce_whole
    zero = [np.equal(candidate.zero, stage) for stage in (0, 1, 2, 3)]
    zeros = 0.0 * gather
    gathers = np.where(software.keeps_gathered(candidate), 1, 2)
    per_microbatch = np.select(zero, [zeros, zeros, ticks * scatter, ~in_table * (gathers * gather + scatter)])
    per_step = [2 * scatter, ~whole_sums * scatter + update, zeros + update, in_table * (gather + scatter)]
    return per_microbatch, np.select(zero, per_step)


def data_seconds(
    parameters: np.ndarray | float,
    candidate: Candidate,
    hardware: Hardware,
    software: SoftwareModel,
    *,
    layers: np.ndarray | float,
) -> tuple[Any, Any]:
    """Returns the seconds of all-reduces of this many gradients over data and context: per microbatch, and per step.

    One all-reduce spans both axes, in as many pieces as fsdp's; it also spans fsdp if ZeRO-1 reduces each of several
    microbatches, or sums whole gradients. It does not span `context` if that axis shards the training state. In a
    pipeline, the all-reduce over data comes once a step, after fsdp's; that over context in each tick, unsharded.
    """
    eager = _eager(candidate, software)
    sums_whole = (eager | software.reduce_whole) & np.equal(candidate.zero, 1)
    sharers = software.sharers(candidate)
    shard = np.where(np.greater(candidate.zero, 0) & ~sums_whole, sharers, 1)
    table = software.spmd & np.greater(candidate.pipe, 1)
    # an exchange with independent replicas is priced in `data.py`
    data = 1 if software.exchange.per_replica else candidate.data
    size, context = software.wire[1] * parameters, candidate.context * candidate.fsdp // sharers
    context_members, data_members = (
        hardware.members(size, candidate.stride(axis)) for axis, size in (("context", context), ("data", data))
    )
    count = bucket_count(parameters, collective_count(layers, candidate, software), software)
    shards = np.where(sums_whole, sharers, 1)
    members = context_members * data_members * np.where(sums_whole, hardware.members(*_over(candidate, software)), 1)
    all_reduce = 2 * hardware.gather(
        size / shard, data * context * shards, candidate.tensor, members=members, pieces=count
    )
    data_reduce = 2 * hardware.gather(SUM_BYTES * parameters / shard, data, candidate.stride("data"), pieces=count)
    context_reduce = 2 * hardware.gather(size, context, candidate.tensor, pieces=count)
    return np.where(table, context_reduce, eager * all_reduce), np.where(table, data_reduce, ~eager * all_reduce)


def _over(candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the number of devices that share the training state, and the stride between them."""
    sharers = software.sharers(candidate)
    return sharers, np.where(np.greater(sharers, candidate.fsdp), candidate.stride("context"), candidate.stride("fsdp"))


def _eager(candidate: Candidate, software: SoftwareModel) -> Any:
    """Whether gradients are reduced for each of several microbatches."""
    return software.reduce_every_microbatch & np.equal(candidate.pipe, 1) & np.greater(candidate.microbatches, 1)


def exposed_seconds(traffic: np.ndarray | float, compute: np.ndarray | float, overlap: float) -> Any:
    """Returns the exposed seconds of traffic: computation hides the share `overlap`, up to its own length."""
    return traffic - np.minimum(overlap * traffic, compute)


def overlapped_seconds(
    work: Work, candidate: Candidate, hardware: Hardware, software: SoftwareModel
) -> Mapping[str, Any]:
    """Returns the exposed seconds of fsdp's and data's collectives.

    Collectives that run once a step overlap with the last microbatch's backward pass, which is two thirds of its time;
    collectives that run per microbatch overlap with all other computation. Both kinds also overlap with a stage's waits
    for other stages and messages. Gathers at the ends of a pass are exposed, and hidden traffic may slow the concurrent
    computation.
    """
    layout = work.parameters, candidate
    shards, sums = (price(*layout, hardware, software, layers=work.layers) for price in (fsdp_seconds, data_seconds))
    tail = work.compute / candidate.microbatches * 2 / 3
    body, share = work.compute - tail, software.overlap
    if software.bucket:  # the last bucket is exposed
        share = share * (1 - 1 / bucket_count(work.parameters, 1, software))
    if software.hidden_all_reduce is None:
        batch, step = (sharded + replicated for sharded, replicated in zip(shards, sums, strict=True))
        waits = exposed_seconds(batch * candidate.microbatches, body, share) + exposed_seconds(step, tail, share)
    else:
        waits = sum(
            exposed_seconds(batch * candidate.microbatches, body, hidden) + exposed_seconds(step, tail, hidden)
            for (batch, step), hidden in ((shards, share), (sums, software.hidden_all_reduce))
        )
    if software.interference:
        inside_node = replace(hardware, between=replace(hardware.inside, latency=0.0), launch=0.0)
        inside_node = replace(inside_node, inside=replace(inside_node.inside, latency=0.0), per_node=1)
        prices = (price(*layout, inside_node, software, layers=work.layers) for price in (fsdp_seconds, data_seconds))
        waits = waits + software.interference * sum(batch * candidate.microbatches + step for batch, step in prices)
    if software.exposed_edge_gathers and software.layerwise:
        layer = software.wire[0] * work.parameters / (work.layers + 1)
        end_gathers = ENDS * hardware.gather(layer, *_over(candidate, software)) * candidate.microbatches
        waits = waits + np.where(np.equal(candidate.zero, 3), end_gathers, 0.0)
    if software.exposed_update:
        waits = waits + update_seconds(*layout, hardware, software, layers=work.layers)
    return {"sharding": waits}


def zero_stages(size: int) -> Sequence[Mapping[str, int]]:
    """Returns the ZeRO stages for a size of fsdp: 1 to 3, or 0 for a single device."""
    return [{"zero": zero} for zero in ((1, 2, 3) if size > 1 else (0,))]


def working_bytes(model: NamedDims, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Mapping[str, Any]:
    """Returns the bytes of a decoder's gathered parameters; for jaxpar's own program see `model/peak_moments.py`."""
    if not isinstance(model, Shape) or software.spmd:
        return {}
    return {"working": gathered_bytes(model, candidate, software, recipe)}


SHARDING = PlanTechnique(
    axis="fsdp",
    variants=zero_stages,
    bytes=working_bytes,
    overlapped_seconds=overlapped_seconds,
    styles={"sharding": Style(letter="S", shade=220, light="#e3a712", dark="#f2cb52")},
    complexity=1.0,
)
