"""TensorBoard's event files in RUN/tensorboard, by tensorboardX, which needs no TensorFlow.

    tensorboard --logdir RUN/tensorboard

Each start adds a file. Its first event tells readers to drop the steps of earlier files from the one that it goes on
from (`purge_step`). That step is written again, because the run may have been killed after its loss and before its
evaluation. Rows are written before the checkpoint of their step, so none is missing. A logger that is added to a run
later writes all rows.
"""

from collections.abc import Mapping
from typing import Any

from jaxpar.train.loggers.base import LoggedRun


class TensorBoard:
    """Writes event files."""

    def __init__(self):
        self._writer: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Begins an event file, which replaces the steps from `run.step` on."""
        from tensorboardX import SummaryWriter

        self.close()
        folder = run.folder / "tensorboard"
        number = len([*folder.glob("events.out.tfevents.*")])
        # files have the second in their names, by which readers sort them: the number tells two of a second apart
        self._writer = SummaryWriter(str(folder), purge_step=run.step or 1, filename_suffix=f".{number:06d}")
        for step, values in run.rows():
            if not number or step == run.step:
                self._add(step, values)
        texts = {**run.texts, "config": "\n".join(f"{key} = {value}" for key, value in run.config.items())}
        for name, text in texts.items():
            self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), run.step)
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values of a step to the disk."""
        self._add(step, values)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
