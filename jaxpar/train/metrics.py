"""Metrics of a run: one JSON line per step, which loggers get too."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpar.errors import check_ranges, file_errors
from jaxpar.files import FULL, write_text
from jaxpar.train.loggers.base import LoggedRun, LoggerCalls

RECENT = 1024  # rows that a resumed run keeps in memory
SAME = 1e-3  # relative difference of two losses of a step; another layout or batch order in bfloat16 differs by less


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The `[metrics]` table: which metrics a run computes, how often it prints them, and where it writes them.

    Attributes:
      evaluate: Evaluation metrics besides the loss: accuracy, perplexity, bits_per_byte, or "package.module:function"
        of (model, batch) to (sum, count). accuracy computes all logits; each function runs the model once more.
      show_every: Steps between two lines on the terminal.
      noise_every: Steps between two measurements of the noise of gradients and updates, from which the run suggests a
        batch size; 0 measures none. Each costs a forward and a backward pass and does not change the losses.
      loggers: Further destinations: tensorboard, wandb, mlflow, trackio, or "package.module:object", an object with a
        method `log(step, values)` and optionally `begin(run)` and `close()`, or a class or function that returns one.
    """

    evaluate: tuple[str, ...] = ()
    show_every: int = 20
    noise_every: int = 0
    loggers: tuple[str, ...] = ()

    def __post_init__(self):
        check_ranges(self, "metrics", {"show_every": (1, 2**31 - 1), "noise_every": (0, 2**31 - 1)})


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


