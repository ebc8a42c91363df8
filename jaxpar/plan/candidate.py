"""One way to run a training step, as the planner weighs it; or many at once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError, Problem, nearest
from jaxpar.mesh.axes import AXES, batch_axes
from jaxpar.parallel.declare import DECLARED
from jaxpar.pipeline.tables.library import LIBRARY, schedule
from jaxpar.pipeline.tables.schedule import Schedule

RECOMPUTES = {
    # remat: shares of a layer's forward that the backward pass computes again:
    # matmuls with weights, matmuls of attention, its softmax, elementwise ops, collectives of the tensor axis; where
    # attention's matmuls are made again, the context axis gathers again for them
    "none": (0.0, 0.0, 0.0, 0.0, 0.0),
    "all_dots": (0.0, 0.0, 1.0, 1.0, 0.0),
    "dots": (0.0, 1.0, 1.0, 1.0, 0.0),
    "selective": (0.0, 1.0, 1.0, 0.0, 0.0),
    "op": (0.5, 0.0, 0.0, 1.0, 0.0),
    "full": (1.0, 1.0, 1.0, 1.0, 1.0),
    "offload": (1.0, 1.0, 1.0, 1.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its schedule. Each field is one value, or an array with one for each of many candidates.

    Attributes:
      pipe: Stages of the pipeline.
      data: Replicas of the parameters.
      fsdp: Devices that share what `zero` says.
      context: Devices that share each sequence.
      tensor: Devices that share each matrix.
      zero: What fsdp shards: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
      context_by: How pieces of sequences meet: gather, ring or ulysses, as `jaxpar.Parallel` has it.
      ulysses: Devices of the context axis that exchange heads; all of them where context_by is ulysses.
      zero_context: Whether the devices of context share what `zero` says, with those of fsdp.
      sequence: Whether the tensor axis shards the stream between blocks as well (sequence parallelism).
      schedule: One of `jaxpar.pipeline.tables.library.LIBRARY`.
      chunks: Parts of the model on each stage.
      microbatch: Rows of one microbatch on one replica.
      microbatches: Microbatches of a step.
      remat: What is computed again: none, all_dots, dots, full, offload as in jaxpar.models.remat; selective: attention
        between its projections (Korthikanti et al. 2022, arXiv:2205.05198, section 5); op: every other matmul with
        weights, and elementwise ops (torchtitan's selective checkpointing by operation).
      head: Where a pipeline runs embedding and head, as `jaxpar.Pipeline` has it: last, or spread over the stages.
      axes: Sizes of further axes, of techniques that are added to jaxpar's own, as `jaxpar.Parallel` has them.
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
    axes: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a mapping has none

    def __post_init__(self):
        problems = [
            Problem(f"axes={{{axis!r}: ...}}", "axes has sizes of further axes of a mesh", nearest(str(axis), AXES))
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
        for key, known in (
            ("schedule", LIBRARY),
            ("remat", RECOMPUTES),
            ("head", ("last", "spread")),
            ("context_by", ("gather", "ring", "ulysses")),
        ):
            words = np.asarray(getattr(self, key))
            if sum(np.count_nonzero(words == word) for word in known) == words.size:  # a sort takes ten times as long
                continue
            for word in set(np.unique(words).tolist()) - set(known):
                problems.append(Problem(f"{key}={word!r}", f"a {key} that has a name", nearest(str(word), known)))
        if problems:
            raise JaxparError(*problems)

    @property
    def sizes(self) -> dict[str, Any]:
        """Mesh axis to size, outermost first."""
        own = {axis: getattr(self, axis) for axis in DECLARED} | dict(self.axes)
        return {axis: own[axis] for axis in AXES if axis in own}

    def size(self, axis: str) -> Any:
        """Returns the size of an axis; 1 where the layout has none of that name."""
        return self.sizes.get(axis, 1)

    def stride(self, axis: str) -> Any:
        """Returns how many devices lie between neighbours along an axis: the product of all that lie inside of it."""
        names = [*AXES]
        return math.prod(self.size(inner) for inner in names[names.index(axis) + 1 :])

    def mapped(self, change: Callable[[Any], Any]) -> "Candidate":
        """Returns it with every field, and the size of every further axis, changed in the same way: entries are picked.

        They were checked when it was made, and are not again.
        """
        made = object.__new__(Candidate)
        for each in fields(self):
            if each.name != "axes":
                object.__setattr__(made, each.name, change(getattr(self, each.name)))
        object.__setattr__(made, "axes", {axis: change(size) for axis, size in self.axes.items()})
        return made

    @property
    def devices(self) -> Any:
        """Devices all axes together need."""
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> Any:
        """Devices that share what `zero` says."""
        return np.multiply(self.fsdp, np.where(self.zero_context, self.context, 1))

    @property
    def replicas(self) -> Any:
        """Groups of devices that each see other examples."""
        return math.prod(self.size(axis) for axis in batch_axes())

    @property
    def rows(self) -> Any:
        """Rows of a step on all replicas."""
        return self.microbatch * self.microbatches * self.replicas

    def layers(self, count: int) -> Any:
        """Returns how many of so many layers the fullest part holds."""
        return -(-count // (self.pipe * self.chunks))

    @cached_property
    def phased(self) -> Any:
        """Whether a tick of the schedule has one kind of op on all stages."""
        return self._of_schedules(lambda table: table.phased)

    @cached_property
    def split(self) -> Any:
        """Whether the schedule runs the gradients of weights apart from those of inputs."""
        return self._of_schedules(lambda table: table.split)

    @cached_property
    def forwards_first(self) -> Any:
        """Whether all forwards of the schedule come before its first backward, however many microbatches there are."""
        return self._of_schedules(lambda table: table.peak[0] == table.microbatches * table.chunks)

    def _of_schedules(self, true: Callable[[Schedule], bool]) -> np.ndarray:
        """Returns whether something is true of each candidate's schedule."""
        names, found = np.asarray(self.schedule), np.zeros(np.shape(self.schedule), bool)
        for name in LIBRARY:
            if (these := names == name).any() and true(_table_of(name)):
                found = found | these
        return found

    @property
    def sharing(self) -> Any:
        """Stages that share the embedding and the head."""
        return np.where(np.asarray(self.head) == "spread", self.pipe, 1)

    @cached_property
    def recomputed(self) -> tuple[Any, ...]:
        """The five shares of `RECOMPUTES` that hold for `remat`.

        Over gathered keys attention's first matmul is one that no remat sees, so all_dots makes it again.
        """
        remat = np.asarray(self.remat)
        which = [remat == name for name in RECOMPUTES]
        found = [np.select(which, [shares[i] for shares in RECOMPUTES.values()]) for i in range(5)]
        found[1] = np.where((remat == "all_dots") & np.greater(self.context, 1), 0.5, found[1])
        # of what travels, forward and backward are one function each: no policy sees matmuls in them
        whole = np.isin(remat, ("all_dots", "dots")) & np.not_equal(self.context_by, "gather")
        found[1], found[2] = (np.where(whole, 1.0, share) for share in found[1:3])
        return tuple(found)


@cache
def _table_of(name: str) -> Schedule:
    """Returns a table of a schedule of the library, on some stages and microbatches."""
    stages = 2
    return schedule(name, stages=stages, microbatches=max(4, LIBRARY[name].least(stages)))
