"""Digests: the state of many processes, in a size that does not grow with their number.

    digest of one process      digest of another
              └──────── merge ────────┘           in any order, any grouping: a tree of processes adds them up

The judgement needs the most silent process, the processes at the lowest place, and how many are ahead of them: each of
these is a minimum, a maximum or a sum, with a few names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

# both bound the size of a digest, which is what lets a tree of thousands of processes add digests up
NAMES = 4  # processes that a message names; the others are counted
VALUES = 4  # values of one fact that are kept apart; the others are counted together


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroup:
    """Some processes: those at the lowest place, or all that are ahead of them.

    Attributes:
      place: The lowest number of activities that one of them has begun.
      count: Number of processes.
      stuck: Seconds since the last of them began its activity.
      names: Names of the first few.
      doing: Activity of the first.
      activity: The same with its step.
    """

    place: int
    count: int
    stuck: float
    names: tuple[str, ...]
    doing: str
    activity: str

    def __add__(self, other: "ProcessGroup") -> "ProcessGroup":
        # `stuck` is the least: all of them have waited for so long, which is what the judgement asks of a group
        return ProcessGroup(
            place=min(self.place, other.place), count=self.count + other.count, stuck=min(self.stuck, other.stuck),
            names=(self.names + other.names)[:NAMES], doing=self.doing, activity=self.activity,
        )  # fmt: skip

    def __str__(self) -> str:
        more = f" and {self.count - len(self.names)} more" if self.count > len(self.names) else ""
        return ", ".join(self.names) + more


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """The state of some processes. The default is that of none.

    Attributes:
      failed: The lowest process that failed, and its reason; or None.
      silent: The longest silence: seconds, name and activity; or None where all have ended.
      late: The processes at the lowest place, without those that have ended.
      ahead: All others, without those that have ended.
      longest: Activity to the most seconds that it took one of them.
      facts: `COUNT:HASH` of the last fact stated, to the number of processes that stated it and the first of them.
      stop: A signal that one of them got, or "".
      holding: How many have promised not to pass `hold`; those that have ended count.
      hold: The highest step after which one of them waits.
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
    def parse(cls, said: Mapping[str, Any]) -> "Digest":
        """Returns the digest in a decoded JSON object."""
        groups = {
            name: None if said[name] is None else ProcessGroup(**said[name] | {"names": tuple(said[name]["names"])})
            for name in ("late", "ahead")
        }
        facts = {value: (count, tuple(first)) for value, (count, first) in said["facts"].items()}
        ends = {name: None if said[name] is None else tuple(said[name]) for name in ("failed", "silent")}
        return cls(**{**said, **groups, **ends, "facts": facts})

    def __add__(self, other: "Digest") -> "Digest":
        late, ahead = _ordered(self, other)
        # associative and commutative up to the choice of names: however the tree groups processes, all get one verdict
        return Digest(
            failed=_least(self.failed, other.failed),
            silent=self.silent if self.silent and not (other.silent and other.silent > self.silent) else other.silent,
            late=late,
            ahead=ahead,
            longest=self.longest if self.longest == other.longest else _most(self.longest, other.longest),
            facts=_added(self.facts, other.facts) if self.facts and other.facts else self.facts or other.facts,
            stop=self.stop or other.stop,
            holding=self.holding + other.holding,
            hold=max(self.hold, other.hold),
        )

    def stated(self, index: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Returns the values of a fact: hash to the number of processes that stated it, and the first of them."""
        return {value.partition(":")[2]: found for value, found in self.facts.items() if value.startswith(f"{index}:")}


def merge(digests: Iterable[Digest]) -> Digest:
    """Returns the digest of all."""
    each = iter(digests)
    return reduce(Digest.__add__, each, next(each, Digest()))


def _ordered(one: Digest, other: Digest) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Returns the processes of both at the lowest place, and all others."""
    if one.late is None or other.late is None:
        known = other if one.late is None else one
        return known.late, known.ahead
    if one.late.place == other.late.place:
        return one.late + other.late, _both(one.ahead, other.ahead)
    if one.late.place < other.late.place:
        return one.late, _both(_both(one.ahead, other.late), other.ahead)
    return other.late, _both(_both(one.late, one.ahead), other.ahead)


def _both(one: ProcessGroup | None, other: ProcessGroup | None) -> ProcessGroup | None:
    return one + other if one and other else one or other


def _least(one: tuple[int, str] | None, other: tuple[int, str] | None) -> tuple[int, str] | None:
    return min(one, other) if one and other else one or other


def _most(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
    return {**one, **{what: max(seconds, one.get(what, 0.0)) for what, seconds in other.items()}}


def _added(one: Mapping, other: Mapping) -> Mapping[str, tuple[int, tuple[int, ...]]]:
    """Counts the processes per stated value; rare values are counted together."""
    # where every process states something else (a PRNG seed by mistake), a digest would grow with their number
    both = dict(one)
    for value, (count, first) in other.items():
        before = both.get(value, (0, ()))
        both[value] = (before[0] + count, (before[1] + tuple(first))[:NAMES])
    for index in {value.partition(":")[0] for value in both}:
        ranked = sorted((value for value in both if value.startswith(f"{index}:")), key=lambda value: -both[value][0])
        for value in ranked[VALUES:]:
            count, first = both.pop(value)
            rest = both.get(f"{index}:others", (0, ()))
            both[f"{index}:others"] = (rest[0] + count, (rest[1] + first)[:NAMES])
    return both
