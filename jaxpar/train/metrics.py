"""What a run says of itself: a line of JSON per step, and optionally TensorBoard."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse, within

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
        try:
            rows = [(line, row) for line in self._lines() if (row := json.loads(line))["step"] <= start]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise refuse(
                f"{self.path} is damaged: {error}",
                rule="each line is a JSON object with a step",
                fix=f"mv {self.path} {self.path}.damaged",
            ) from error
        self.recent = [row for _, row in rows[-RECENT:]]
        self.skipped = sum(bool(row.get("skipped")) for _, row in rows)
        self._file: Any = None
        self._board: Any = None
        if not self._writes:
            return
        part = self.path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line, _ in rows))
        part.replace(self.path)
        self._file = self.path.open("a", buffering=1)
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
        """Writes one row; `step` is one of its keys. What is not finite is null, as JSON knows no nan."""
        if self._file is None:
            return
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self._file.write(json.dumps(row) + "\n")
        if self._board is not None:
            for key, value in row.items():
                if key != "step" and value is not None:
                    self._board.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """Flushes and closes the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _lines(self) -> list[str]:
        """Returns the whole lines that are there; a line cut off by a crash is none."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
