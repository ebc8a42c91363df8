"""Context parallelism in each of its forms: what a block sends over the context axis, and what computation hides.

                  forward                                        backward
    gather        all-gather of K, V                             reduce-scatter of their gradients
    ring          P - 1 permutes of K, V                         the same, P - 1 of gradients in float32, one home
      causal      and through the door, once: q, K, V, out       their gradients
    ulysses       all_to_all of q, K, V, out                     of their gradients

A hop of a ring runs beside the turn in which the keys that are there are met: it is waited for where it takes longer.
Doors, the way home and heads for tokens hide behind nothing.
Sources: arXiv:2407.21783, 3.3.2 (gather), arXiv:2310.01889 (ring), arXiv:2309.14509 (all_to_all).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Look
from jaxpar.plan.choices import Choices
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.dims import Named
from jaxpar.plan.model.layer_time import attention, scores
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES, Sent, Settings, Technique
from jaxpar.plan.techniques.context_forms import moved

# tokens of a row from which on heads for tokens are weighed, and rings too: `crossover` says where they are faster
SHORT, LONG = 4096, 8192
_FORMS = "context_by", "ulysses", "zero_context", "zero"


def block(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[Sent]:
    """Yields the collectives of a block over the context axis.

    The forward pass's run once more where attention is computed again.
    """
    yield from _gathered(shape, candidate, software)
    if exchanged.travels(candidate).any():
        yield from _heads_for_tokens(shape, candidate)
        yield from _ring(shape, candidate, software)


def _gathered(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[Sent]:
    """Yields what gathered keys send: every device has queries of its own tokens and keys and values of all."""
    size = 2 * BYTES * candidate.microbatch * shape.seq * shape.kv_dim / candidate.tensor
    own = 1 - exchanged.travels(candidate)
    sent = _Maker(candidate.context, exposed=1 - software.context_overlap)
    yield sent("all-gather", own, size, backward=False)
    yield sent("reduce-scatter", own, size)
    again = np.maximum(candidate.recomputed[1], software.context_again)  # or where none of them is kept
    yield sent("all-gather", own * again, size, again=True)


def _heads_for_tokens(shape: Shape, candidate: Candidate) -> Iterator[Sent]:
    """Yields the all-to-alls of queries with the result, and of keys with values."""
    times = 2 * (exchanged.travels(candidate) & np.greater(candidate.ulysses, 1))
    sent = _Maker(np.where(exchanged.travels(candidate), candidate.ulysses, 1))
    for size in _pieces(shape, candidate):
        yield from _passes(sent, "all-to-all", times, size, candidate)


def _ring(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[Sent]:
    """Yields the hops of keys and values, those of their gradients, and the doors of a causal ring."""
    ring = exchanged.groups(candidate)
    hops, (queries, keys) = ring - 1, _pieces(shape, candidate)
    sent = _Maker(ring)
    # of the bytes of a turn a key's share: one of two alike; backward one of two beside two twice as large
    ahead, back, sums = (_turn(shape, candidate, software, way, share) for way, share in ((0, 2), (1, 6), (1, 3)))
    yield sent("collective-permute", 2 * hops, keys, backward=False, beside=ahead)
    yield sent("collective-permute", 2 * hops * candidate.recomputed[1], keys, again=True, beside=ahead)
    yield sent("collective-permute", 2 * hops, keys, beside=back)
    yield sent("collective-permute", 2 * hops, 2 * keys, dtype="f32", beside=sums)
    rotates = np.greater(ring, 1)
    yield sent("collective-permute", 2 * rotates, keys)
    if shape.causal:
        share = moved(np.maximum(ring, 2))
        for size in (queries, keys):
            yield from _passes(_Maker(ring, senders=share), "collective-permute", 4 * rotates, size / 2, candidate)


def _turn(
    shape: Shape, candidate: Candidate, software: SoftwareModel, way: int, share: int
) -> Callable[[Hardware], Any]:
    """Returns the seconds of a turn's computation that one of its sends runs beside, forward or backward."""

    def seconds(hardware: Hardware) -> Any:
        both = (cost(shape, candidate, hardware, software)[way] for cost in (attention, scores))
        return sum(both) * exchanged.turn(shape, candidate, software) / share

    return seconds


def _pieces(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the bytes of a device's piece of the queries, and of the keys with copies of heads."""
    tokens = BYTES * candidate.microbatch * shape.seq / candidate.context / candidate.tensor
    return tokens * shape.dim, tokens * shape.dim / shape.heads * exchanged.heads_of_keys(shape, candidate)


def _passes(sent: "_Maker", kind: str, times: Any, size: Any, candidate: Candidate) -> Iterator[Sent]:
    """Yields what is sent in the forward pass, in the one that is computed again, and in the backward pass."""
    yield sent(kind, times, size, backward=False)
    yield sent(kind, times * candidate.recomputed[1], size, again=True)
    yield sent(kind, times, size)


class _Maker:
    """Makes collectives of one group."""

    def __init__(self, group: Any, *, exposed: Any = 1.0, senders: Any = 1.0):
        self.group, self.exposed, self.senders = group, exposed, senders

    def __call__(
        self, kind: str, times: Any, size: Any, *, backward: bool = True, again: bool = False, dtype: str = "bf16",
        beside: Callable[[Hardware], Any] | None = None,
    ) -> Sent:  # fmt: skip
        made = Collective(
            kind=kind, axes=("context",), dtype=dtype, group=self.group, times=times, payload=size, backward=backward,
            senders=self.senders,
        )  # fmt: skip
        return Sent(collective=made, exposed=self.exposed, beside=beside, again=again)


def forms(
    model: Named, choices: Choices, context: int, tensor: int, fsdp: int, zero: int, pipe: int
) -> Sequence[Mapping[str, Any]]:
    """Returns the forms to try, each with and without the devices of context sharing the state.

    Below `SHORT` tokens keys are gathered and nothing else is tried: there it is fastest, and scores are small. Up to
    `LONG` the form with the most heads for tokens is tried besides, which is ahead of rings there.
    """
    gather = ("gather", 1)
    seq = model.dims.get("seq", 1)
    if context == 1 or not isinstance(model, Shape) or seq < SHORT:
        return [dict(zip(_FORMS, (*gather, False, zero), strict=True))]
    state = [(False, zero)]
    if pipe == 1:
        state.append((True, zero if fsdp > 1 else 3))
    found = ways(model, context, tensor)
    if seq <= LONG and len(found) > 1:
        found = [found[0], max(found[1:], key=lambda way: way[1])]
    return [dict(zip(_FORMS, (*way, *held), strict=True)) for way in found for held in state]


def ways(model: Shape, context: int, tensor: int) -> list[tuple[str, int]]:
    """Returns (context_by, ulysses) of every form that divides a model's tokens and heads, gathered keys first."""
    found: list[tuple[str, int]] = [("gather", 1)]
    for ulysses in (size for size in range(1, context + 1) if context % size == 0):
        halves = 2 if model.causal and context > ulysses else 1
        parts = np.lcm(context, halves * context // ulysses)
        heads = int(exchanged.with_copies(model, tensor, ulysses))
        if model.seq % parts == 0 and (ulysses == 1 or model.heads % heads == 0):
            found.append(("ulysses" if ulysses == context else "ring", ulysses))
    return found


CONTEXT = Technique(
    axis="context",
    priced=Shape,
    rule=" and divides the tokens of a row",
    settings=Settings(needs=("context", "tensor", "fsdp", "zero", "pipe"), ways=forms),
    block=block,
    cause="context",
    looks={"context": Look(letter="C", shade=173, light="#f0b27a", dark="#c97f45")},
)
