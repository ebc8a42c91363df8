"""Context parallelism: keys and values gathered forward, and their gradients scattered back.

Source: Llama Team 2024, arXiv:2407.21783, section 3.3.2.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Look
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES, Sent, Technique


def block(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[Sent]:
    """Yields the collectives of a block over the context axis.

    Every device has queries of its own tokens and keys and values of all, whose gradients are sums over the devices.
    They are gathered once more where attention is computed again, or where none of them is kept.
    """
    size = 2 * BYTES * candidate.microbatch * shape.seq * shape.kv_dim / candidate.tensor

    def sent(kind: str, times: Any, *, backward: bool, again: bool = False) -> Sent:
        return Sent(
            collective=Collective(
                kind=kind, axes=("context",), dtype="bf16", group=candidate.context, times=times, payload=size,
                backward=backward,
            ),
            exposed=1 - software.context_overlap,
            again=again,
        )  # fmt: skip

    yield sent("all-gather", 1, backward=False)
    yield sent("reduce-scatter", 1, backward=True)
    again = np.maximum(candidate.recomputed[1], software.context_again)
    yield sent("all-gather", again, backward=True, again=True)


CONTEXT = Technique(
    axis="context",
    priced=Shape,
    rule=" and divides the tokens of a row",
    block=block,
    cause="context",
    looks={"context": Look(letter="C", shade=173, light="#f0b27a", dark="#c97f45")},
)
