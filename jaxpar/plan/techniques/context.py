"""Context parallelism in each form: collectives of a block over the context axis, and the overlap with computation.

                  forward                                        backward
    gather        all-gather of K, V                             reduce-scatter of their gradients
    ring          P - 1 permutes of K, V                         P - 1 of K, V; P of their float32 gradients
      causal      also a chunk permute of q, K, V, out each      also one of each of their gradients
    ulysses       all_to_all of q, K, V, out                     all_to_all of their gradients

A hop of a ring overlaps with the computation on the keys already received; only its excess is exposed. Chunk permutes,
the last hop back and all-to-alls are fully exposed. `CONTEXT` prices many layouts at once; the same collectives of one
layer on one device in closed form are for tests and readers.
Sources: arXiv:2407.21783, 3.3.2 (gather), arXiv:2310.01889 (ring), arXiv:2309.14509 (all_to_all).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate, Choices, recompute_shares
from jaxpar.plan.causes import Style
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import ring_attention
from jaxpar.plan.model.layer_time import attention, scores
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.model.splits import split_sizes, traffic
from jaxpar.plan.model.state_bytes import Recipe
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

# tokens of a row from which a search tries Ulysses, and above which also rings; `crossover` has where they are faster
SHORT, LONG = 4096, 8192
_FORMS = "context_by", "ulysses", "zero_context", "zero"
BF16, FP32 = 2, 4  # bytes


def block(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the collectives of a block over the context axis.

    Collectives of the forward pass run again if attention is recomputed.
    """
    yield from _gathered(shape, candidate, software)
    if ring_attention.uses_ring(candidate).any():
        yield from _heads_for_tokens(shape, candidate)
        yield from _ring(shape, candidate, software)


