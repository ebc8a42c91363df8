"""Collectives over `context` and `tensor` of a model whose dims were found from its trace, for either technique."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.splits import split_sizes, traffic
from jaxpar.plan.techniques.base import SentCollective


def split_traffic(
    model: Any, candidate: Candidate, software: SoftwareModel, axis: str, overlap: float
) -> Iterator[SentCollective]:
    """Yields the collectives over an axis of a model that is no decoder.

    Collectives of the forward pass, half of all, are exposed; of the backward pass's the share `overlap` is hidden. If
    the model names the dims that the axis splits, its all-gathers are of keys and values: no remat policy saves them.
    """
    if isinstance(model, Shape):
        return
    for kind, payload, times in traffic(model, candidate, axis):
        gathers_keys = kind == "all-gather" and axis in model.named_axes
        runs = 1 + gathers_keys * np.not_equal(candidate.remat, "none")
        yield SentCollective(
            collective=Collective(
                kind=kind, axes=(axis,), dtype="bf16" if software.wire[0] == 2 else "f32", group=candidate.size(axis),
                times=runs * times * candidate.microbatches, payload=payload,
            ),
            exposed=1 - overlap / 2,
        )  # fmt: skip


def why_no_split(model: Any, axis: str) -> str:
    """Returns why a model is not planned over an axis, "context" or "tensor"; "" if it is, or lists reasons itself."""
    if isinstance(model, Shape) or len(split_sizes(getattr(model, "splits", ()), axis)) > 1:
        return ""
    listed = any(reason.startswith((f"{axis}:", f"{axis} ")) for reason in getattr(model, "no_splits", ()))
    return "" if listed else "no dims that it could split were found"
