"""Which checkpoints of a run are retained: the latest, and the best by a score of the evaluation."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxpar.checkpoint import listing, manifest
from jaxpar.checkpoint.spec import Checkpoints
from jaxpar.errors import JaxparError


def read_scores(folder: Path, step: int) -> dict[str, float]:
    """Scores of a checkpoint; empty if its MANIFEST is lost."""
    try:
        return manifest.read(folder / listing.name_of(step)).scores
    except JaxparError:
        return {}


def rank(folder: Path, steps: Sequence[int], spec: Checkpoints) -> list[tuple[float, int]]:
    """Returns (key, step) of the checkpoints that have the score `spec.best`; the best has the lowest key."""
    sign = 1 if spec.best_is == "lowest" else -1
    scores = [(read_scores(folder, step).get(spec.best), step) for step in steps]
    return [(sign * score, step) for score, step in scores if score is not None]


def delete_old(folder: Path, spec: Checkpoints) -> None:
    """Deletes the checkpoints that are not retained."""
    steps = listing.steps(folder)
    retained = set(steps[-spec.keep_last :])
    if spec.keep_best:
        retained |= {step for _, step in sorted(rank(folder, steps, spec))[: spec.keep_best]}
    for step in steps:
        if step not in retained:
            path = folder / listing.name_of(step)
            # renamed first: deleting takes time, and a kill in the middle of it must not leave half a checkpoint
            shutil.rmtree(path.rename(path.with_name(path.name + listing.DELETED)))
