"""Weights & Biases. `WANDB_MODE=offline` writes to RUN/wandb, and `wandb sync RUN/wandb/offline-run-*` uploads it.

A resumed run keeps its id, which is in RUN/loggers.json. wandb cannot change steps that it has, so:

offline   each start writes all rows from the first one to a new offline folder, and renames the folders before it to
          `earlier-…`: `wandb sync` replaces a run of the same id by the newest upload and would not join the parts
online    wandb's `resume` continues the run, and only rows that the server does not have are sent. After a rollback, or
          with other settings, a new run with a new id begins, and gets all rows from the first one
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jaxpar.train.loggers.base import LoggedRun, load_ids, new_id, save_id

NAME = "wandb"


class WeightsAndBiases:
    """Writes to a run of wandb; `WANDB_PROJECT` is its project, `jaxpar` by default."""

    def __init__(self):
        self._run: Any = None
        self._last = 0  # the last step that wandb has already

    def begin(self, run: LoggedRun) -> None:
        """Opens the run, and sends it all rows that it lacks."""
        wandb = import_module("wandb")
        self.close()
        ids = load_ids(run, NAME)
        settings = wandb.Settings(console="off", silent=True)
        is_offline = os.environ.get("WANDB_MODE", settings.mode) in ("offline", "dryrun")
        if is_offline:
            _set_aside(run)
        if not ids or not (run.repeats or is_offline):
            ids = [save_id(run, NAME, new_id())]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxpar"), id=ids[-1], name=run.name, dir=str(run.folder),
            config=dict(run.config) | dict(run.texts), settings=settings,
            resume=None if is_offline else "allow", allow_val_change=True,
        )  # fmt: skip
        self._last = 0 if is_offline else self._run.starting_step - 1
        for step, values in run.rows():
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends the values of a step, unless wandb has it."""
        if step > self._last:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finishes the run of wandb."""
        if self._run is not None:
            self._run.finish()


def _set_aside(run: LoggedRun) -> None:
    for folder in sorted((run.folder / "wandb").glob("offline-run-*")):
        folder.rename(folder.with_name(f"earlier-{folder.name}"))
