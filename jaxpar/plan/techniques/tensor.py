"""Tensor parallelism: two all-reduces of [tokens, dim] each way in a block, or as many gathers and scatters.

Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Look
from jaxpar.plan.choices import Choices
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.dims import Named
from jaxpar.plan.model.layer_time import tokens
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES, Sent, Settings, Technique, divisors, within


def sizes(shape: Shape, rows: int, choices: Choices) -> list[int]:
    """Returns what divides heads, heads of keys and values, and the feed-forward; XLA pads a vocabulary."""
    every = gcd(*(shape.dims[name] for name in ("heads", "kv_heads", "mlp")))
    return within(divisors(every), choices.tensor)


def sequences(model: Named, choices: Choices, tensor: int, context: int) -> Sequence[Mapping[str, Any]]:
    """Returns whether the stream between blocks may be sharded too: where both axes together divide a sequence."""
    divides = tensor > 1 and model.dims["seq"] % (tensor * context) == 0
    return [{"sequence": False}, {"sequence": True}][: 1 + divides]


def block(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[Sent]:
    """Yields the collectives of a block over the tensor axis.

    Forward nothing hides its two all-reduces, each a scatter and a gather. Backward an all-reduce runs beside the
    matmul that makes a weight's gradient. Sharded by sequence, two gathers have to come first; two scatters, and the
    two gathers that may be needed once more, run beside matmuls (Korthikanti et al., section 4.2.2). Full remat makes
    the forward's again.
    """
    size, cut = BYTES * tokens(shape, candidate) * shape.dim, np.asarray(candidate.sequence)
    beside = 1 - software.tensor_overlap

    def sent(kind: str, times: Any, *, exposed: float = 1.0, backward: bool = True, again: bool = False) -> Sent:
        return Sent(
            collective=Collective(
                kind=kind, axes=("tensor",), dtype="bf16", group=candidate.tensor, times=times, payload=size,
                backward=backward,
            ),
            exposed=exposed,
            again=again,
        )  # fmt: skip

    halves = "all-gather", "reduce-scatter"
    yield sent("all-reduce", 2 * ~cut, backward=False)
    yield from (sent(kind, 2 * cut, backward=False) for kind in halves)
    yield sent("all-reduce", 2 * ~cut, exposed=beside)
    yield sent("all-gather", 2 * cut)
    yield sent("reduce-scatter", 2 * cut, exposed=beside)
    yield sent("all-gather", 2 * software.regather * cut, exposed=beside)
    # jaxpar's own makes the last matmul of a layer only once, and so its sum
    times, sums = 2 * candidate.recomputed[4], (2 - software.everywhere) * candidate.recomputed[4]
    yield sent("all-reduce", sums * ~cut, again=True)
    yield sent("all-gather", times * cut, again=True)
    yield sent("reduce-scatter", sums * cut, again=True)


TENSOR = Technique(
    axis="tensor",
    priced=Shape,
    sizes=sizes,
    rule=" and divides the heads",
    settings=Settings(needs=("tensor", "context"), ways=sequences),
    block=block,
    cause="tensor",
    looks={"tensor": Look(letter="T", shade=208, light="#d55e00", dark="#f08a3c")},
    near=True,
)
