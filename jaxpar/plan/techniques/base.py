"""The protocol of a technique as a plan sees it: what a search and the two sums ask of it.

    searched     lacks(model)                     why it has nothing to do in a model
                 sizes(model, rows, choices)      which sizes its axis may have
                 variants(size)                   settings that come with a size, such as ZeRO's stages
                 settings                         settings that hang on the batch too, such as a pipeline's schedule
                 follows(model, candidate)        settings that nobody chooses
    memory       bytes(model, candidate, ...)     bytes by cause
    seconds      block(shape, candidate, ...)     collectives of a block, which stand in the way of a pipeline's stages
                 step(model, candidate, ...)      collectives of a step, beside the schedule
                 around(work, candidate, ...)     seconds of what hides behind computation, known once that is

A collective is `jaxpar.mesh.collective.Collective`, as the ledger of a compiled program has it, so that the two can be
compared. Fields of a candidate may be arrays, and so are then all numbers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.mesh.axes import AXES
from jaxpar.mesh.collective import Collective
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Look
from jaxpar.plan.choices import Choices
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.dims import Named
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe

LOCAL = ("collective-permute", "all-to-all")  # kinds whose messages have a distance of their own
BYTES = 2  # of a bfloat16: activations travel in it


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective that a technique adds, and how much of it is waited for.

    Attributes:
      collective: Its kind, axis, group, payload, and how often it runs; `backward` says in which pass.
      exposed: Share of its time that computation does not hide.
      beside: Returns the seconds of computation that each of its sends runs beside, on given hardware: it is waited for
        where it takes longer. None where `exposed` says how much is.
      again: Whether it is one of the forward pass, sent once more where the backward pass computes that again.
    """

    collective: Collective
    exposed: Any = 1.0
    beside: Callable[[Hardware], Any] | None = None
    again: bool = False


def seconds(sent: Iterable[Sent], candidate: Candidate, hardware: Hardware) -> tuple[Any, Any]:
    """Returns the seconds of collectives that are waited for, forward and backward.

    Rings pass over all axes of a collective, the innermost of which has the nearest neighbours. Of an all-to-all, each
    device's neighbours are those next to it; a permute is as slow as the farthest of its messages.
    """
    every, once, sums = list(sent), {}, {"forward": 0.0, "backward": 0.0, "again": 0.0}
    for each in every:
        found = each.collective
        # alike ones, as of both passes, are priced once
        key = found.axes, found.kind in LOCAL and found.kind, id(found.payload), id(found.group)
        if key not in once:
            once[key] = _once(found, candidate, hardware)
        times: Any = found.times  # a number, or an array
        passes = 2 if found.kind == "all-reduce" else 1  # a scatter, and a gather
        when = "again" if each.again else "backward" if found.backward else "forward"
        left = each.exposed * once[key] if each.beside is None else np.maximum(once[key] - each.beside(hardware), 0.0)
        sums[when] = sums[when] + passes * times * left
    return sums["forward"], sums["backward"] + sums["again"]


def _once(found: Collective, candidate: Candidate, hardware: Hardware) -> Any:
    stride = candidate.stride(found.axes[-1])
    if found.kind == "collective-permute":
        return hardware.send(found.payload, stride, candidate.size(found.axes[-1]))
    if found.kind == "all-to-all":
        members = hardware.members(found.group, stride)
    else:
        members = math.prod(hardware.members(candidate.size(axis), candidate.stride(axis)) for axis in found.axes)
    return hardware.gather(found.payload, found.group, stride, members=members)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Parameters and compute time of a step, known by the time that the traffic beside it is priced.

    Attributes:
      parameters: Of a device, before fsdp shards them.
      layers: In how many layers they are, embedding and head apart.
      compute: Seconds of a step that traffic may hide behind, waiting for other stages among them.
    """

    parameters: Any
    layers: Any
    compute: Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a technique that a search tries besides the size of its axis.

    Attributes:
      needs: Fields of a candidate that they hang on.
      ways: Returns the settings to try for a model, given those fields: each field's name to its value.
    """

    needs: tuple[str, ...]
    ways: Callable[..., Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique, as a plan weighs it.

    Attributes:
      axis: The axis that it communicates over, one of `jaxpar.mesh.axes.AXES`.
      priced: The kind of model that its price is known of; `Shape` is a decoder.
      sizes: Returns the sizes that the axis may have for a model, rows of a batch, and the choices of a search; 1 is
        among them. By default it divides the dims that its axis splits.
      rule: What those sizes are bound by, in words that follow "tensor at most 8".
      variants: Returns the settings that go with a size, each a field of a candidate to its value.
      settings: Settings that hang on other sizes and on microbatches.
      follows: Returns a candidate with what follows from its other fields.
      bytes: Returns cause to bytes of a device, those that `Memory` has or a further one. It is given the model, the
        candidate, the software, and the bytes per parameter.
      block: Returns the collectives of one block of a decoder for one microbatch, forward and backward.
      step: Returns the collectives of a step besides those, of any model.
      around: Returns cause to the seconds of what travels beside computation.
      cause: The cause of the seconds of `block` and `step`; "" where it has neither.
      looks: Its causes, of seconds and of bytes, to how they are drawn.
      complexity: How much there is to understand in it: the simpler of two layouts that are as fast comes first.
      near: Whether its collectives stand in the way of every layer, so that several nodes have to pay by a margin.
    """

    axis: str
    priced: type = object
    sizes: Callable[[Any, int, Choices], Collection[int]] | None = None
    rule: str = ""
    variants: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _: ({},)
    settings: Settings | None = None
    follows: Callable[[Any, Candidate], Candidate] = lambda _, candidate: candidate
    bytes: Callable[[Any, Candidate, SoftwareModel, Recipe], Mapping[str, Any]] = lambda *_: {}
    block: Callable[[Shape, Candidate, SoftwareModel], Iterable[Sent]] = lambda *_: ()
    step: Callable[[Any, Candidate, SoftwareModel], Iterable[Sent]] = lambda *_: ()
    around: Callable[[Work, Candidate, Hardware, SoftwareModel], Mapping[str, Any]] = lambda *_: {}
    cause: str = ""
    looks: Mapping[str, Look] = field(default_factory=dict)
    complexity: float = 2.0
    near: bool = False

    def lacks(self, model: Named) -> str:
        """Returns why it has nothing to do in a model, in words; "" where it has."""
        if not isinstance(model, self.priced):
            return "priced for decoders alone"
        dims = AXES[self.axis].splits
        return f"no dim is called {' or '.join(dims)}" if dims and not {*dims} & {*model.dims} else ""

    def legal(self, model: Named, rows: int, choices: Choices) -> Collection[int]:
        """Returns the sizes that its axis may have."""
        if self.lacks(model):
            return [1]
        if self.sizes is not None:
            return self.sizes(model, rows, choices)
        split = [model.dims[name] for name in AXES[self.axis].splits if name in model.dims]
        sees = [rows] * AXES[self.axis].examples
        return within(divisors(math.gcd(*split, *sees) or 1), choices.most(self.axis))


def divisors(number: int) -> list[int]:
    """Returns what divides a number, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def within(sizes: Iterable[int], most: int) -> list[int]:
    """Returns sizes up to the most that a search tries; 0 is without a bound."""
    return [size for size in sizes if not most or size <= most]
