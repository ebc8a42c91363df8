"""Communication of a step besides what its blocks do (`techniques/`), and how much of it computation does not hide.

    fsdp     zero 0: all-reduce of gradients; 1: scatter once a step, or an all-reduce with data for every one of
             several microbatches; 2: scatter for every microbatch; 1 and 2: parameters gathered once a step;
             3: parameters gathered going forward and backward, for every microbatch, and scatter
    data     all-reduce of gradients, and so over context, of fsdp's share where it shards them; once a step, or as the
             practice has it
    pipe     [tokens, dim] to the next part and its gradient back; where both ends are spread, five all-reduces of it

Activations travel in bfloat16, parameters and gradients as the software has them; gradients that a table has summed, in
float32. Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 7.
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_time import tokens
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES

SUMMED = 4  # of a gradient that one program on all stages has summed over its table: reduced as it is, in float32


def send(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> Any:
    """Returns the seconds of a tick's messages between stages: those of the slowest link that any of them crosses.

    Scattered, each tensor rank sends its share through its own NIC and a gather inside the node puts them together,
    except where the stream is sharded by sequence anyway. Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1.
    """
    size = BYTES * tokens(shape, candidate) * shape.dim
    stride = candidate.tensor * candidate.context * candidate.fsdp * candidate.data
    if not software.scatter:
        return hardware.send(size / np.where(candidate.sequence, candidate.tensor, 1), stride, candidate.pipe)
    gathered = np.where(candidate.sequence, 0.0, hardware.gather(size, candidate.tensor, 1))
    return hardware.send(size / candidate.tensor, stride, candidate.pipe) + gathered


def spread(shape: Shape, candidate: Candidate, hardware: Hardware) -> tuple[Any, Any]:
    """Returns the seconds of a microbatch's messages where stages share both ends, forward and backward.

    XLA makes an all-reduce over `pipe` of each: forward of what flows into the layers and what comes out of them,
    backward of the gradients of both, and again of what flows into them. Of shares where the stream is sharded by
    sequence.
    """
    stride = candidate.tensor * candidate.context * candidate.fsdp * candidate.data
    size = BYTES * tokens(shape, candidate) * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    once = 2 * hardware.gather(size, candidate.sharing, stride)
    return 2 * once, 3 * once


def pieces(layers: Any, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns in how many collectives a device's parameters are gathered, or its gradients reduced.

    A scan over `layers` has one for each, all weights of a layer together; embedding and head make one more. Around
    the table of a pipeline, and where the software keeps gradients in one buffer, all travel at once.
    """
    together = software.everywhere & np.greater(candidate.pipe, 1)
    return np.where(together | (not software.layerwise), 1, layers + 1)


def gradients(
    parameters: Any, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, layers: Any
) -> tuple[Any, Any]:
    """Returns the seconds of fsdp's collectives for so many parameters of a device: per microbatch, and per step.

    The parameters are those of `layers`, and of embedding and head. One program on all stages gathers and reduces once,
    around its table; but stage 2 scatters in every tick that makes gradients, of those that are idle too. What stages 1
    and 2 gather once for all of a step comes at once.
    """
    over, count = (candidate.fsdp, candidate.tensor * candidate.context), pieces(layers, candidate, software)
    around = software.everywhere & np.greater(candidate.pipe, 1)
    sizes = software.wire[0], np.where(around, SUMMED, software.wire[1])
    gather, scatter = (hardware.gather(size * parameters, *over, pieces=count) for size in sizes)
    whole = hardware.gather(software.wire[0] * parameters, *over)
    ticks = np.where(around, 1 + (candidate.pipe - 1) / (candidate.microbatches * candidate.chunks), 1.0)
    eager = _eager(candidate, software)
    stages = [np.equal(candidate.zero, stage) for stage in (0, 1, 2, 3)]
    nothing = 0.0 * gather
    each = np.select(stages, [nothing, nothing, ticks * scatter, ~around * (2 * gather + scatter)])
    once = [2 * scatter, ~eager * scatter + whole, whole, around * (gather + scatter)]
    return each, np.select(stages, once)


def replicas(
    parameters: Any, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, layers: Any
) -> tuple[Any, Any]:
    """Returns the seconds of all-reduces of so many gradients over data and context: per microbatch, and per step.

    One for both axes, in as many pieces as fsdp's; and for fsdp too where stage 1 reduces every one of several
    microbatches. Around a table data comes once a step, after fsdp; context inside of it, where fsdp has not sharded
    anything yet.
    """
    eager = _eager(candidate, software)
    whole, beside = eager & np.equal(candidate.zero, 1), candidate.tensor * candidate.context
    shard = np.where(np.greater(candidate.zero, 0) & ~whole, candidate.fsdp, 1)
    table = software.everywhere & np.greater(candidate.pipe, 1)
    size, data, context = software.wire[1] * parameters, candidate.data, candidate.context
    near, far = hardware.members(context, candidate.tensor), hardware.members(data, beside * candidate.fsdp)
    count = pieces(layers, candidate, software)
    ways = np.where(whole, candidate.fsdp, 1)
    members = near * far * np.where(whole, hardware.members(candidate.fsdp, beside), 1)
    both = 2 * hardware.gather(size / shard, data * context * ways, candidate.tensor, members=members, pieces=count)
    around = 2 * hardware.gather(SUMMED * parameters / shard, data, beside * candidate.fsdp, pieces=count)
    inside = 2 * hardware.gather(size, context, candidate.tensor, pieces=count)
    return np.where(table, inside, eager * both), np.where(table, around, ~eager * both)


def _eager(candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns whether gradients are reduced for every one of several microbatches."""
    return software.eager & np.equal(candidate.pipe, 1) & np.greater(candidate.microbatches, 1)


def exposed(traffic: Any, compute: Any, overlap: float) -> Any:
    """Returns the seconds of traffic that computation does not hide: `overlap` of it can be, as far as there is any."""
    return traffic - np.minimum(overlap * traffic, compute)
