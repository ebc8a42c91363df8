"""The techniques of a plan by their axis, in the order in which a search assigns devices, and sums over all of them.

The last axis takes all remaining devices. The order decides ties, and the layouts of a random draw. Summed are bytes,
seconds and collectives.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import AXES
from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques.base import PlanTechnique, SentCollective, Work, exposed_seconds
from jaxpar.plan.techniques.context import CONTEXT
from jaxpar.plan.techniques.data import DATA
from jaxpar.plan.techniques.expert import EXPERT
from jaxpar.plan.techniques.pipe import PIPE
from jaxpar.plan.techniques.sharding import SHARDING
from jaxpar.plan.techniques.tensor import TENSOR
from jaxpar.tables import insert_row, replace_rows

TECHNIQUES: dict[str, PlanTechnique] = {
    technique.axis: technique for technique in (PIPE, TENSOR, CONTEXT, EXPERT, SHARDING, DATA)
}


@contextmanager
def added(technique: PlanTechnique, *, before: str = "fsdp") -> Iterator[None]:
    """Context manager that adds a technique, in the order before the axis `before`.

    Raises:
      JaxparError: If its axis already has a technique, or `before` has none.
    """
    if technique.axis in TECHNIQUES or before not in TECHNIQUES:
        raise refuse(
            f"a technique of the axis {technique.axis!r} before {before!r}",
            rule=f"a plan has one technique for an axis, and has them for {', '.join(TECHNIQUES)}",
            fix="another axis, or before='fsdp'",
        )
    with replace_rows(TECHNIQUES, insert_row(TECHNIQUES, technique.axis, technique, at=[*TECHNIQUES].index(before))):
        yield


def unused_axes(model: NamedDims) -> list[str]:
    """Returns the axes that no layout of a model uses, as text, grouped by reason."""
    axes_by_reason: dict[str, list[str]] = {}
    for axis in AXES:
        reason = TECHNIQUES[axis].why_not(model) if axis in TECHNIQUES else "no technique of a plan prices it"
        axes_by_reason.setdefault(reason, []).append(axis)
    return [f"{_words(axes)}: {reason}" for reason, axes in axes_by_reason.items() if reason]


def _words(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def added_bytes(model: NamedDims, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Mapping[str, Any]:
    """Returns the bytes that techniques add to the model's, by cause."""
    total: dict[str, Any] = {}
    for technique in TECHNIQUES.values():
        for cause, size in technique.bytes(model, candidate, software, recipe).items():
            total[cause] = total.get(cause, 0.0) + size
    return total


def block_seconds(
    shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel
) -> dict[str, tuple[Any, Any]]:
    """Returns the exposed seconds (forward, backward) of a block's collectives for one microbatch, by cause."""
    priced = [entry for entry in TECHNIQUES.values() if entry.cause]
    return {
        entry.cause: exposed_seconds(entry.block(shape, candidate, software), candidate, hardware) for entry in priced
    }


def step_seconds(model: NamedDims, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> dict[str, Any]:
    """Returns the exposed seconds of a step's collectives outside of its blocks, by cause."""
    priced = [entry for entry in TECHNIQUES.values() if entry.cause]
    return {
        entry.cause: sum(exposed_seconds(entry.step(model, candidate, software), candidate, hardware))
        for entry in priced
    }


def overlapped_seconds(work: Work, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> dict[str, Any]:
    """Returns the exposed seconds of traffic that overlaps with computation, by cause."""
    exposed: dict[str, Any] = {}
    for technique in TECHNIQUES.values():
        exposed |= technique.overlapped_seconds(work, candidate, hardware, software)
    return exposed


def collectives(model: NamedDims, candidate: Candidate, software: SoftwareModel) -> list[Collective]:
    """Returns the collectives that techniques add to a step, in the form of the ledger of its compiled program.

    Collectives of a block run for every layer and microbatch. Collectives of the sharded training state are priced as a
    whole, and are not listed.

    Args:
      model: The shape of a decoder or of a traced model.
      candidate: One layout.
      software: Software model of the program.
    """
    return [entry for entry in _collectives(model, candidate, software) if entry.times and entry.group > 1]


def _collectives(model: NamedDims, candidate: Candidate, software: SoftwareModel) -> Iterator[Collective]:
    for technique in TECHNIQUES.values():
        if isinstance(model, Shape):
            repeats = candidate.microbatches * candidate.chunks * candidate.layers(model.layers)
            yield from (_plain(send, repeats) for send in technique.block(model, candidate, software))
        yield from (_plain(send, 1) for send in technique.step(model, candidate, software))


def _plain(send: SentCollective, turns: int) -> Collective:
    """Converts a collective to Python numbers, with its count multiplied by `turns`."""
    source, times = send.collective, cast(Any, send.collective.times)
    number = lambda value: int(np.asarray(value))  # noqa: E731
    return replace(source, group=number(source.group), payload=number(source.payload), times=number(times * turns))
