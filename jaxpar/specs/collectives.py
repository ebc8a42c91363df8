"""Collectives that reshard an array over one mesh axis or two, and their seconds.

The state of an array has an entry for each axis: the class of pieces along which the axis cuts (splits) the array, a
partial sum, or None if the array is replicated over the axis. Both axes may cut one dim: the first, which is outermost
in the mesh, into chunks, and the second each chunk. An array changes its state over one axis at a time, in the order
that takes least time: a gather over the slower link comes first, while the other axis still cuts the array. If both
axes cut a dim, XLA has an all-to-all between it and another dim only over the inner axis: else it gathers the array
and slices it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

PARTIAL = "partial sum"
State = int | str | None  # over one axis: the class of the pieces that it cuts, a partial sum, or None: replicated
States = tuple[State, ...]  # over each axis


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of the work and the traffic of one device.

    Attributes:
      flops: FLOP per second of matmuls.
      link: Bytes per second over the axis, or over each of two.
      launch: Seconds of a collective before its first byte.
      memory: Bytes per second of device memory.
      parameter: Seconds per element of a parameter for its update without ZeRO, and for the sum of its gradient over
        other axes.
      state: Bytes of an element of a parameter together with its gradient and optimizer state.
      replicas: Number of parts into which other axes split the examples.
    """

    flops: float
    link: float | tuple[float, ...]
    launch: float
    memory: float
    parameter: float
    state: float = 16.0
    replicas: int = 1

    @property
    def links(self) -> tuple[float, ...]:
        """Bytes per second over each axis."""
        return self.link if isinstance(self.link, tuple) else (self.link,)


@dataclass(frozen=True, kw_only=True)
class RepeatedCollective:
    """A collective over one axis that a step runs a number of times.

    Attributes:
      axis: Index of the axis.
      kind: all-gather, reduce-scatter, all-reduce or all-to-all.
      bytes: Bytes that a device sends each time.
      times: How often a step runs it.
      of_examples: Whether the array has a dim of examples: the bytes are then proportional to the number of examples.
      is_recomputed: Whether a step that recomputes activations runs it again in its backward pass.
      backward: Whether the backward pass runs it.
      iterations: Iterations of the loops around it.
    """

    axis: int = 0
    kind: str
    bytes: float
    times: float
    of_examples: bool
    is_recomputed: bool = False
    backward: bool = False
    iterations: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Resharding:
    """A collective over one axis that changes the state of an array.

    Attributes:
      axis: Index of the axis.
      kind: all-gather, reduce-scatter, all-reduce or all-to-all.
      bytes: Bytes that a device sends.
      source: The array's state on each axis before the collective.
      target: The array's state on each axis after the collective.
    """

    axis: int
    kind: str
    bytes: float
    source: States
    target: States


def is_cut(state: State) -> bool:
    """Whether an axis cuts an array of this state."""
    return state is not None and state != PARTIAL


def _is_twice_cut(states: States) -> bool:
    return len(states) > 1 and is_cut(states[0]) and states[0] == states[1]


class Links:
    """The axes' sizes and links, and the collectives that reshard arrays over them in the least time."""

    def __init__(self, sizes: Sequence[int], costs: StepCosts):
        self.sizes, self.costs = tuple(sizes), costs
        self.moves = lru_cache(maxsize=None)(self._moves)

    def seconds(self, axis: int, sent: float) -> float:
        """Returns the seconds of a collective over an axis in which a device sends this many bytes."""
        return sent / self.costs.links[axis] + self.costs.launch

    def _moves(self, size: float, source: States, target: States, merged: bool) -> tuple[Resharding, ...]:
        """Returns the collectives that reshard an array of `size` bytes; slicing a replicated array needs none.

        `merged` says that a reshape merged dims of the array into one: XLA then gathers in place of an all-to-all.
        """
        changed = [axis for axis, pair in enumerate(zip(source, target, strict=True)) if pair[0] != pair[1]]
        if not changed or not size:
            return ()
        orders = [[(axis, target[axis]) for axis in order] for order in permutations(changed)]
        paths = [path for order in orders if (path := self._path(size, source, order, merged)) is not None]
        if _is_twice_cut(source) or _is_twice_cut(target):
            exchanged = changed != [1]
            paths = [path for path in paths if not (exchanged and any(move.kind == "all-to-all" for move in path))]
        if not paths:  # XLA gathers the array over both axes, and slices it
            detours = [[*((axis, None) for axis in order), *enumerate(target)] for order in permutations((0, 1))]
            paths = [path for detour in detours if (path := self._path(size, source, detour, merged)) is not None]
        best, *others = paths
        for path in others:
            if self._total(path) < self._total(best) * (1 - 1e-9):
                best = path
        return tuple(best)

    def _total(self, path: Sequence[Resharding]) -> float:
        return sum(self.seconds(move.axis, move.bytes) for move in path)

    def _path(
        self, size: float, source: States, changes: Sequence[tuple[int, State]], merged: bool
    ) -> list[Resharding] | None:
        """Returns the collectives of a sequence of changes, each over one axis; None if a gather would permute chunks.

        A gather over the outer axis joins contiguous chunks of a dim only if the inner axis does not cut that dim.
        """
        path, states = [], source
        for axis, after in changes:
            before, others = states[axis], [(other, state) for other, state in enumerate(states) if other != axis]
            if axis == 0 and any(is_cut(state) and state in (before, after) for _, state in others):
                return None
            local = size
            for other, state in others:
                # of two all-reduces, one per axis, the second reduces only a shard of what the first reduced
                of_shards = state is None and source[other] == before == PARTIAL and after is None
                if is_cut(state) or of_shards:
                    local /= self.sizes[other]
            kind, sent = self._collective(axis, local, before, after, merged)
            result = (*states[:axis], after, *states[axis + 1 :])
            if kind:
                path.append(Resharding(axis=axis, kind=kind, bytes=sent, source=states, target=result))
            states = result
        return path

    def _collective(self, axis: int, size: float, before: State, after: State, merged: bool) -> tuple[str, float]:
        sent = (1 - 1 / self.sizes[axis]) * size
        if before == after or before is None:
            return "", 0.0
        if before == PARTIAL:
            return ("all-reduce", 2 * sent) if after is None else ("reduce-scatter", sent)
        if after is None or merged:
            return "all-gather", sent
        return "all-to-all", sent / self.sizes[axis]
