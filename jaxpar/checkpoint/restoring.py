"""Loads the checkpoint of a step or the newest good one, and says what is wrong with the damaged ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxpar.checkpoint import listing, processes, reading, saved_replicas
from jaxpar.errors import JaxparError, Problem, refuse

NONE = -1  # broadcast in place of a step by processes whose value is ignored


def candidates(folder: Path, step: int | None) -> Iterator[int]:
    """Yields the steps to try, newest first, from the first process, whose view of the folder is up to date."""
    available = listing.steps(folder)
    steps = available[::-1] if step is None else [step] if step in available else []
    for index in range(processes.broadcast(len(steps))):
        yield processes.broadcast(steps[index] if processes.is_first() else NONE)


def load(
    folder: Path, step: int, like: Any, *, replicas: Literal["same", "mean", "broadcast"]
) -> tuple[dict[str, Any], str]:
    """Loads the arrays of a checkpoint by path; returns them and a note for the user.

    Args:
      folder: The folder of the checkpoints.
      step: Its step.
      like: As for `Store.restore`.
      replicas: How replicas resume under another number of them: see `Checkpoints`.

    Raises:
      DamagedCheckpoint: If it is damaged.
      JaxparError: If it does not fit.
    """
    path = folder / listing.name_of(step)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    contents = reading.read_manifest(path)
    arrays, note = saved_replicas.read(path, contents, like, how=replicas, run=str(run))
    saved = arrays.get("step")
    if saved is not None and not saved.shape and int(saved) != step:
        raise reading.DamagedCheckpoint(path, [f"its state is of step {int(saved)}"])
    return arrays, note


def damage(folder: Path, damaged: Mapping[int, list[str]]) -> list[Problem]:
    """Returns the problem of each damaged step, given its faults."""
    available, result = listing.steps(folder), []
    for step, faults in damaged.items():
        others = ", ".join(str(number) for number in [other for other in available if other != step][-4:])
        listed = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")
        result.append(
            Problem(
                f"checkpoint {folder / listing.name_of(step)} is damaged: {listed}",
                "every byte has the hash that the MANIFEST lists, and the folder the name of its step",
                f"another step ({others})" if others else "train anew, in another run.dir",
            )
        )
    return result


def no_checkpoint_error(folder: Path, step: int | None) -> JaxparError:
    """Returns the error that a folder has no checkpoint, or none of a step."""
    return refuse(
        f"no {'good ' * (not step)}checkpoint {'' if step is None else f'of step {step} '}in {folder}",
        rule="a run is resumed from a checkpoint",
        fix="train it first: jaxpar train JOB",
    )