def _gathered(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the collectives of gathered keys: a device has queries of its tokens, keys and values of all tokens."""
    size = 2 * BYTES * candidate.microbatch * shape.seq * shape.kv_dim / candidate.tensor
    uses_gather = 1 - ring_attention.uses_ring(candidate)
    make = _Maker(candidate.context, exposed=1 - software.context_overlap)
    yield make("all-gather", uses_gather, size, backward=False)
    yield make("reduce-scatter", uses_gather, size)
    recomputed = np.maximum(recompute_shares(candidate).attention, software.regather_context)  # or if none are saved
    yield make("all-gather", uses_gather * recomputed, size, again=True)


def _heads_for_tokens(shape: Shape, candidate: Candidate) -> Iterator[SentCollective]:
    """Yields the all-to-alls of queries and the result, and of keys and values."""
    times = 2 * (ring_attention.uses_ring(candidate) & np.greater(candidate.ulysses, 1))
    make = _Maker(np.where(ring_attention.uses_ring(candidate), candidate.ulysses, 1))
    for size in _pieces(shape, candidate):
        yield from _passes(make, "all-to-all", times, size, candidate)


def _ring(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the hops of keys and values and of their gradients, and the chunk permutes of a causal ring."""
    ring = ring_attention.groups(candidate)
    hops, (queries, keys) = ring - 1, _pieces(shape, candidate)
    make = _Maker(ring)
    # share of one array in an iteration's bytes: forward 1 of 2; backward 1 of 2 plus 2 of twice the size (float32)
    forward, backward, sums = (_turn(shape, candidate, software, way, share) for way, share in ((0, 2), (1, 6), (1, 3)))
    yield make("collective-permute", 2 * hops, keys, backward=False, beside=forward)
    yield make("collective-permute", 2 * hops * recompute_shares(candidate).attention, keys, again=True, beside=forward)
    yield make("collective-permute", 2 * hops, keys, beside=backward)
    yield make("collective-permute", 2 * hops, 2 * keys, dtype="f32", beside=sums)
    rotates = np.greater(ring, 1)
    yield make("collective-permute", 2 * rotates, keys)
    if shape.causal:
        share = moved_share(np.maximum(ring, 2))
        for size in (queries, keys):
            yield from _passes(_Maker(ring, senders=share), "collective-permute", 4 * rotates, size / 2, candidate)


def _turn(
    shape: Shape, candidate: Candidate, software: SoftwareModel, way: int, share: int
) -> Callable[[Hardware], Any]:
    """Returns a function from hardware to the seconds of computation that overlap with one send of an iteration."""

    def seconds(hardware: Hardware) -> Any:
        costs = (cost(shape, candidate, hardware, software)[way] for cost in (attention, scores))
        return sum(costs) * ring_attention.iteration_share(shape, candidate, software) / share

    return seconds


def _pieces(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the bytes of a device's shard of the queries, and of the keys with copies of heads."""
    tokens = BYTES * candidate.microbatch * shape.seq / candidate.context / candidate.tensor
    return tokens * shape.q_dim, tokens * shape.head_width * ring_attention.sent_kv_heads(shape, candidate)


def _passes(
    make: "_Maker", kind: str, times: np.ndarray | float, size: np.ndarray | float, candidate: Candidate
) -> Iterator[SentCollective]:
    """Yields a collective of the forward pass, of its recomputation, and of the backward pass."""
    yield make(kind, times, size, backward=False)
    yield make(kind, times * recompute_shares(candidate).attention, size, again=True)
    yield make(kind, times, size)


class _Maker:
    """Creates `SentCollective`s over one group of devices of the context axis."""

    def __init__(self, group: Any, *, exposed: object = 1.0, senders: Any = 1.0):
        self.group, self.exposed, self.senders = group, exposed, senders

    def __call__(
        self, kind: str, times: Any, size: Any, *, backward: bool = True, again: bool = False, dtype: str = "bf16",
        beside: Callable[[Hardware], Any] | None = None,
    ) -> SentCollective:  # fmt: skip
        collective = Collective(
            kind=kind, axes=("context",), dtype=dtype, group=self.group, times=times, payload=size, backward=backward,
            senders=self.senders,
        )  # fmt: skip
        return SentCollective(collective=collective, exposed=self.exposed, overlapped_compute=beside, recomputed=again)


def step(model: NamedDims, candidate: Candidate, software: SoftwareModel) -> Iterator[SentCollective]:
    """Yields the collectives over the context axis of a model that is no decoder."""
    yield from split_traffic(model, candidate, software, "context")


def gathered(model: Any, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Mapping[str, Any]:
    """Returns the bytes of gathered arrays of a model that is no decoder: twice the largest, as keys and values."""
    if isinstance(model, Shape):
        return {}
    payloads = [
        size * (times > 0) for sent, size, times in traffic(model, candidate, "context") if sent.kind == "all-gather"
    ]
    return {"working": 2.0 * np.maximum.reduce(np.broadcast_arrays(0.0, *payloads))}


def why_not(model: NamedDims) -> str:
    """Returns why a model is not planned over the context axis; "" if it is."""
    return why_no_split(model, "context")


def sizes(model: Any, rows: int, choices: Choices) -> list[int]:
    """Returns the sizes that split a model: divisors of a decoder's tokens; for others, sizes with found specs."""
    allowed = divisors(model.dims["seq"]) if isinstance(model, Shape) else split_sizes(model.splits, "context")
    return up_to(allowed, choices.context)


def form_options(
    model: NamedDims, choices: Choices, context: int, tensor: int, fsdp: int, zero: int, pipe: int
) -> Sequence[Mapping[str, Any]]:
    """Returns the forms to try, each with and without sharing the training state over context.

    Below `SHORT` tokens only gather is tried: it is fastest there, and scores are small. Up to `LONG` also the form
    with the largest Ulysses group, which is faster than rings there.
    """
    gather = ("gather", 1)
    seq = model.dims.get("seq", 1)
    if context == 1 or not isinstance(model, Shape) or seq < SHORT:
        return [dict(zip(_FORMS, (*gather, False, zero), strict=True))]
    state = [(False, zero)]
    if pipe == 1:
        state.append((True, zero if fsdp > 1 else 3))
    tried = allowed_forms(model, context, tensor)
    if seq <= LONG and len(tried) > 1:
        tried = [tried[0], max(tried[1:], key=lambda form: form[1])]
    return [dict(zip(_FORMS, (*form, *state_option), strict=True)) for form in tried for state_option in state]


def allowed_forms(model: Shape, context: int, tensor: int) -> list[tuple[str, int]]:
    """Returns (context_by, ulysses) of every form that divides a model's tokens and heads, gather first."""
    results: list[tuple[str, int]] = [("gather", 1)]
    for ulysses in (size for size in range(1, context + 1) if context % size == 0):
        halves = 2 if model.causal and context > ulysses else 1
        parts = np.lcm(context, halves * context // ulysses)
        heads = int(ring_attention.copied_kv_heads(model, tensor, ulysses))
        if model.seq % parts == 0 and (ulysses == 1 or model.heads % heads == 0):
            results.append(("ulysses" if ulysses == context else "ring", ulysses))
    return results


CONTEXT = PlanTechnique(
    axis="context",
    excludes=why_not,
    sizes=sizes,
    rule=" and divides the tokens of a row",
    settings=Settings(needs=("context", "tensor", "fsdp", "zero", "pipe"), options=form_options),
    block=block,
    step=step,
    bytes=gathered,
    cause="context",
    styles={"context": Style(letter="C", shade=173, light="#f0b27a", dark="#c97f45")},
)


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """One layer's attention on a device, before the context axis splits its sequences.

    Attributes:
      rows: Rows of a microbatch.
      seq: Tokens of a row.
      heads: Query heads on a device, after tensor parallelism.
      kv_heads: Heads of keys and of values.
      head_dim: Width of a head.
      context: Devices that share a row.
      ulysses: Devices of a group that exchange heads.
      causal: Whether the mask is causal.
    """

    rows: int = 1
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    ulysses: int = 1
    causal: bool = True

    @property
    def ring(self) -> int:
        """Number of groups between which keys rotate."""
        return self.context // self.ulysses

    def entries(self, heads: int) -> int:
        """Returns the elements of a device's shard [rows, seq / context, heads, head_dim]."""
        return self.rows * self.seq // self.context * heads * self.head_dim

    @property
    def sent_kv_heads(self) -> int:
        """Number of kv heads that are sent, with copies if there are fewer than `ulysses`."""
        return math.lcm(self.kv_heads, self.ulysses)


def gather_collectives(row: LayerAttention) -> Iterator[Collective]:
    """Yields the collectives of gathered keys in a layer, forward and backward."""
    size = BF16 * row.context * row.entries(row.kv_heads)
    for kind, backward in (("all-gather", False), ("reduce-scatter", True)):
        yield _bf16(kind, group=row.context, times=2, payload=size, backward=backward)


def ring_collectives(row: LayerAttention) -> Iterator[Collective]:
    """Yields the collectives of a ring, Ulysses, or both in a layer, forward and backward."""
    sizes = [BF16 * row.entries(heads) for heads in (row.heads, row.sent_kv_heads)]
    hops, permute = row.ring - 1, partial(_bf16, "collective-permute", group=row.ring)
    for backward in (False, True):
        if row.ulysses > 1:
            for size in sizes:
                yield _bf16("all-to-all", group=row.ulysses, times=2, payload=size, backward=backward)
        if hops:
            yield permute(times=2 * (hops + backward), payload=sizes[1], backward=backward)
        if hops and row.causal:  # two halves of each array; some of their chunks stay
            for size in sizes:
                yield permute(times=4, payload=size // 2, backward=backward, senders=float(moved_share(row.ring)))
    if hops:
        sums = permute(times=2 * hops, payload=sizes[1] * FP32 // BF16, backward=True)
        yield replace(sums, dtype="f32")


def moved_share(ring: np.ndarray | float) -> Any:
    """Returns the share of chunks that change their group in a causal ring's chunk permutes.

    P groups have 2P chunks. Chunk c comes from group c // 2, and goes to group c, or to group 2P - 1 - c if c >= P. Two
    chunks stay in their group: chunk 0, and, unless 3 divides P, the chunk c >= P with c // 2 = 2P - 1 - c.

    >>> float(moved_share(2)), float(moved_share(8))
    (0.5, 0.875)
    """
    stay = 1 + (np.remainder(ring, 3) != 0)
    return 1 - stay / (2 * np.asarray(ring))


def work_share(row: LayerAttention) -> float:
    """Returns a device's share of the dense square's FLOP; 1 without a causal mask.

    >>> work_share(LayerAttention(seq=64, heads=1, kv_heads=1, head_dim=1, context=8))
    0.53125
    """
    return (2 * row.ring + 1) / (4 * row.ring) if row.causal else 1.0


def _bf16(kind: str, **given: Any) -> Collective:
    return Collective(kind=kind, axes=("context",), dtype="bf16", **given)
