"""Pipelines: legal schedules, activations in flight, and messages between stages.

    pipe     [tokens, dim] to the next part and its gradient back; five all-reduces of it if embedding and head are
             spread over the stages

`span.py` computes the longest path through the schedule's table, with the seconds of all other causes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.causes import PALE, Style
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_time import tokens
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.techniques.base import BYTES, PlanTechnique, Settings
from jaxpar.plan.techniques.span import auto_head


def sizes(shape: Shape, rows: int, choices: Choices) -> range:
    """Returns the numbers of stages up to the number of layers; some stages may have one layer more than others."""
    return range(1, min(shape.layers, choices.pipe or shape.layers) + 1)


def tables(model: NamedDims, choices: Choices, pipe: int, microbatches: int) -> Sequence[Mapping[str, Any]]:
    """Returns the schedules that support these stages and microbatches, with their chunks.

    All chunks have equally many layers, unless `choices.uneven`: then some have one less, and no stage has more slots
    for layers than it needs.
    """
    if pipe == 1:
        return [{"schedule": "1f1b", "chunks": 1}]
    pairs, layers = [], model.dims["layers"]
    for name in choices.schedules:
        kind = LIBRARY[name]
        if microbatches < kind.fewest_microbatches(pipe) or (kind.multiple_of_stages and microbatches % pipe):
            continue
        chunk_counts = kind.chunks if len(kind.chunks) == 1 else choices.chunks
        for chunks in chunk_counts:
            stage_layers = -(-layers // pipe)
            equal = layers % (pipe * chunks) == 0 or chunks == 1
            if chunks in kind.chunks and (equal or (choices.uneven and stage_layers % chunks == 0)):
                pairs.append((name, chunks))
    return [{"schedule": name, "chunks": chunks} for name, chunks in pairs]


def place_head(shape: Shape, candidate: Candidate) -> Candidate:
    """Sets the candidate's `head` to that of a run with `head="auto"`."""
    return replace(candidate, head=auto_head(shape, candidate))


def in_flight(candidate: Candidate) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the most (microbatch, chunk) pairs that the first and the last stage store at once.

    For each stage: pairs with saved activations, and pairs with a stash from B to W.
    Source: `ScheduleFamily.peak` and `.stash`, which tests compare with a replay of the table, `Schedule.peak`.
    """
    keys = np.broadcast_arrays(candidate.schedule, candidate.pipe, candidate.microbatches, candidate.chunks)
    peaks = {}
    for key in zip(*(array.ravel().tolist() for array in keys), strict=True):
        if key not in peaks:
            name, stages, count, chunks = key
            family, numbers = LIBRARY[name], (stages, count, chunks)
            peaks[key] = [peak(*numbers, stage) for stage in (0, stages - 1) for peak in (family.peak, family.stash)]
    pairs = np.array([peaks[key] for key in zip(*(array.ravel().tolist() for array in keys), strict=True)])
    first, first_stash, last, last_stash = (column.reshape(keys[0].shape) for column in pairs.T)
    return (first, first_stash), (last, last_stash)


def send(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> Any:
    """Returns the seconds of a tick's messages between stages, over the slowest link among them.

    With `software.scatter`, each tensor rank sends its share through its NIC and the node gathers them, unless the
    activations are sharded by sequence anyway. Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1.
    """
    size = BYTES * tokens(shape, candidate) * shape.dim
    stride = candidate.stride("pipe")
    if not software.scatter:
        return hardware.send(size / np.where(candidate.sequence, candidate.tensor, 1), stride, candidate.pipe)
    gathered = np.where(candidate.sequence, 0.0, hardware.gather(size, candidate.tensor, 1))
    return hardware.send(size / candidate.tensor, stride, candidate.pipe) + gathered


def spread_head_seconds(shape: Shape, candidate: Candidate, hardware: Hardware) -> tuple[Any, Any]:
    """Returns the seconds of a microbatch's messages if stages share embedding and head, forward and backward.

    Each is an all-reduce over `pipe`: forward of the inputs and the outputs of the layers, backward of the gradients of
    both and again of the inputs. With sequence parallelism they have a shard of the activations.
    """
    stride = candidate.stride("pipe")
    size = BYTES * tokens(shape, candidate) * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    all_reduce = 2 * hardware.gather(size, candidate.head_shards, stride)
    return 2 * all_reduce, 3 * all_reduce


PIPE = PlanTechnique(
    axis="pipe",
    in_schedule=True,
    model_type=Shape,
    sizes=sizes,
    settings=Settings(needs=("pipe", "microbatches"), options=tables),
    derived_settings=place_head,
    styles={
        "bubble": Style(letter=".", shade=250, light="#ccd2da", dark="#4b535f", text="var(--ink)"),
        "send": Style(letter="s", shade=205, light="#b0396b", dark="#e5739f", text=f"light-dark({PALE}, #10151b)"),
    },
    complexity=3.0,
)
