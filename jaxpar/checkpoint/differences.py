"""Compares the arrays of a checkpoint with those that a job needs, before anything is read: by path.

Every difference is of one kind: shape, dtype, missing or unexpected, of a part of the state. `problems` folds them: a
model of another width differs in every array, and a user reads one line about it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxpar.checkpoint.manifest import Array
from jaxpar.errors import Problem

PARTS = {
    "params": "parameter",
    "optimizer": "array of the optimizer",
    "model_state": "array of the model state",
    "exchange": "array of the exchange",
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One array that is not the same in two places.

    Attributes:
      path: Such as `params/blocks/mlp/up`.
      kind: shape, dtype, missing (in the first) or unexpected (not in the second).
      was: In the first, the checkpoint; None if it is not there.
      now: In the second, the job; None if it is not there.
    """

    path: str
    kind: Literal["shape", "dtype", "missing", "unexpected"]
    was: Array | None
    now: Array | None

    @property
    def part(self) -> str:
        """The part of the state it belongs to: params, optimizer, model_state, exchange or step."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """The path as a user knows it: parameters without `params/`."""
        return self.path.removeprefix("params/")

    def describe(self, first: str = "the checkpoint", second: str = "the job") -> str:
        """Returns the difference in words."""
        if self.was is None or self.now is None:
            here, there = (second, first) if self.was is None else (first, second)
            return f"{self.name} is in {here} and not in {there}"
        if self.kind == "shape":
            return f"{self.name} is {list(self.was.shape)} in {first}, {list(self.now.shape)} in {second}"
        return f"{self.name} is {self.was.dtype} in {first}, {self.now.dtype} in {second}"


def differences(saved: Mapping[str, Array], wanted: Mapping[str, Array]) -> list[Difference]:
    """Returns every difference, parameters first, by path; none where one can be read as the other."""
    found = []
    for path in sorted(saved.keys() | wanted.keys(), key=lambda path: (not path.startswith("params/"), path)):
        was, now = saved.get(path), wanted.get(path)
        if was is None or now is None:
            found.append(Difference(path=path, kind="missing" if was is None else "unexpected", was=was, now=now))
        elif _is_old_key(was, now) or (was.shape, was.dtype) == (now.shape, now.dtype):
            continue
        else:
            found.append(Difference(path=path, kind="dtype" if was.shape == now.shape else "shape", was=was, now=now))
    return found


def problems(found: list[Difference], run: str) -> list[Problem]:
    """Returns the differences as problems: one per cause, with the name of its first array.

    Args:
      found: The differences between a checkpoint and a job.
      run: The name of the checkpoint on the command line.
    """
    if replicas := _replicas(found):
        return [replicas]
    model = [each for each in found if each.part == "params"]
    # the optimizer keeps copies of parameters: where those differ, its own say nothing new
    followed = tuple(f"/{each.name}" for each in model)
    chain = [each for each in found if each.part == "optimizer" and not each.path.endswith(followed)]
    model_state = [each for each in found if each.part not in ("params", "optimizer", "exchange")]
    exchange = [each for each in found if each.part == "exchange"]
    made = []
    for part, those in (
        ("params", model),
        ("model_state", model_state),
        ("exchange", exchange),
        ("optimizer", [e for e in chain if e.was and e.now]),
    ):
        for kind in ("missing", "unexpected", "shape", "dtype"):
            if some := [each for each in those if each.kind == kind]:
                made.append(_problem(part, kind, some, run))
    if other := [each for each in chain if not (each.was and each.now)]:
        made.append(_optimizer(other, run))
    return made


def _replicas(found: list[Difference]) -> Problem | None:
    """Returns one problem where parameters are of other replicas: they differ, so that none stands for the others."""
    pairs = [(each.was.shape, each.now.shape) for each in found if each.part == "params" and each.was and each.now]
    counts = {(_ahead(was, now), _ahead(now, was)) for was, now in pairs}
    if len(counts) != 1 or counts == {(0, 0)}:
        return None
    ((was, now),) = counts
    first, second = (f"{count} replicas that differ" if count else "one set of parameters" for count in (was, now))
    return Problem(
        f"the checkpoint holds {first}, the job {second}",
        "replicas go on as they were: their parameters are not averaged, nor copied, when they are restored",
        "the exchange and the size of data that the run began with, or another run.dir",
    )


def _ahead(shape: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Returns the size of a first dim that a shape has more than another, or instead of another's; else 0."""
    more = len(shape) > len(other) and shape[1:] == other
    return shape[0] if more else 0


def _problem(part: str, kind: str, some: list[Difference], run: str) -> Problem:
    more = f", and {len(some) - 1} more {_plural(PARTS.get(part, 'array'), len(some) - 1)} like it" if some[1:] else ""
    fix = {
        "dtype": f"the dtype that was trained; or a new run from it: checkpoint.start_from = {run!r}, cast = true",
        "shape": "the model that was trained, or another run.dir",
    }.get(kind, f"the model that was trained, or another run.dir; all of them: jaxpar checkpoint diff {run} JOB")
    return Problem(some[0].describe() + more, "a checkpoint holds the arrays that the job needs", fix)


def _optimizer(some: list[Difference], run: str) -> Problem:
    """Returns one problem for another optimizer: its chain is a tree of its own, so most of it differs at once."""
    here = [each for each in some if each.was is not None]
    there = [each for each in some if each.now is not None]
    shown = " and ".join(
        f"{those[0].name} ({len(those)} {_plural('array', len(those))}) in the {where}"
        for those, where in ((here, "checkpoint"), (there, "job"))
        if those
    )
    return Problem(
        f"another optimizer: {shown}",
        "a run is resumed with the optimizer that it began with",
        f"the optimizer that was trained, or another run.dir with checkpoint.start_from = {run!r}",
    )


def _plural(word: str, count: int) -> str:
    head, of, tail = word.partition(" of ")
    return word if count == 1 else f"{head}s{of}{tail}"


def _is_old_key(was: Array, now: Array) -> bool:
    """Whether a key for random numbers was listed as the numbers it consists of, as Orbax does."""
    return now.dtype.startswith("key<") and was.dtype == "uint32" and was.shape[:-1] == now.shape
