"""Collectives that bring an array from one state to another, over one mesh axis or two, and their seconds.

A state has an entry for each axis: the class of pieces along which the axis cuts the array, a partial sum, or None if
its devices have equal copies. Both axes may cut one dim: the first, which is outermost in the mesh, into chunks, and
the second each chunk. An array changes its state by one axis at a time, in the order that takes least time: a gather
over the slower link comes first, while the other axis still cuts the array. From or to a dim that both axes cut XLA
exchanges no shards between dims, but for those of the inner axis alone: it gathers the array and slices it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

PARTIAL = "partial sum"
State = int | str | None  # over one axis: a class of pieces, a partial sum, or None: whole
States = tuple[State, ...]  # over each axis


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of the work and the traffic of one device.

    Attributes:
      flops: FLOP per second of matmuls.
      link: Bytes per second over the axis, or over each of two.
      launch: Seconds of a collective before its first byte.
      memory: Bytes per second of device memory.
      parameter: Seconds per element of a parameter for its update, and for its gathers and sums over other axes.
      state: Bytes per element of a parameter of parameters, gradients and optimizer state.
    """

    flops: float
    link: float | tuple[float, ...]
    launch: float
    memory: float
    parameter: float
    state: float = 16.0

    @property
    def links(self) -> tuple[float, ...]:
        """Bytes per second over each axis."""
        return self.link if isinstance(self.link, tuple) else (self.link,)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Equal collectives of a step over an axis.

    Attributes:
      axis: Number of the axis.
      kind: all-gather, reduce-scatter, all-reduce or all-to-all.
      bytes: Bytes that a device sends in one.
      times: Number of them in a step.
      of_examples: Whether the array has a dim of examples, so that the bytes depend on their number.
    """

    axis: int = 0
    kind: str
    bytes: float
    times: float
    of_examples: bool


@dataclass(frozen=True, kw_only=True)
class Move:
    """A collective over one axis, which changes the state of an array there.

    Attributes:
      axis: Number of the axis.
      kind: all-gather, reduce-scatter, all-reduce or all-to-all.
      bytes: Bytes that a device sends.
      source: States before.
      target: States after.
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
    """The axes' sizes, and the seconds of their collectives."""

    def __init__(self, sizes: Sequence[int], costs: StepCosts):
        self.sizes, self.costs = tuple(sizes), costs
        self.moves = lru_cache(maxsize=None)(self._moves)

    def seconds(self, axis: int, sent: float) -> float:
        """Returns the seconds of a collective over an axis in which a device sends so many bytes."""
        return sent / self.costs.links[axis] + self.costs.launch

    def _moves(self, size: float, source: States, target: States, merged: bool) -> tuple[Move, ...]:
        """Returns the collectives that bring an array of `size` bytes from one state to another; slices are none.

        An exchange all to all from or to a dim that a reshape merged with another is a gather in XLA.
        """
        changed = [axis for axis, pair in enumerate(zip(source, target, strict=True)) if pair[0] != pair[1]]
        if not changed or not size:
            return ()
        orders = [[(axis, target[axis]) for axis in order] for order in permutations(changed)]
        paths = [path for order in orders if (path := self._path(size, source, order, merged)) is not None]
        if _is_twice_cut(source) or _is_twice_cut(target):
            exchanged = changed != [1]
            paths = [path for path in paths if not (exchanged and any(move.kind == "all-to-all" for move in path))]
        if not paths:  # XLA makes the array whole, and slices it
            detours = [[*((axis, None) for axis in order), *enumerate(target)] for order in permutations((0, 1))]
            paths = [path for detour in detours if (path := self._path(size, source, detour, merged)) is not None]
        best, *others = paths
        for path in others:
            if self._total(path) < self._total(best) * (1 - 1e-9):
                best = path
        return tuple(best)

    def _total(self, path: Sequence[Move]) -> float:
        return sum(self.seconds(move.axis, move.bytes) for move in path)

    def _path(
        self, size: float, source: States, changes: Sequence[tuple[int, State]], merged: bool
    ) -> list[Move] | None:
        """Returns the collectives for changes one after the other; None if the chunks of a dim were to change places.

        The devices of the outer axis have neighbouring chunks of a dim only if the inner axis does not cut it.
        """
        path, states = [], source
        for axis, after in changes:
            before, others = states[axis], [(other, state) for other, state in enumerate(states) if other != axis]
            if axis == 0 and any(is_cut(state) and state in (before, after) for _, state in others):
                return None
            local = size
            for other, state in others:
                # of sums over both axes, the second is one of the first's shards
                of_shards = state is None and source[other] == before == PARTIAL and after is None
                if is_cut(state) or of_shards:
                    local /= self.sizes[other]
            kind, sent = self._collective(axis, local, before, after, merged)
            result = (*states[:axis], after, *states[axis + 1 :])
            if kind:
                path.append(Move(axis=axis, kind=kind, bytes=sent, source=states, target=result))
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
