"""Digests: the state of many processes, in a fixed size that does not grow with their number.

    digest of one process      digest of another
              └──────── merge ────────┘           in any order and grouping, so a tree of processes can add them up

`judge` needs the most silent process, the processes at the lowest place, and the number of processes ahead of them.
Each of these is a minimum, a maximum or a sum, with a few names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

# both limits keep digests small, so that a tree of thousands of processes can add them up
NAMES = 4  # processes named in a message; the others are only counted
VALUES = 4  # distinct values per fact; the processes with other values are counted together


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroup:
    """A group of processes: the slowest ones, which have begun the fewest activities, or all others.

    Attributes:
      place: The lowest number of activities that a process of the group has begun.
      count: Number of processes.
      stuck: Seconds since the last process of the group began its activity.
      names: Names of the first few processes.
      doing: Activity of the first process.
      activity: `doing` with the step.
    """

    place: int
    count: int
    stuck: float
    names: tuple[str, ...]
    doing: str
    activity: str

    def __add__(self, other: "ProcessGroup") -> "ProcessGroup":
        # the minimum of `stuck`, because `judge` needs the time that all processes of the group have waited
        return ProcessGroup(
            place=min(self.place, other.place), count=self.count + other.count, stuck=min(self.stuck, other.stuck),
            names=(self.names + other.names)[:NAMES], doing=self.doing, activity=self.activity,
        )  # fmt: skip

    def __str__(self) -> str:
        more = f" and {self.count - len(self.names)} more" if self.count > len(self.names) else ""
        return ", ".join(self.names) + more


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """The state of several processes. The defaults describe an empty set of processes.

    Attributes:
      failed: The lowest process that failed, and its reason; or None.
      silent: Seconds, name and activity of the process with the longest silence; None if all have ended.
      late: The running processes at the lowest place.
      ahead: All other running processes.
      longest: The longest time that a process has taken for each activity, in seconds.
      facts: `COUNT:HASH` of the last stated fact to the number of processes that stated it, and the first of them.
      stop: A signal that one of the processes got, or "".
      holding: Number of processes that have promised a `hold` or have ended.
      hold: The highest step that one of the processes has promised not to pass.
    """

    failed: tuple[int, str] | None = None
    silent: tuple[float, str, str] | None = None
    late: ProcessGroup | None = None
    ahead: ProcessGroup | None = None
    longest: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    stop: str = ""
    holding: int = 0
    hold: int = 0

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Digest":
        """Builds a digest from a decoded JSON object."""
        groups = {
            name: group and ProcessGroup(**group | {"names": tuple(group["names"])})
            for name, group in ((name, fields[name]) for name in ("late", "ahead"))
        }
        facts = {value: (count, tuple(first)) for value, (count, first) in fields["facts"].items()}
        ends = {name: None if fields[name] is None else tuple(fields[name]) for name in ("failed", "silent")}
        return cls(**{**fields, **groups, **ends, "facts": facts})

    def __add__(self, other: "Digest") -> "Digest":
        late, ahead = _late_and_ahead(self, other)
        # associative and commutative except for the choice of names: decisions do not depend on the shape of the tree
        return Digest(
            failed=_minimum(self.failed, other.failed),
            silent=self.silent if self.silent and not (other.silent and other.silent > self.silent) else other.silent,
            late=late,
            ahead=ahead,
            longest=self.longest if self.longest == other.longest else _maxima(self.longest, other.longest),
            facts=_count_values(self.facts, other.facts) if self.facts and other.facts else self.facts or other.facts,
            stop=self.stop or other.stop,
            holding=self.holding + other.holding,
            hold=max(self.hold, other.hold),
        )

    def fact_counts(self, index: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Maps the hash of each value of a fact to the number of processes that stated it, and the first of them."""
        return {
            value.partition(":")[2]: counts for value, counts in self.facts.items() if value.startswith(f"{index}:")
        }


def merge(digests: Iterable[Digest]) -> Digest:
    """Returns the sum of digests."""
    iterator = iter(digests)
    return reduce(Digest.__add__, iterator, next(iterator, Digest()))


def _late_and_ahead(one: Digest, other: Digest) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Returns the processes of both digests that are at the lowest place, and the processes ahead of them."""
    if one.late is None or other.late is None:
        nonempty = other if one.late is None else one
        return nonempty.late, nonempty.ahead
    if one.late.place == other.late.place:
        return one.late + other.late, _union(one.ahead, other.ahead)
    if one.late.place < other.late.place:
        return one.late, _union(_union(one.ahead, other.late), other.ahead)
    return other.late, _union(_union(one.late, one.ahead), other.ahead)


def _union(one: ProcessGroup | None, other: ProcessGroup | None) -> ProcessGroup | None:
    return one + other if one and other else one or other


def _minimum(one: tuple[int, str] | None, other: tuple[int, str] | None) -> tuple[int, str] | None:
    return min(one, other) if one and other else one or other


def _maxima(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
    return {**one, **{what: max(seconds, one.get(what, 0.0)) for what, seconds in other.items()}}


def _count_values(one: Mapping, other: Mapping) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """Counts the processes per stated value; rare values are counted together."""
    # if every process stated its own value (by mistake, e.g. a PRNG seed), digests would grow with the process count
    merged = dict(one)
    for value, (count, first) in other.items():
        previous = merged.get(value, (0, ()))
        merged[value] = (previous[0] + count, (previous[1] + tuple(first))[:NAMES])
    for index in {value.partition(":")[0] for value in merged}:
        ranked = sorted(
            (value for value in merged if value.startswith(f"{index}:")), key=lambda value: -merged[value][0]
        )
        for value in ranked[VALUES:]:
            count, first = merged.pop(value)
            others = merged.get(f"{index}:others", (0, ()))
            merged[f"{index}:others"] = (others[0] + count, (others[1] + first)[:NAMES])
    return merged
