"""Checkpoints: written beside the training, committed at once, found again after a crash.

    RUN/checkpoints/000200/   what Orbax wrote, renamed into place when it was whole

Only this file knows Orbax: its v1 module still moves.
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import JaxparError, Problem, refuse, within
from jaxpar.sharding.names import path_of

# what Orbax and TensorStore raise where a file is missing, cut off or another
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written, and which are kept.

    Attributes:
      every: Steps between two; 0 writes one at the end only.
      keep_last: How many of the latest stay.
      keep_best: How many of those with the lowest eval_loss stay besides.
    """

    every: int = 0
    keep_last: int = 2
    keep_best: int = 0

    def __post_init__(self):
        within(self, "checkpoint", {"every": (0, 2**31 - 1), "keep_last": (1, 2**31 - 1), "keep_best": (0, 2**31 - 1)})


@dataclass
class Store:
    """The checkpoints of one run.

    Attributes:
      folder: Where they lie.
      spec: Which are kept.
    """

    folder: Path
    spec: Checkpoints
    _pending: tuple[int, Any] | None = field(default=None, init=False)

    def steps(self) -> list[int]:
        """Returns the steps of the committed checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(
            int(path.name) for path in self.folder.iterdir() if re.fullmatch("[0-9]{6,}", path.name) and path.is_dir()
        )

    def save(self, step: int, state: Any, scores: dict[str, float]) -> None:
        """Starts writing the state; returns as soon as its arrays are copied. Waits for the write before it."""
        from orbax.checkpoint import v1 as ocp

        self.wait()
        if step in self.steps():
            return
        make_folder(self.folder)
        # what is in flight must not alias buffers that the next step takes over
        jax.block_until_ready(state)
        self._pending = (
            step,
            ocp.save_async(self._path(step), _plain(state), custom_metadata={"step": step, **scores}),
        )

    def wait(self) -> None:
        """Waits until the last write is committed, then deletes what is not kept."""
        if self._pending is None:
            return
        self._pending[1].result()
        self._pending = None
        self._delete_old()

    def restore(self, like: Any, step: int | None = None) -> tuple[Any, int]:
        """Returns the state of a checkpoint, each array where `like` says, and its step.

        Args:
          like: The state as `jax.ShapeDtypeStruct`s with shardings.
          step: Which one; the latest by default.

        Raises:
          JaxparError: If there is none, or it does not fit: every difference by path.
        """
        from orbax.checkpoint import v1 as ocp

        step = self.steps()[-1] if step is None and self.steps() else step
        if step is None or step not in self.steps():
            raise refuse(
                f"no checkpoint {step or ''} in {self.folder}",
                rule="a run is resumed from a checkpoint",
                fix="train it first",
            )
        plain = _plain(like)
        try:
            saved = ocp.metadata(self._path(step)).metadata
            saved.keys()
        except UNREADABLE as error:
            raise self._damaged(step, error) from error
        if problems := _differences(
            saved["state"] if isinstance(saved, dict) and "state" in saved and "state" not in plain else saved, plain
        ):
            raise JaxparError(*problems)
        try:
            return _like(like, ocp.load(self._path(step), plain)), step
        except UNREADABLE as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> JaxparError:
        before = [other for other in self.steps() if other < step]
        return refuse(
            f"checkpoint {self._path(step)} cannot be read: {str(error).splitlines()[0]:.120}",
            rule="a checkpoint is as Orbax wrote it",
            fix=f"rm -r {self._path(step)}, " + (f"and go on from step {before[-1]}" if before else "and train anew"),
        )

    def scores(self, step: int) -> dict[str, float]:
        """Returns what was measured when a checkpoint was written."""
        from orbax.checkpoint import v1 as ocp

        found = ocp.metadata(self._path(step)).custom_metadata
        return {key: float(value) for key, value in found.items()} if isinstance(found, dict) else {}  # pyright: ignore

    def _path(self, step: int) -> str:
        return str((self.folder / f"{step:06d}").resolve())

    def _delete_old(self) -> None:
        steps = self.steps()
        kept = set(steps[-self.spec.keep_last :])
        if self.spec.keep_best:
            scored = [(score, step) for step in steps if (score := self.scores(step).get("eval_loss")) is not None]
            kept |= {step for _, step in sorted(scored)[: self.spec.keep_best]}
        for step in steps:
            if step not in kept:
                doomed = Path(self._path(step)).rename(self._path(step) + ".deleted")
                shutil.rmtree(doomed)


def make_folder(folder: Path) -> None:
    """Makes a folder of a run.

    Raises:
      JaxparError: If it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise refuse(
            f"run folder {folder!s:.200}: {getattr(error, 'strerror', None) or error}",
            rule="a run writes into a folder of its own",
            fix="run.dir = 'runs/mine'",
        ) from error


def _plain(state: Any) -> dict[str, Any]:
    """Returns a state as a flat dict of path to array: what a checkpoint holds depends on no Python class."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {path_of(keys).replace("/", "."): leaf for keys, leaf in flat}


def _like(like: Any, plain: dict[str, Any]) -> Any:
    flat, tree = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(tree, [plain[path_of(keys).replace("/", ".")] for keys, _ in flat])


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[Problem]:
    """Returns every difference between a checkpoint and the job, by path, before anything is read."""
    problems = []
    rule = "a checkpoint holds the arrays that the job needs"
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in saved:
            problems.append(
                Problem(f"{path} is not in the checkpoint", rule, "the job that was trained, or another run.dir")
            )
        elif path not in wanted:
            problems.append(
                Problem(
                    f"{path} is in the checkpoint and not in the job",
                    rule,
                    "the job that was trained, or another run.dir",
                )
            )
        elif not jnp.issubdtype(wanted[path].dtype, jax.dtypes.prng_key):
            was, now = tuple(saved[path].shape), tuple(wanted[path].shape)
            if was != now:
                problems.append(
                    Problem(
                        f"{path} is {list(was)} in the checkpoint, {list(now)} in the job",
                        rule,
                        "the model that was trained, or another run.dir",
                    )
                )
    return _few(problems)


def _few(problems: list[Problem]) -> list[Problem]:
    """Returns the first difference of each kind and how many more there are: the optimizer's follow the parameters'."""
    kinds: dict[str, list[Problem]] = {}
    for problem in sorted(problems, key=lambda problem: problem.got.startswith("optimizer.")):
        kinds.setdefault(problem.fix, []).append(problem)
    return [
        Problem(
            f"{some[0].got}" + (f", and {len(some) - 1} more like it" if some[1:] else ""), some[0].rule, some[0].fix
        )
        for some in kinds.values()
    ]


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2, default=str) + "\n")
    part.replace(path)
