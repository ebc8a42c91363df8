"""Pipelines: legal schedules, activations in flight, and messages between stages.

    pipe     [tokens, dim] to the next part and its gradient back; five all-reduces of it if embedding and head are
             spread over the stages

`span.py` computes the longest path through the schedule's table, with the seconds of all other causes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate, Choices, schedule_traits
from jaxpar.plan.causes import PALE, Style
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import head_shards
from jaxpar.plan.model.layer_time import tokens
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.techniques.base import BYTES, PlanTechnique, SentCollective, Settings, up_to
from jaxpar.plan.techniques.span import auto_head


class StagedModel(NamedDims, Protocol):
    """A model whose layers a pipeline can cut: a decoder, or a traced model with equal layers."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def pipe_sizes(self) -> Sequence[int]:
        """Numbers of stages that a traced model supports."""
        ...

    @property
    def no_pipeline(self) -> str:
        """The reason why a traced model has no stages; "" if it has."""
        ...

    def message_bytes(self, candidate: Candidate) -> Any:
        """Returns the bytes that pass from a stage of a traced model to the next one for a microbatch."""
        ...


def why_not(model: NamedDims) -> str:
    """Returns the reason why a pipeline does not cut a model; "" if it does."""
    return "" if isinstance(model, Shape) else getattr(model, "no_pipeline", "it has no traced layers")


def sizes(model: Shape | StagedModel, rows: int, choices: Choices) -> Sequence[int]:
    """Returns the numbers of stages: of a traced model those that divide its layers.

    Of a decoder, those up to the number of layers; some stages may have one layer more than others.
    """
    if not isinstance(model, Shape):
        return up_to(model.pipe_sizes, choices.pipe)
    return range(1, min(model.layers, choices.pipe or model.layers) + 1)


def tables(model: Shape | StagedModel, choices: Choices, pipe: int, microbatches: int) -> Sequence[Mapping[str, Any]]:
    """Returns the schedules that support these stages and microbatches, with their chunks.

    All chunks have equally many layers, unless `choices.uneven`: then some have one less, and no stage has more slots
    for layers than it needs.
    """
    if pipe == 1:
        return [{"schedule": "1f1b", "chunks": 1}]
    pairs, layers = [], model.layers
    for name in choices.schedules:
        kind = LIBRARY[name]
        if not isinstance(model, Shape) and schedule_traits(name).split:
            continue  # the backward of a traced model cannot be split into B and W
        if microbatches < kind.fewest_microbatches(pipe) or (kind.multiple_of_stages and microbatches % pipe):
            continue
        chunk_counts = kind.chunks if len(kind.chunks) == 1 else choices.chunks
        for chunks in chunk_counts:
            stage_layers = -(-layers // pipe)
            equal = layers % (pipe * chunks) == 0 or chunks == 1
            if chunks in kind.chunks and (equal or (choices.uneven and stage_layers % chunks == 0)):
                pairs.append((name, chunks))
    return [{"schedule": name, "chunks": chunks} for name, chunks in pairs]


def place_head(model: Shape | StagedModel, candidate: Candidate) -> Candidate:
    """Sets the candidate's `head` to that of a run with `head="auto"`; of a traced model the last stage has it."""
    return replace(candidate, head=auto_head(model, candidate)) if isinstance(model, Shape) else candidate


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
    """Returns the seconds of a tick's messages between stages of a decoder."""
    return send_seconds(BYTES * tokens(shape, candidate) * shape.dim, candidate, hardware, software)


def send_seconds(size: np.ndarray | float, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> Any:
    """Returns the seconds of a tick's messages of this many bytes between stages, over the slowest link among them.

    With `software.scatter`, each tensor rank sends its share through its NIC and the node gathers them, unless the
    activations are sharded by sequence anyway. Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1.
    """
    stride = candidate.stride("pipe")
    if not software.scatter:
        return hardware.send(size / np.where(candidate.sequence, candidate.tensor, 1), stride, candidate.pipe)
    gathered = np.where(candidate.sequence, 0.0, hardware.gather(size, candidate.tensor, 1))
    return hardware.send(size / candidate.tensor, stride, candidate.pipe) + gathered


def messages(model: Any, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the messages of a step of a traced model, for the ledger alone: `span.py` prices them.

    In every tick all stages send: activations forward or gradients back, or both if the ticks of a table mix ops.
    """
    if isinstance(model, Shape) or int(candidate.pipe) == 1:
        return
    ticks = LIBRARY[candidate.schedule].ticks(candidate.pipe, candidate.microbatches, candidate.chunks)
    sent = Collective(
        kind="collective-permute", axes=("pipe",), dtype="bf16" if software.wire[0] == 2 else "f32",
        group=candidate.pipe, times=ticks if candidate.schedule_traits.phased else 2 * ticks,
        payload=model.message_bytes(candidate),
    )  # fmt: skip
    yield SentCollective(collective=sent)


def spread_head_seconds(shape: Shape, candidate: Candidate, hardware: Hardware) -> tuple[Any, Any]:
    """Returns the seconds of a microbatch's messages if stages share embedding and head, forward and backward.

    Each is an all-reduce over `pipe`: forward of the inputs and the outputs of the layers, backward of the gradients of
    both and again of the inputs. With sequence parallelism they have a shard of the activations.
    """
    stride = candidate.stride("pipe")
    size = BYTES * tokens(shape, candidate) * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    all_reduce = 2 * hardware.gather(size, head_shards(candidate), stride)
    return 2 * all_reduce, 3 * all_reduce


PIPE = PlanTechnique(
    axis="pipe",
    in_schedule=True,
    excludes=why_not,
    sizes=sizes,
    settings=Settings(needs=("pipe", "microbatches"), options=tables),
    derived_settings=place_head,
    step=messages,
    styles={
        "bubble": Style(letter=".", shade=250, light="#ccd2da", dark="#4b535f", text="var(--ink)"),
        "send": Style(letter="s", shade=205, light="#b0396b", dark="#e5739f", text=f"light-dark({PALE}, #10151b)"),
    },
    complexity=3.0,
)
