"""Sums over all techniques: their bytes, seconds and collectives, and the axes that a model leaves out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from jaxpar.mesh.axes import AXES
from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.dims import Named
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.techniques.base import Sent, Work, seconds
from jaxpar.plan.techniques.table import TECHNIQUES


def without(model: Named) -> list[str]:
    """Returns the axes that no layout of a model has, in words, those of one reason together."""
    why: dict[str, list[str]] = {}
    for axis in AXES:
        reason = TECHNIQUES[axis].lacks(model) if axis in TECHNIQUES else "no technique of a plan prices it"
        why.setdefault(reason, []).append(axis)
    return [f"{_words(axes)}: {reason}" for reason, axes in why.items() if reason]


def _words(names: list[str]) -> str:
    """Returns names as a sentence has them: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def added_bytes(model: Named, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Mapping[str, Any]:
    """Returns cause to the bytes that techniques add to those of the model."""
    found: dict[str, Any] = {}
    for each in TECHNIQUES.values():
        for cause, size in each.bytes(model, candidate, software, recipe).items():
            found[cause] = found.get(cause, 0.0) + size
    return found


def of_blocks(
    shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel
) -> dict[str, tuple[Any, Any]]:
    """Returns cause to the exposed seconds of a block's collectives for one microbatch, forward and backward."""
    named = [each for each in TECHNIQUES.values() if each.cause]
    return {each.cause: seconds(each.block(shape, candidate, software), candidate, hardware) for each in named}


def of_step(model: Named, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> dict[str, Any]:
    """Returns cause to the exposed seconds of the collectives of a step besides those of its blocks."""
    named = [each for each in TECHNIQUES.values() if each.cause]
    return {each.cause: sum(seconds(each.step(model, candidate, software), candidate, hardware)) for each in named}


def around(work: Work, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> dict[str, Any]:
    """Returns cause to the exposed seconds of what travels beside computation."""
    found: dict[str, Any] = {}
    for each in TECHNIQUES.values():
        found |= each.around(work, candidate, hardware, software)
    return found


def collectives(model: Named, candidate: Candidate, software: SoftwareModel) -> list[Collective]:
    """Returns the collectives of a step that techniques name, as the ledger of its compiled program would have them.

    Those of a block run for every layer and microbatch. What shards the training state is priced as a whole, and is not
    among them.

    Args:
      model: A shape, or a traced model.
      candidate: One layout.
      software: How it is run.
    """
    return [each for each in _collectives(model, candidate, software) if each.times and each.group > 1]


def _collectives(model: Named, candidate: Candidate, software: SoftwareModel) -> Iterator[Collective]:
    for each in TECHNIQUES.values():
        if isinstance(model, Shape):
            turns = candidate.microbatches * candidate.chunks * candidate.layers(model.layers)
            yield from (_plain(sent, turns) for sent in each.block(model, candidate, software))
        yield from (_plain(sent, 1) for sent in each.step(model, candidate, software))


def _plain(sent: Sent, turns: int) -> Collective:
    """Returns a collective with plain numbers, as often as so many turns make of it."""
    found, times = sent.collective, cast(Any, sent.collective.times)
    number = lambda value: int(np.asarray(value))  # noqa: E731
    return replace(found, group=number(found.group), payload=number(found.payload), times=number(times * turns))
