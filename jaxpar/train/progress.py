"""The status line and the log lines of a run; a terminal shows the current activity from the first second on."""

import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from jaxpar.train.metrics import is_evaluated
from jaxpar.units import show_count, show_seconds

# A transient terminal line: the current wait, and how long it has lasted.


class Waiting:
    """A text followed by the time since its creation; `rich` renders it anew at each refresh.

    Attributes:
      what: The activity that the run waits for.
    """

    def __init__(self, what: str):
        self.what, self._since = what, time.monotonic()

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(f"{self.what}, {show_seconds(time.monotonic() - self._since)}")


@contextmanager
def waiting(what: str, stream: TextIO) -> Iterator[None]:
    """Shows an activity and its duration while the block runs; shows nothing if the stream is not a terminal."""
    if not stream.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live

    with Live(Waiting(what), console=Console(file=stream), refresh_per_second=4, transient=True):
        yield


def append_event(file: Path, step: int, text: str) -> None:
    """Appends a message to an events file, with its time and the last step before it."""
    with suppress(OSError):  # a failed log entry must not stop the training
        line = json.dumps({"time": time.time(), "step": step, "said": text})
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def say_and_record(folder: Path, say: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that prints a line and appends it to a run's events, with the last step of its metrics.

    For messages before the run has a `Progress`, such as the removal of a stale lock.
    """

    def say_line(text: str) -> None:
        say(text)
        append_event(folder / "events.jsonl", _last_step(folder / "metrics.jsonl"), text)

    return say_line


def _last_step(metrics: Path) -> int:
    """Returns the step of the last whole row of a metrics file, 0 without one; a kill may have cut the last line."""
    with suppress(OSError):
        for line in reversed(metrics.read_bytes().splitlines()):
            with suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0


class Progress:
    """Prints the progress of a run: a status line on a terminal, plain lines elsewhere.

    Args:
      total: Steps of the whole run.
      every: Steps between two plain lines.
      unit: Unit of the loss's count, for the displayed speed: tokens, examples, or loss terms if unknown.
      flops: The model's FLOP per step, for MFU; in the first phase, if the batch grows. 0 shows no MFU.
      batch: Examples per step of the first phase.
      peak: Peak FLOP per second of all devices; 0 if they are unknown, which shows no MFU.
      simulated: Whether devices are simulated on a CPU: then neither speed nor MFU is shown, only the time left.
      stream: Output stream; None is stdout.
      events: File to which `say` appends a JSON line with time, step and text; None writes no file.
    """

    def __init__(
        self,
        total: int,
        *,
        every: int,
        unit: str = "tokens",
        flops: float = 0.0,
        batch: int = 1,
        peak: float = 0.0,
        simulated: bool = False,
        stream=None,
        events: Path | None = None,
    ):
        self.total, self.every, self.unit, self.flops, self.peak = total, every, unit, flops, peak
        self.batch, self.simulated = batch, simulated
        self.stream = stream or sys.stdout or io.StringIO()  # in a daemon, sys.stdout may be None
        self._events, self._last = events, 0
        self._live: Any = None
        self._eval = ""
        self._recent: list[float] = []
        if self.stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self.stream), refresh_per_second=4, transient=False)

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def resume(self, step: int) -> None:
        """Sets the last step, from which a run goes on: messages before the next step are recorded with it."""
        self._last = step

    def show_activity(self, what: str) -> None:
        """Shows an activity and its duration on a terminal, until the next step."""
        if self._live:
            self._live.update(Waiting(what))

    def say(self, text: str) -> None:
        """Prints a permanent line and appends it to the events file."""
        if self._events:
            append_event(self._events, self._last, text)
        if self._live:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def step(self, row: dict[str, Any]) -> None:
        """Shows one finished step."""
        self._last = row["step"]
        if is_evaluated(row):
            self._eval = _format_evaluation(row)
        self._recent = [*self._recent[-19:], row["seconds"]]
        line = self._line(row)
        if self._live and not self.stream.isatty():  # the terminal is closed, and the output now goes to a file
            self._live.stop()
            self._live = None
        if self._live:
            from rich.text import Text

            self._live.update(Text(line))
        elif row["step"] % self.every == 0 or row["step"] == self.total or is_evaluated(row):
            print(line, file=self.stream, flush=True)

    def _line(self, row: dict[str, Any]) -> str:
        typical = sorted(self._recent)[len(self._recent) // 2]
        parts = [f"step {row['step']:>{len(str(self.total))}}/{self.total}", f"loss {row['loss']:.4f}"]
        if self._eval:
            parts.append(self._eval)
        if not self.simulated:
            parts.extend(self._speed(row, typical))
        parts.append(f"{show_seconds(max(0.0, typical * (self.total - row['step'])))} left")
        return "  ".join(parts)

    def _speed(self, row: dict[str, Any], seconds: float) -> Iterator[str]:
        yield f"{show_count(row['tokens'] / seconds)} {self.unit}/s"
        if self.peak and self.flops:
            flops = self.flops * row.get("global_batch", self.batch) / self.batch
            yield f"MFU {flops / seconds / self.peak:.1%}"
        yield f"{show_seconds(seconds)}/step"


def _format_evaluation(row: dict[str, Any]) -> str:
    """Formats the losses of an evaluation: of the held-out examples, and of each set by its name."""
    accuracy = f" ({row['eval_accuracy']:.2%})" if "eval_accuracy" in row else ""
    held = [f"eval {row['eval_loss']:.4f}{accuracy}"] if "eval_loss" in row else []
    named = [(re.fullmatch("eval_([a-z0-9]+)_loss", name), value) for name, value in row.items()]
    return "  ".join([*held, *(f"{found[1]} {value:.4f}" for found, value in named if found)])
