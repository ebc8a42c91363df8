"""Metrics of a run: a line of JSON per step, and optionally TensorBoard."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, check_ranges, file_errors, refuse, user_code_errors
from jaxpar.files import FULL, write_text

RECENT = 1024  # rows of an earlier run that are remembered


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Settings of the metrics: how often they are shown, and where else they are written.

    Attributes:
      evaluate: What evaluations say beside the loss: accuracy, perplexity, bits_per_byte, or "package.module:function"
        of (model, batch) to (sum, count). accuracy makes all logits, and functions run the model once more.
      show_every: Steps between two lines on the terminal.
      noise_every: Steps between two measurements of the noise of gradients and updates, which end in a suggested
        batch; 0 measures none. Each takes a forward and a backward pass; losses stay the same.
      tensorboard: Whether metrics also go to RUN/tensorboard.
      loggers: Where they go besides: "package.module:object" each, with a method `log(step, values)`, and `close()` if
        it is to know the end; or a class or function that makes one.
    """

    evaluate: tuple[str, ...] = ()
    show_every: int = 20
    noise_every: int = 0
    tensorboard: bool = False
    loggers: tuple[str, ...] = ()

    def __post_init__(self):
        check_ranges(self, "metrics", {"show_every": (1, 2**31 - 1), "noise_every": (0, 2**31 - 1)})


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


class Log:
    """Writes `RUN/metrics.jsonl`; a resumed run removes the rows after its checkpoint.

    Args:
      folder: The run folder.
      spec: The `[metrics]` table.
      start: The step the run starts from; later lines of an earlier run are dropped.
      writes: Whether this process is the one that writes.
      loggers: Objects with `log(step, values)`, which are given what is written. One that raises is said, and training
        goes on: a server that is away is no reason to lose a run.
      say: Takes a line for the user: the first failure of a logger, and how many there were.

    Attributes:
      recent: The last rows of the earlier run.
      skipped: How many of all its steps were skipped.
      measured: The last row in which the noise of gradients was, or none.
      evaluated: The rows of all evaluations.
      missing: The first step up to the start that has no row, and how many have none; or None.
    """

    def __init__(
        self,
        folder: Path,
        spec: Metrics,
        *,
        start: int,
        writes: bool = True,
        loggers: Sequence[Any] = (),
        say: Callable[[str], None] = _warn,
    ):
        self.path, self._spec, self._writes, self._loggers = folder / "metrics.jsonl", spec, writes, loggers
        self._say, self._failures = say, [0] * len(loggers)
        self._open(start)
        if writes and self.missing:
            first, count = self.missing
            say(
                f"{self.path} has no row of {count} of the {start} steps before, the first of them step {first}: "
                "train.patience and checkpoint.keep_best forget their evaluations, faults.spike their losses, and "
                "steps of them that were skipped are not counted"
            )

    def rewind(self, step: int) -> None:
        """Removes the rows after a step; loggers stay open, and are given the steps after it again."""
        self._shut()
        self._open(step)

    def _open(self, start: int) -> None:
        rule, fix = "each line is a JSON object with a step", f"mv {self.path} {self.path}.damaged"
        with file_errors(self.path, rule=rule, fix=fix, say=str):
            rows = [(line, row) for line in self._lines() if (row := json.loads(line))["step"] <= start]
        self.recent = [row for _, row in rows[-RECENT:]]
        self.skipped = sum(bool(row.get("skipped")) for _, row in rows)
        self.measured = next((row for _, row in reversed(rows) if "noise_trace" in row), {})
        self.evaluated = [row for _, row in rows if is_evaluated(row)]
        there = {row["step"] for _, row in rows}
        first = next((step for step in range(1, start + 1) if step not in there), None)
        self.missing = None if first is None else (first, sum(step not in there for step in range(1, start + 1)))
        self._file: Any = None
        self._board: Any = None
        self._rows: list[str] = []  # that are not written yet: while the disk is full
        self._row: dict[str, Any] = rows[-1][1] if rows else {}  # the last one
        if not self._writes:
            return
        write_text(self.path, "".join(line + "\n" for line, _ in rows))
        self._file = self.path.open("r+b", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        self._begin = self._end - (len(rows[-1][0].encode()) + 1 if rows else 0)  # where that row is
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
        """Writes one row; `step` is one of its keys. Numbers that are not finite are null, as JSON has no NaN.

        While the disk is full, rows wait for the next one.
        """
        if self._file is None:
            return
        self._row = _plain(row)
        self._rows.append(_line(self._row))
        self._write()
        self._draw(self._row)

    def amend(self, more: Mapping[str, Any], *, step: int) -> None:
        """Adds metrics to the last row, which is of this step, with one write over it: a kill leaves a whole row."""
        if is_evaluated(more):  # a step that is evaluated again, as it was not scored, has waited once
            before = [row for row in self.evaluated if row["step"] != step]
            self.evaluated = [*before, {"step": step, **_plain(more)}]
        if self._file is None or not more or not self._row:
            return
        more = _plain(more)
        self._row = self._row | more
        if self._rows:
            self._rows[-1] = _line(self._row)
        else:
            self._rows, self._end = [_line(self._row)], self._begin
        self._write()
        self._draw(more)

    def close(self) -> None:
        """Flushes and closes the files, and the loggers; warns of rows that a full disk kept from the files."""
        self._shut()
        for i, each in enumerate(self._loggers):
            if hasattr(each, "close"):
                self._call(i, "close()", each.close)
            if self._failures[i] > 1:
                self._say(f"{type(each).__name__} raised {self._failures[i]} times")

    def _shut(self) -> None:
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
        lines = [line.encode() for line in self._rows]
        text = b"".join(lines)
        self._file.seek(self._end)
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._file.truncate(self._end)
        else:
            self._end = self._file.tell()
            self._begin = self._end - len(lines[-1]) if lines else self._begin
            self._rows.clear()

    def _draw(self, row: Mapping[str, Any]) -> None:
        step = self._row["step"]
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        for i, each in enumerate(self._loggers):
            self._call(i, f"log({step}, ...)", partial(each.log, step, dict(values)))
        if self._board is not None:
            for key, value in row.items():
                if key != "step" and value is not None:
                    self._board.add_scalar(key, value, self._row["step"])

    def _call(self, logger: int, what: str, call: Callable[[], Any]) -> None:
        """Calls a method of a logger; says its first failure."""
        try:
            with user_code_errors(
                f"{type(self._loggers[logger]).__name__}.{what}",
                rule="a logger takes each row: log(step, values)",
                fix="the line of the logger that this names",
            ):
                call()
        except JaxparError as error:
            self._failures[logger] += 1
            if self._failures[logger] == 1:
                self._say(f"{error.problems[0].got}; training goes on, {self.path} has all rows")

    def _lines(self) -> list[str]:
        """Returns the whole lines that are there; a line cut off by a crash is none."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with null for numbers that are not finite, as JSON has no NaN."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"


def is_evaluated(row: Mapping[str, Any]) -> bool:
    """Returns whether the row of a step has an evaluation."""
    return any(name.startswith("eval_") for name in row)
