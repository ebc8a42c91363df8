"""A layout: mesh sizes, ZeRO stage, schedule, microbatches and remat; or arrays of many layouts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxpar.errors import JaxparError, Problem, suggest
from jaxpar.mesh.axes import AXES, batch_axes
from jaxpar.parallel.declaration import DECLARED
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.schedule import Schedule


class RecomputeShares(NamedTuple):
    """Shares of a layer's forward pass that the backward pass recomputes.

    Attributes:
      matmuls: Share of matmuls with weights.
      attention: Share of attention's matmuls; if they are recomputed, the context axis gathers keys and values again.
      scores: Share of attention's softmax.
      elementwise: Share of all other ops.
      collectives: Share of the collectives of the tensor axis.
    """

    matmuls: Any
    attention: Any
    scores: Any
    elementwise: Any
    collectives: Any


RECOMPUTES = {  # by remat policy
    "none": RecomputeShares(0.0, 0.0, 0.0, 0.0, 0.0),
    "all_dots": RecomputeShares(0.0, 0.0, 1.0, 1.0, 0.0),
    "dots": RecomputeShares(0.0, 1.0, 1.0, 1.0, 0.0),
    "selective": RecomputeShares(0.0, 1.0, 1.0, 0.0, 0.0),
    "op": RecomputeShares(0.5, 0.0, 0.0, 1.0, 0.0),
    "full": RecomputeShares(1.0, 1.0, 1.0, 1.0, 1.0),
    "offload": RecomputeShares(1.0, 1.0, 1.0, 1.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """Facts of a schedule that hold for any number of stages and microbatches.

    Attributes:
      phased: Whether each tick has one kind of op on all stages.
      split: Whether gradients of weights and of inputs are separate ops.
      forwards_first: Whether all forwards come before the first backward.
    """

    phased: Any
    split: Any
    forwards_first: Any


def schedule_traits(names: object) -> ScheduleTraits:
    """Returns the traits of schedules of the library, by their names."""
    names = np.asarray(names)
    phased, split, forwards_first = (np.zeros(names.shape, bool) for _ in range(3))
    for name in LIBRARY:
        if (matches := names == name).any():
            table = _example_table(name)
            phased = phased | (matches & table.phased)
            split = split | (matches & table.split)
            forwards_first = forwards_first | (matches & (table.peak[0] == table.microbatches * table.chunks))
    return ScheduleTraits(phased=phased, split=split, forwards_first=forwards_first)


@cache
def _example_table(name: str) -> Schedule:
    """Returns a small example table of a schedule of the library."""
    stages = 2
    return schedule(name, stages=stages, microbatches=max(4, LIBRARY[name].fewest_microbatches(stages)))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its schedule. Each field is one value, or an array with one value per candidate.

    Attributes:
      pipe: Stages of the pipeline.
      data: Replicas of the parameters.
      fsdp: Devices that share the training state according to `zero`.
      context: Devices that share each sequence.
      tensor: Devices that share each matrix.
      zero: Sharded state: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
      context_by: Form of context parallelism: gather, ring or ulysses, as in `jaxpar.Parallel`.
      ulysses: Devices of the context axis that exchange heads; all of them if context_by is ulysses.
      zero_context: Whether the devices of context share the training state with those of fsdp.
      sequence: Whether the tensor axis also shards the activations between blocks (sequence parallelism).
      schedule: One of `jaxpar.pipeline.tables.library.LIBRARY`.
      chunks: Parts of the model on each stage.
      microbatch: Rows of one microbatch on one replica.
      microbatches: Number of microbatches per step.
      remat: Recomputation: none, all_dots, dots, full, offload as in jaxpar.models.remat; selective: attention
        between its projections (Korthikanti et al. 2022, arXiv:2205.05198, section 5); op: every other matmul with
        weights, and elementwise ops (torchtitan's selective checkpointing by operation).
      head: Stages that run embedding and head, as in `jaxpar.Pipeline`: last (the last one), or spread (all).
      axes: Sizes of the axes of added techniques, as in `jaxpar.Parallel`.
    """

    pipe: Any = 1
    data: Any = 1
    fsdp: Any = 1
    context: Any = 1
    tensor: Any = 1
    zero: Any = 0
    context_by: Any = "gather"
    ulysses: Any = 1
    zero_context: Any = False
    sequence: Any = False
    schedule: Any = "1f1b"
    chunks: Any = 1
    microbatch: Any = 1
    microbatches: Any = 1
    remat: Any = "none"
    head: Any = "last"
    axes: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a mapping has no hash

    def __post_init__(self):
        problems = [
            Problem(f"axes={{{axis!r}: ...}}", "axes has sizes of further axes of a mesh", suggest(str(axis), AXES))
            for axis in self.axes
            if axis not in AXES or axis in DECLARED
        ]
        counts = {key: getattr(self, key) for key in (*DECLARED, "chunks", "microbatch", "microbatches", "ulysses")}
        for key, value in {**counts, **self.axes}.items():
            numbers = np.asarray(value)
            if not np.issubdtype(numbers.dtype, np.integer) or (numbers < 1).any():
                problems.append(Problem(f"{key}={value!r:.60}", f"{key} is a positive whole number", f"{key}=1"))
        if not np.isin(self.zero, range(4)).all():
            problems.append(Problem(f"zero={self.zero!r:.60}", "zero is 0, 1, 2 or 3", "zero=3"))
        for key, names in (
            ("schedule", LIBRARY),
            ("remat", RECOMPUTES),
            ("head", ("last", "spread")),
            ("context_by", ("gather", "ring", "ulysses")),
        ):
            words = np.asarray(getattr(self, key))
            if (
                sum(np.count_nonzero(words == word) for word in names) == words.size
            ):  # np.unique, which sorts, takes ten times as long
                continue
            for word in set(np.unique(words).tolist()) - set(names):
                problems.append(Problem(f"{key}={word!r}", f"a {key} that has a name", suggest(str(word), names)))
        if problems:
            raise JaxparError(*problems)

    @property
    def sizes(self) -> dict[str, Any]:
        """Mesh axis to size, outermost first."""
        all_sizes = {axis: getattr(self, axis) for axis in DECLARED} | dict(self.axes)
        return {axis: all_sizes[axis] for axis in AXES if axis in all_sizes}

    def size(self, axis: str) -> Any:
        """Returns the size of an axis; 1 if the layout does not have it."""
        return self.sizes.get(axis, 1)

    def stride(self, axis: str) -> Any:
        """Returns the distance in devices between neighbours along an axis: the product of the sizes inside it."""
        names = [*AXES]
        return math.prod(self.size(inner) for inner in names[names.index(axis) + 1 :])

    def map_fields(self, change: Callable[[Any], Any]) -> "Candidate":
        """Applies `change` to every field and to the size of every further axis, e.g. to select entries.

        Skips the checks of the constructor: the fields have passed them.
        """
        result = object.__new__(Candidate)
        for entry in fields(self):
            if entry.name != "axes":
                object.__setattr__(result, entry.name, change(getattr(self, entry.name)))
        object.__setattr__(result, "axes", {axis: change(size) for axis, size in self.axes.items()})
        return result

    @property
    def devices(self) -> Any:
        """Product of the sizes of all axes."""
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> Any:
        """Devices that share the training state according to `zero`."""
        return np.multiply(self.fsdp, np.where(self.zero_context, self.context, 1))

    @property
    def replicas(self) -> Any:
        """Number of groups of devices that get different examples: the product of the batch axes."""
        return math.prod(self.size(axis) for axis in batch_axes())

    def layers(self, count: int) -> Any:
        """Returns the most layers in a part (one chunk of one stage), if the model has `count` layers."""
        return -(-count // (self.pipe * self.chunks))

    @cached_property
    def schedule_traits(self) -> ScheduleTraits:
        """Facts of the schedule; see `schedule_traits`."""
        return schedule_traits(self.schedule)


def recompute_shares(candidate: Candidate) -> RecomputeShares:
    """Returns the shares in `RECOMPUTES` for `remat`, corrected for context parallelism.

    With gathered keys no remat policy can save the result of attention's first matmul, so all_dots recomputes it.
    """
    remat = np.asarray(candidate.remat)
    masks = [remat == name for name in RECOMPUTES]
    shares = RecomputeShares(*(np.select(masks, column) for column in zip(*RECOMPUTES.values(), strict=True)))
    attention = np.where((remat == "all_dots") & np.greater(candidate.context, 1), 0.5, shares.attention)
    # a ring or ulysses is one function each for forward and backward: no policy sees the matmuls in them
    opaque = np.isin(remat, ("all_dots", "dots")) & np.not_equal(candidate.context_by, "gather")
    return shares._replace(attention=np.where(opaque, 1.0, attention), scores=np.where(opaque, 1.0, shares.scores))


# Options of a search: schedules, chunks, remat policies and bounds on axis sizes.


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Schedules, chunks and remat policies that a search tries, and the largest size of each axis.

    Attributes:
      schedules: Pipeline schedules.
      chunks: Numbers of chunks per stage that interleaved schedules try.
      uneven: Whether chunks may have different numbers of layers, or none, as in Llama 3. jaxpar's own chunks may not;
        stages of one chunk may.
      remats: Remat policies.
      context: Largest size of `context`; 0 means any that divides a sequence. Llama 3 was trained with 16 at 131,072
        tokens.
      tensor: Largest size of `tensor`; 0 means any that divides the matrices.
      pipe: Most pipeline stages; 0 means up to the number of layers.
      axes: Largest sizes of the axes of added techniques: {"expert": 4}.
    """

    schedules: tuple[str, ...] = ("1f1b_phased", "interleaved_phased", "gpipe")
    chunks: tuple[int, ...] = (2, 4)
    uneven: bool = False
    remats: tuple[str, ...] = ("none", "all_dots", "dots", "full")
    context: int = 16
    tensor: int = 0
    pipe: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)

    def largest_size(self, axis: str) -> int:
        """Returns the largest size of an axis; 0 means unbounded."""
        return getattr(self, axis, 0) if axis in DECLARED else self.axes.get(axis, 0)

    def without_bound(self, axis: str) -> "Choices":
        """Removes the bound on an axis."""
        return replace(self, **{axis: 0}) if axis in DECLARED else replace(self, axes={**self.axes, axis: 0})
