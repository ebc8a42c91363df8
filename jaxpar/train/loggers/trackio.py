"""Trackio, in RUN/trackio, or in `TRACKIO_DIR` if it is set, so that several runs share a page.

    TRACKIO_DIR=RUN/trackio trackio show

Trackio writes twice a second, and a kill loses what is not written. So each start of a local run writes all rows anew,
from those of RUN/metrics.jsonl, and deletes what Trackio has of the run. In a Space or on a server
(`TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`) nothing can be deleted: there each start is a run of its own in the group of
the run folder, with all rows from the first one.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from jaxpar.train.loggers.base import LoggedRun, load_ids, new_id, save_id

NAME, PROJECT = "trackio", "jaxpar"
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """Writes to a run of Trackio, in the project `jaxpar`."""

    def __init__(self):
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Opens the run, and sends it all rows."""
        os.environ.setdefault("TRACKIO_DIR", str((run.folder / "trackio").resolve()))  # is read by the import
        with redirect_stdout(sys.stderr):  # where it prints
            trackio = import_module("trackio")
            self.close()
            ids = load_ids(run, NAME)
            if not ids or any(os.environ.get(name) for name in REMOTE):
                ids = [save_id(run, NAME, f"{run.name}-{new_id()}")]
            else:
                _delete(trackio, ids[-1])
            self._run = trackio.init(
                project=PROJECT, name=ids[-1], group=run.name, config=dict(run.config) | dict(run.texts), embed=False,
                auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip
        for step, values in run.rows():
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Queues the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Writes all that is queued."""
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()


def _delete(trackio: Any, name: str) -> None:
    try:
        runs = trackio.Api().runs(PROJECT)
    except ValueError:  # no project: the run was killed before Trackio wrote anything
        return
    for run in [run for run in runs if run.name == name]:
        run.delete()
