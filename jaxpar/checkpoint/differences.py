"""Compares the arrays of a checkpoint with the arrays of a job, by path, before any array is read.

A difference has a kind (shape, dtype, missing or unexpected) and a part of the state. `problems` groups differences, so
that a user reads one line about a model of another width, although every array differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxpar.checkpoint.manifest import SavedArray
from jaxpar.errors import Problem

PARTS = {
    "params": "parameter",
    "optimizer": "array of the optimizer",
    "model_state": "array of the model state",
    "exchange": "array of the exchange",
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An array that differs between a checkpoint and a job (or two checkpoints).

    Attributes:
      path: Its path, such as `params/blocks/mlp/up`.
      kind: shape, dtype, missing (from the first) or unexpected (missing from the second).
      was: The array in the checkpoint (the first of two); None if it is missing there.
      now: The array in the job (or in the second checkpoint); None if it is missing there.
    """

    path: str
    kind: Literal["shape", "dtype", "missing", "unexpected"]
    was: SavedArray | None
    now: SavedArray | None

    @property
    def part(self) -> str:
        """The part of the state that it belongs to: params, optimizer, model_state, exchange or step."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """The path as a user knows it: parameters without `params/`."""
        return self.path.removeprefix("params/")

    def describe(self, first: str = "the checkpoint", second: str = "the job") -> str:
        """Describes the difference in a sentence."""
        if self.was is None or self.now is None:
            holder, lacking = (second, first) if self.was is None else (first, second)
            return f"{self.name} is in {holder} and not in {lacking}"
        if self.kind == "shape":
            return f"{self.name} is {list(self.was.shape)} in {first}, {list(self.now.shape)} in {second}"
        return f"{self.name} is {self.was.dtype} in {first}, {self.now.dtype} in {second}"


def differences(saved: Mapping[str, SavedArray], wanted: Mapping[str, SavedArray]) -> list[Difference]:
    """Returns every difference by path, parameters first; arrays that can be converted to each other are equal."""
    result = []
    for path in sorted(saved.keys() | wanted.keys(), key=lambda path: (not path.startswith("params/"), path)):
        was, now = saved.get(path), wanted.get(path)
        if was is None or now is None:
            result.append(Difference(path=path, kind="missing" if was is None else "unexpected", was=was, now=now))
        elif _is_old_key(was, now) or (was.shape, was.dtype) == (now.shape, now.dtype):
            continue
        else:
            result.append(Difference(path=path, kind="dtype" if was.shape == now.shape else "shape", was=was, now=now))
    return result


def problems(found: list[Difference], run: str) -> list[Problem]:
    """Groups differences into problems: one per cause, with the name of its first array.

    Args:
      found: The differences between a checkpoint and a job.
      run: The user's name of the checkpoint, for messages.
    """
    if replicas := _replicas(found):
        return [replicas]
    model = [item for item in found if item.part == "params"]
    # the optimizer state has copies of parameters: if these differ, the copies tell nothing new
    suffixes = tuple(f"/{item.name}" for item in model)
    chain = [item for item in found if item.part == "optimizer" and not item.path.endswith(suffixes)]
    model_state = [item for item in found if item.part not in ("params", "optimizer", "exchange")]
    exchange = [item for item in found if item.part == "exchange"]
    result = []
    for part, group in (
        ("params", model),
        ("model_state", model_state),
        ("exchange", exchange),
        ("optimizer", [pair for pair in chain if pair.was and pair.now]),
    ):
        for kind in ("missing", "unexpected", "shape", "dtype"):
            if matches := [item for item in group if item.kind == kind]:
                result.append(_problem(part, kind, matches, run))
    if optimizer_items := [item for item in chain if not (item.was and item.now)]:
        result.append(_optimizer(optimizer_items, run))
    return result


def _replicas(found: list[Difference]) -> Problem | None:
    """Returns a problem if checkpoint and job differ in the number of replicas that have parameters of their own."""
    pairs = [(item.was.shape, item.now.shape) for item in found if item.part == "params" and item.was and item.now]
    counts = {(_extra_dim(was, now), _extra_dim(now, was)) for was, now in pairs}
    if len(counts) != 1 or counts == {(0, 0)}:
        return None
    ((was, now),) = counts
    first, second = (f"{count} replicas that differ" if count else "one set of parameters" for count in (was, now))
    return Problem(
        f"the checkpoint holds {first}, the job {second}",
        "replicas are restored as they were saved: their parameters are neither averaged nor copied",
        "the exchange and the size of data that the run began with, or another run.dir",
    )


def _extra_dim(shape: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Returns the size of dim 0 of a shape if its other dims are another shape; else 0."""
    has_dim = len(shape) > len(other) and shape[1:] == other
    return shape[0] if has_dim else 0


def _problem(part: str, kind: str, some: list[Difference], run: str) -> Problem:
    tail = f", and {len(some) - 1} more {_plural(PARTS.get(part, 'array'), len(some) - 1)} like it" if some[1:] else ""
    fix = {
        "dtype": f"the dtype that was trained; or a new run from it: checkpoint.start_from = {run!r}, cast = true",
        "shape": "the model that was trained, or another run.dir",
    }.get(kind, f"the model that was trained, or another run.dir; all of them: jaxpar checkpoint diff {run} JOB")
    return Problem(some[0].describe() + tail, "a checkpoint holds the arrays that the job needs", fix)


def _optimizer(some: list[Difference], run: str) -> Problem:
    """Returns one problem for another optimizer, whose state is another tree, so that most of its arrays differ."""
    in_checkpoint = [item for item in some if item.was is not None]
    in_job = [item for item in some if item.now is not None]
    summary = " and ".join(
        f"{group[0].name} ({len(group)} {_plural('array', len(group))}) in the {where}"
        for group, where in ((in_checkpoint, "checkpoint"), (in_job, "job"))
        if group
    )
    return Problem(
        f"another optimizer: {summary}",
        "a run is resumed with the optimizer that it began with",
        f"the optimizer that was trained, or another run.dir with checkpoint.start_from = {run!r}",
    )


def _plural(word: str, count: int) -> str:
    head, separator, tail = word.partition(" of ")
    return word if count == 1 else f"{head}s{separator}{tail}"


def _is_old_key(was: SavedArray, now: SavedArray) -> bool:
    """Whether a PRNG key was saved as its uint32 words, as Orbax does."""
    return now.dtype.startswith("key<") and was.dtype == "uint32" and was.shape[:-1] == now.shape
