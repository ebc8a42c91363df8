"""What a run says of itself: a line of JSON per step, and optionally TensorBoard."""

import json
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import reading, refuse, within
from jaxpar.train.checkpoint.files import FULL, write_text

RECENT = 1024  # rows of an earlier run that are remembered


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is written down, and how often it is shown.

    Attributes:
      show_every: Steps between two lines on the terminal.
      tensorboard: Whether metrics also go to RUN/tensorboard.
    """

    show_every: int = 20
    tensorboard: bool = False

    def __post_init__(self):
        within(self, "metrics", {"show_every": (1, 2**31 - 1)})


class Log:
    """Writes `RUN/metrics.jsonl`; a resumed run takes back what came after its checkpoint.

    Args:
      folder: The run folder.
      spec: The `[metrics]` table.
      start: The step the run starts from; later lines of an earlier run are dropped.
      writes: Whether this process is the one that writes.

    Attributes:
      recent: The last rows of the earlier run.
      skipped: How many of all its steps were skipped.
    """

    def __init__(self, folder: Path, spec: Metrics, *, start: int, writes: bool = True):
        self.path, self._spec, self._writes = folder / "metrics.jsonl", spec, writes
        self._open(start)

    def rewind(self, step: int) -> None:
        """Takes back the rows after a step."""
        self.close()
        self._open(step)

    def _open(self, start: int) -> None:
        rule, fix = "each line is a JSON object with a step", f"mv {self.path} {self.path}.damaged"
        with reading(self.path, rule=rule, fix=fix, say=str):
            rows = [(line, row) for line in self._lines() if (row := json.loads(line))["step"] <= start]
        self.recent = [row for _, row in rows[-RECENT:]]
        self.skipped = sum(bool(row.get("skipped")) for _, row in rows)
        self._file: Any = None
        self._board: Any = None
        self._rows: list[str] = []  # that are not written yet: while the disk is full
        if not self._writes:
            return
        write_text(self.path, "".join(line + "\n" for line, _ in rows))
        self._file = self.path.open("ab", buffering=0)
        if self._spec.tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ModuleNotFoundError as error:
                raise refuse(
                    "metrics.tensorboard = true without tensorboardX",
                    rule="event files are written by tensorboardX",
                    fix="pip install 'jaxpar[tensorboard]'",
                ) from error
            self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=start + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row; `step` is one of its keys. What is not finite is null, as JSON knows no nan.

        While the disk is full, rows wait for the next one.
        """
        if self._file is None:
            return
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self._rows.append(json.dumps(row) + "\n")
        self._write()
        if self._board is not None:
            for key, value in row.items():
                if key != "step" and value is not None:
                    self._board.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """Flushes and closes the files; warns of rows that a full disk kept from them."""
        if self._file is None:
            return
        self._write()
        if self._rows:
            warnings.warn(f"{self.path}: the disk is full, {len(self._rows)} rows are not written", stacklevel=2)
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _write(self) -> None:
        """Writes the rows that wait, all of them or none: half a line would spoil the file for the next start."""
        text, begin = "".join(self._rows).encode(), self._file.seek(0, os.SEEK_END)
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._file.truncate(begin)
        else:
            self._rows.clear()

    def _lines(self) -> list[str]:
        """Returns the whole lines that are there; a line cut off by a crash is none."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
