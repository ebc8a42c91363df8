"""Pipelines: stages take turns as a schedule says, wait for each other, and send [tokens, dim] on.

    pipe     [tokens, dim] to the next part and its gradient back; where both ends are spread, five all-reduces of it

The schedule's table is what all other causes are laid into: `span.py` has its longest path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import PALE, Look
from jaxpar.plan.choices import Choices
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.dims import Named
from jaxpar.plan.model.layer_time import tokens
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES, Settings, Technique
from jaxpar.plan.techniques.heads import by_default


def sizes(shape: Shape, rows: int, choices: Choices) -> range:
    """Returns all numbers of stages that have a layer each: some may have one more than others."""
    return range(1, min(shape.layers, choices.pipe or shape.layers) + 1)


def tables(model: Named, choices: Choices, pipe: int, microbatches: int) -> Sequence[Mapping[str, Any]]:
    """Returns the schedules that take so many stages and microbatches, with their chunks.

    Chunks have as many layers each, but where the choices let them differ: then some have one less, and no stage has
    more places for layers than it needs.
    """
    if pipe == 1:
        return [{"schedule": "1f1b", "chunks": 1}]
    found, layers = [], model.dims["layers"]
    for name in choices.schedules:
        kind = LIBRARY[name]
        if microbatches < kind.least(pipe) or (kind.whole and microbatches % pipe):
            continue
        each = kind.chunks if len(kind.chunks) == 1 else choices.chunks
        for chunks in each:
            most = -(-layers // pipe)
            equal = layers % (pipe * chunks) == 0 or chunks == 1
            if chunks in kind.chunks and (equal or (choices.uneven and most % chunks == 0)):
                found.append((name, chunks))
    return [{"schedule": name, "chunks": chunks} for name, chunks in found]


def placed_head(shape: Shape, candidate: Candidate) -> Candidate:
    """Returns the candidate with embedding and head where a run would have them."""
    return replace(candidate, head=by_default(shape, candidate))


def in_flight(candidate: Candidate) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the most (microbatch, chunk) pairs that the first stage keeps at once, and that the last one keeps.

    Of each stage two numbers: activations, and what a B leaves for its W.
    Source: `ScheduleFamily.peak` and `.stash`, which tests hold to the replay of the table, `Schedule.peak`.
    """
    keys = np.broadcast_arrays(candidate.schedule, candidate.pipe, candidate.microbatches, candidate.chunks)
    found = {}
    for key in zip(*(array.ravel().tolist() for array in keys), strict=True):
        if key not in found:
            name, stages, count, chunks = key
            family, of = LIBRARY[name], (stages, count, chunks)
            found[key] = [most(*of, stage) for stage in (0, stages - 1) for most in (family.peak, family.stash)]
    pairs = np.array([found[key] for key in zip(*(array.ravel().tolist() for array in keys), strict=True)])
    first, first_stash, last, last_stash = (column.reshape(keys[0].shape) for column in pairs.T)
    return (first, first_stash), (last, last_stash)


def send(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> Any:
    """Returns the seconds of a tick's messages between stages: those of the slowest link that any of them crosses.

    Scattered, each tensor rank sends its share through its own NIC and a gather inside the node puts them together,
    except where the stream is sharded by sequence anyway. Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1.
    """
    size = BYTES * tokens(shape, candidate) * shape.dim
    stride = candidate.stride("pipe")
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
    stride = candidate.stride("pipe")
    size = BYTES * tokens(shape, candidate) * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    once = 2 * hardware.gather(size, candidate.sharing, stride)
    return 2 * once, 3 * once


PIPE = Technique(
    axis="pipe",
    priced=Shape,
    sizes=sizes,
    settings=Settings(needs=("pipe", "microbatches"), ways=tables),
    follows=placed_head,
    looks={
        "bubble": Look(letter=".", shade=250, light="#ccd2da", dark="#4b535f", on="var(--ink)"),
        "send": Look(letter="s", shade=205, light="#b0396b", dark="#e5739f", on=f"light-dark({PALE}, #10151b)"),
    },
    complexity=3.0,
)
