"""Tensor parallelism: two all-reduces of [tokens, dim] per pass of a block, or two gathers and two scatters.

Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate, Choices, recompute_shares
from jaxpar.plan.causes import Style
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_time import tokens
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.model.splits import split_sizes
from jaxpar.plan.techniques.base import (
    BYTES,
    PlanTechnique,
    SentCollective,
    Settings,
    divisors,
    split_traffic,
    up_to,
    why_no_split,
)


def sizes(model: Any, rows: int, choices: Choices) -> list[int]:
    """Returns the sizes that split a model.

    For a decoder they are the common divisors of heads, kv heads and the feed-forward's width (XLA pads a vocabulary);
    for other models, the sizes for which specs were found.
    """
    if not isinstance(model, Shape):
        return up_to(split_sizes(model.splits, "tensor"), choices.tensor)
    shape = model
    common = gcd(*(shape.dims[name] for name in ("heads", "kv_heads", "mlp")))
    return up_to(divisors(common), choices.tensor)


def sequences(model: NamedDims, choices: Choices, tensor: int, context: int) -> Sequence[Mapping[str, Any]]:
    """Returns the settings of sequence parallelism, which is possible if tensor x context divides a sequence."""
    if not isinstance(model, Shape):  # its split decides
        return [{"sequence": False}]
    divides = tensor > 1 and model.dims["seq"] % (tensor * context) == 0
    return [{"sequence": False}, {"sequence": True}][: 1 + divides]


def block(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the collectives of a block over the tensor axis.

    The two forward all-reduces are exposed; each is a scatter and a gather. A backward all-reduce overlaps with the
    matmul of a weight's gradient. With sequence parallelism two gathers come first and are exposed; two scatters, and
    two optional repeated gathers, overlap with matmuls (Korthikanti et al., section 4.2.2). Full remat repeats the
    forward collectives.
    """
    size, sharded = BYTES * tokens(shape, candidate) * shape.dim, np.asarray(candidate.sequence)
    exposed_share = 1 - software.tensor_overlap

    def sent(
        kind: str, times: Any, *, exposed: float = 1.0, backward: bool = True, again: bool = False
    ) -> SentCollective:
        return SentCollective(
            collective=Collective(
                kind=kind, axes=("tensor",), dtype="bf16", group=candidate.tensor, times=times, payload=size,
                backward=backward,
            ),
            exposed=exposed,
            recomputed=again,
        )  # fmt: skip

    halves = "all-gather", "reduce-scatter"
    yield sent("all-reduce", 2 * ~sharded, backward=False)
    yield from (sent(kind, 2 * sharded, backward=False) for kind in halves)
    yield sent("all-reduce", 2 * ~sharded, exposed=exposed_share)
    yield sent("all-gather", 2 * sharded)
    yield sent("reduce-scatter", 2 * sharded, exposed=exposed_share)
    yield sent("all-gather", 2 * software.regather * sharded, exposed=exposed_share)
    # jaxpar's own program does not recompute the last matmul of a layer, nor its all-reduce
    recomputed = recompute_shares(candidate).collectives
    times, repeated_sums = 2 * recomputed, (2 - software.spmd) * recomputed
    yield sent("all-reduce", repeated_sums * ~sharded, again=True)
    yield sent("all-gather", times * sharded, again=True)
    yield sent("reduce-scatter", repeated_sums * sharded, again=True)


def step(model: NamedDims, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the collectives over the tensor axis of a model that is no decoder."""
    yield from split_traffic(model, candidate, software, "tensor")


def why_not(model: NamedDims) -> str:
    """Returns why a model is not planned over the tensor axis; "" if it is."""
    return why_no_split(model, "tensor")


TENSOR = PlanTechnique(
    axis="tensor",
    excludes=why_not,
    sizes=sizes,
    rule=" and divides the heads",
    settings=Settings(needs=("tensor", "context"), options=sequences),
    block=block,
    step=step,
    cause="tensor",
    styles={"tensor": Style(letter="T", shade=208, light="#d55e00", dark="#f08a3c")},
    blocks_layers=True,
)
