"""The protocol of a technique in a plan: its options for the search, its bytes and its seconds.

    search       why_not(model)                   the reason why the technique does not apply to a model
                 sizes(model, rows, choices)      legal sizes of its axis
                 variants(size)                   settings that depend on the size, such as ZeRO's stages
                 settings                         settings that also depend on the batch, such as a pipeline's schedule
                 derived_settings(model, ...)     settings that follow from others
    memory       bytes(model, candidate, ...)     bytes by cause
    seconds      block(shape, candidate, ...)     collectives of a block, on the critical path of pipeline stages
                 step(model, candidate, ...)      collectives of a step, outside of the schedule
                 overlapped_seconds(work, ...)    exposed seconds of traffic that overlaps with computation

A collective is a `jaxpar.mesh.collective.Collective`, as in the ledger of a compiled program, so that both can be
compared. Fields of a candidate may be arrays; all numbers are then arrays too. `split_traffic` serves both `context`
and `tensor` of a model whose dims were found from its trace.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.mesh.axes import AXES
from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate, Choices
from jaxpar.plan.causes import Style
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import NamedDims, Shape
from jaxpar.plan.model.splits import split_sizes, traffic
from jaxpar.plan.model.state_bytes import Recipe

LOCAL = ("collective-permute", "all-to-all")  # kinds priced by the distance of their messages
BYTES = 2  # of bfloat16, the dtype in which activations are sent
# hidden share of a found split's backward collectives: all in 25 replayed programs, on average; but they take
# processors and bandwidth from the matmuls beside them, which no replay shows
OVERLAP = 0.8


@dataclass(frozen=True, kw_only=True)
class SentCollective:
    """A collective that a technique adds, and its exposed share.

    Attributes:
      collective: Its kind, axis, group, payload, count, and its pass (`backward`).
      exposed: Share of its time that computation does not hide.
      overlapped_compute: Maps hardware to the seconds of computation that overlap with each send; the
        excess over them is exposed. None if `exposed` applies.
      recomputed: Whether it repeats a forward collective during recomputation in the backward pass.
    """

    collective: Collective
    exposed: Any = 1.0
    overlapped_compute: Callable[[Hardware], Any] | None = None
    recomputed: bool = False


def exposed_seconds(collectives: Iterable[SentCollective], candidate: Candidate, hardware: Hardware) -> tuple[Any, Any]:
    """Returns the exposed seconds of collectives, forward and backward.

    A ring spans all axes of a collective; its neighbours are those of the innermost axis. In an all-to-all a device's
    neighbours are the adjacent ones; a permute is as slow as its farthest message.
    """
    sends, prices, sums = list(collectives), {}, {"forward": 0.0, "backward": 0.0, "again": 0.0}
    for send in sends:
        source = send.collective
        # equal collectives, e.g. of both passes, are priced once
        key = source.axes, source.kind in LOCAL and source.kind, id(source.payload), id(source.group)
        if key not in prices:
            prices[key] = _seconds_of_one(source, candidate, hardware)
        times: Any = source.times  # a number, or an array
        passes = 2 if source.kind == "all-reduce" else 1  # a scatter, and a gather
        direction = "again" if send.recomputed else "backward" if source.backward else "forward"
        time = (
            send.exposed * prices[key]
            if send.overlapped_compute is None
            else np.maximum(prices[key] - send.overlapped_compute(hardware), 0.0)
        )
        sums[direction] = sums[direction] + passes * times * time
    return sums["forward"], sums["backward"] + sums["again"]


def _seconds_of_one(collective: Collective, candidate: Candidate, hardware: Hardware) -> Any:
    stride = candidate.stride(collective.axes[-1])
    if collective.kind == "collective-permute":
        return hardware.send(collective.payload, stride, candidate.size(collective.axes[-1]))
    if collective.kind == "all-to-all":
        local = hardware.members(collective.group, stride)
    else:
        local = math.prod(hardware.members(candidate.size(axis), candidate.stride(axis)) for axis in collective.axes)
    return hardware.gather(collective.payload, collective.group, stride, members=local)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Parameters and compute time of a step, for pricing the traffic that overlaps with it.

    Attributes:
      parameters: Parameters on a device, before fsdp shards them.
      layers: Layers on a device, without embedding and head.
      compute: Seconds of a step that can hide traffic, including waits for other stages.
    """

    parameters: Any
    layers: Any
    compute: Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a technique that a search tries besides the size of its axis.

    Attributes:
      needs: Fields of a candidate that determine the settings.
      options: Maps (model, choices, those fields) to the settings to try, each a dict of fields of a candidate.
    """

    needs: tuple[str, ...]
    options: Callable[..., Sequence[Mapping[str, Any]]]


def no_seconds(*_: Any) -> Mapping[str, Any]:
    """Default `overlapped_seconds`, of a technique without a cost model."""
    return {}


@dataclass(frozen=True, kw_only=True)
class PlanTechnique:
    """The options and costs of a technique in a plan.

    Attributes:
      axis: The axis that it communicates over, one of `jaxpar.mesh.axes.AXES`.
      model_type: The class of models that it can price; `Shape` is a decoder.
      excludes: Maps a model to the reason why it cannot be priced, or "" if it can; replaces the test by the names of
        its dims.
      sizes: Maps (model, examples per batch, choices) to the legal sizes of the axis, including 1. By default, the
        sizes that divide the dims that the axis splits.
      rule: The bound of those sizes as text that follows "tensor at most 8".
      variants: Maps a size to the settings to try with it, each a dict of fields of a candidate.
      settings: Settings that depend on other sizes and on microbatches.
      derived_settings: Maps (model, candidate) to the candidate with its derived fields.
      bytes: Maps (model, candidate, software, bytes per parameter) to the bytes of a device, by cause: those of
        `Memory` or further ones.
      block: Yields the collectives of one block of a decoder for one microbatch, forward and backward.
      step: Yields the collectives of a step outside of its blocks, for any model.
      overlapped_seconds: Returns the exposed seconds, by cause, of traffic that overlaps with computation.
      in_schedule: Whether the price of the schedule contains the technique's seconds, as for a pipeline.
      cause: The cause of the seconds of `block` and `step`; "" if it has neither. A technique without a cause,
        `overlapped_seconds` or `in_schedule` has no cost model: a search does not use it, and says so.
      styles: Maps its causes of time and of bytes to letters and colours.
      complexity: Weight of the technique in a layout's complexity; of equally fast layouts the simpler comes first.
      blocks_layers: Whether its collectives block every layer, so that spanning several nodes must be faster by a
        margin.
    """

    axis: str
    model_type: type = object
    excludes: Callable[[Any], str] | None = None
    sizes: Callable[[Any, int, Choices], Collection[int]] | None = None
    rule: str = ""
    variants: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _: ({},)
    settings: Settings | None = None
    derived_settings: Callable[[Any, Candidate], Candidate] = lambda _, candidate: candidate
    bytes: Callable[[Any, Candidate, SoftwareModel, Recipe], Mapping[str, Any]] = lambda *_: {}
    block: Callable[[Shape, Candidate, SoftwareModel], Iterable[SentCollective]] = lambda *_: ()
    step: Callable[[Any, Candidate, SoftwareModel], Iterable[SentCollective]] = lambda *_: ()
    overlapped_seconds: Callable[[Work, Candidate, Hardware, SoftwareModel], Mapping[str, Any]] = no_seconds
    in_schedule: bool = False
    cause: str = ""
    styles: Mapping[str, Style] = field(default_factory=dict)
    complexity: float = 2.0
    blocks_layers: bool = False

    @property
    def has_price(self) -> bool:
        """Whether the technique has a price for its traffic; without one, a search would treat the traffic as free."""
        return self.in_schedule or bool(self.cause) or self.overlapped_seconds is not no_seconds

    def why_not(self, model: NamedDims) -> str:
        """Explains why a search does not use the technique for a model; "" if it does."""
        if not self.has_price:
            return "its technique has no cost model, so no layout that uses it is ranked"
        if not isinstance(model, self.model_type):
            return "priced for decoders alone"
        if self.excludes is not None:
            return self.excludes(model)
        dims = AXES[self.axis].splits
        return f"no dim is called {' or '.join(dims)}" if dims and not {*dims} & {*model.dims} else ""

    def allowed_sizes(self, model: NamedDims, rows: int, choices: Choices) -> Collection[int]:
        """Returns the legal sizes of its axis."""
        if self.why_not(model):
            return [1]
        if self.sizes is not None:
            return self.sizes(model, rows, choices)
        dim_sizes = [model.dims[name] for name in AXES[self.axis].splits if name in model.dims]
        batch = [rows] * AXES[self.axis].splits_batch
        return up_to(divisors(math.gcd(*dim_sizes, *batch) or 1), choices.largest_size(self.axis))


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def up_to(sizes: Iterable[int], most: int) -> list[int]:
    """Returns the sizes up to `most`; 0 means unbounded."""
    return [size for size in sizes if not most or size <= most]


def split_traffic(model: Any, candidate: Candidate, software: SoftwareModel, axis: str) -> Iterator[SentCollective]:
    """Yields the collectives over an axis of a model that is no decoder.

    Those of the forward pass are exposed; of the backward pass's, matmuls of weights' gradients hide the share
    `OVERLAP`. If the model names the dims that the axis splits, its all-gathers are of keys and values: no remat policy
    saves them.
    """
    if isinstance(model, Shape):
        return
    dtype = "bf16" if software.wire[0] == 2 else "f32"
    for sent, payload, times in traffic(model, candidate, axis):
        gathers_keys = sent.kind == "all-gather" and axis in model.named_axes
        runs = 1 + gathers_keys * np.not_equal(candidate.remat, "none")
        yield SentCollective(
            collective=Collective(
                kind=sent.kind, axes=(axis,), dtype=dtype, group=candidate.size(axis),
                times=runs * times * candidate.microbatches, payload=payload, backward=sent.backward,
            ),
            exposed=1 - OVERLAP * sent.backward,
        )  # fmt: skip


def why_no_split(model: NamedDims, axis: str) -> str:
    """Returns why a model is not planned over an axis, "context" or "tensor"; "" if it is, or lists reasons itself."""
    if isinstance(model, Shape) or len(split_sizes(getattr(model, "splits", ()), axis)) > 1:
        return ""
    listed = any(reason.startswith((f"{axis}:", f"{axis} ")) for reason in getattr(model, "no_splits", ()))
    return "" if listed else "no dims that it could split were found"