class Log:
    """Writes `RUN/metrics.jsonl`; a resumed run removes the rows after its checkpoint.

    Args:
      folder: The run folder.
      start: The step that the run starts from; later rows in the file are deleted.
      writes: Whether this process writes the file.
      loggers: Objects with `log(step, values)`, called with each row, and optionally `begin(run)` and `close()`. If one
        raises, the run reports it and goes on: an unreachable logging server must not end a run.
      run: The run as loggers see it; None has neither configuration nor texts.
      say: Prints a line for the user: the first failure of a logger, and at the end the number of its failures.

    Attributes:
      recent: The newest rows up to `start`, at most `RECENT`.
      skipped: Number of skipped steps up to `start`.
      measured: The last row with a measurement of the gradient noise; empty if there is none.
      evaluated: The rows of all evaluations.
      missing: The first step up to `start` without a row, and the number of such steps; None if there is none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        writes: bool = True,
        loggers: Sequence[object] = (),
        run: LoggedRun | None = None,
        say: Callable[[str], None] = _warn,
    ):
        self.path, self._writes = folder / "metrics.jsonl", writes
        self._run, self._loggers = run or LoggedRun(folder=folder), LoggerCalls(loggers, self.path, say)
        self._open(start)
        self._begin_loggers(start, repeats=self._run.repeats)
        if writes and self.missing:
            first, count = self.missing
            say(
                f"{self.path} has no row of {count} of the {start} steps before, the first of them step {first}: "
                "train.patience and checkpoint.keep_best ignore their evaluations, faults.spike ignores their losses, "
                "and skipped steps among them are not counted"
            )

    def rewind(self, step: int) -> None:
        """Removes the rows after a step. Loggers stay open, and continue from that step."""
        self._shut()
        self._open(step)
        self._replaced = {}
        self._begin_loggers(step, repeats=False)

    def _begin_loggers(self, step: int, *, repeats: bool) -> None:
        if self._writes:
            self._loggers.begin(replace(self._run, step=step, repeats=repeats))

    def _open(self, start: int) -> None:
        rule, fix = "each line is a JSON object with a step", f"mv {self.path} {self.path}.damaged"
        with file_errors(self.path, rule=rule, fix=fix, say=str):
            every = [(line, json.loads(line)) for line in _lines(self.path)]
            rows = [(line, row) for line, row in every if row["step"] <= start]
            self._replaced = {row["step"]: row.get("loss") for _, row in every if row["step"] > start}
        self.recent = [row for _, row in rows[-RECENT:]]
        self.skipped = sum(bool(row.get("skipped")) for _, row in rows)
        self.measured = next((row for _, row in reversed(rows) if "noise_trace" in row), {})
        self.evaluated = [row for _, row in rows if is_evaluated(row)]
        there = {row["step"] for _, row in rows}
        first = next((step for step in range(1, start + 1) if step not in there), None)
        self.missing = None if first is None else (first, sum(step not in there for step in range(1, start + 1)))
        self._file: Any = None
        self._rows: list[str] = []  # not written yet, because the disk is full
        self._row: dict[str, Any] = rows[-1][1] if rows else {}  # the last row
        if not self._writes:
            return
        write_text(self.path, "".join(line + "\n" for line, _ in rows))
        self._file = self.path.open("r+b", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        self._begin = self._end - (len(rows[-1][0].encode()) + 1 if rows else 0)  # the file offset of the last row

    def write(self, row: dict[str, Any]) -> None:
        """Writes one row; `step` is one of its keys. NaN and infinity become null, as JSON has neither.

        While the disk is full, rows stay in memory, and the next call tries again.
        """
        if self._file is None:
            return
        self._row = _plain(row)
        if self._replaced and not _is_repeated(self._replaced, self._row):
            self._replaced = {}
            self._begin_loggers(row["step"] - 1, repeats=False)
        self._rows.append(_line(self._row))
        self._write()
        self._draw(self._row)

    def amend(self, more: Mapping[str, object], *, step: int) -> None:
        """Adds metrics to the last row, that of `step`. One write replaces the row, so a kill cannot truncate it."""
        if is_evaluated(more):  # a step evaluated a second time after a resume counts once for train.patience
            before = [row for row in self.evaluated if row["step"] != step]
            self.evaluated = [*before, {"step": step, **_plain(more)}]
        if self._file is None or not more or not self._row:
            return
        more = _plain(more)
        fresh = {key: value for key, value in more.items() if key not in self._row}  # loggers have the others
        self._row = self._row | more
        if self._rows:
            self._rows[-1] = _line(self._row)
        else:
            self._rows, self._end = [_line(self._row)], self._begin
        self._write()
        self._draw(fresh)

    def close(self) -> None:
        """Writes pending rows and closes files and loggers; warns if the full disk left rows unwritten."""
        self._shut()
        self._loggers.close()

    def _shut(self) -> None:
        if self._file is None:
            return
        self._write()
        if self._rows:
            warnings.warn(f"{self.path}: the disk is full, {len(self._rows)} rows are not written", stacklevel=2)
        self._file.close()

    def _write(self) -> None:
        """Writes all pending rows or none: after a partial line, the next start could not parse the file."""
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

    def _draw(self, row: Mapping[str, object]) -> None:
        if values := {key: value for key, value in row.items() if key != "step" and value is not None}:
            self._loggers.log(self._row["step"], values)


def _is_repeated(earlier_losses: dict[int, float | None], row: Mapping[str, Any]) -> bool:
    """Whether a row has the same loss as its step had before the run resumed; True for a step without a former row."""
    earlier, loss = earlier_losses.pop(row["step"], None), row.get("loss")
    return earlier is None or loss is None or math.isclose(earlier, loss, rel_tol=SAME)


def _lines(path: Path) -> list[str]:
    """Returns the complete lines of the file, without a last line that a crash truncated."""
    if not path.exists():
        return []
    text = path.read_text()
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def _plain(row: Mapping[str, object]) -> dict[str, Any]:
    """Replaces NaN and infinity by None (null in JSON)."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _line(row: Mapping[str, object]) -> str:
    return json.dumps(row) + "\n"


def is_evaluated(row: Mapping[str, object]) -> bool:
    """Returns whether a row contains evaluation metrics."""
    return any(name.startswith("eval_") for name in row)
