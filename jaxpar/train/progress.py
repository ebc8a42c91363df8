"""The status line on the terminal, from the first second on."""

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxpar.train.metrics import is_evaluated
from jaxpar.units import show_count, show_seconds

# What is waited for, and for how long: a line on a terminal that goes when something else is shown.


class Waiting:
    """Words with the time since they were said, which `rich` asks for at each refresh.

    Attributes:
      what: Is waited for.
    """

    def __init__(self, what: str):
        self.what, self._since = what, time.monotonic()

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(f"{self.what}, {show_seconds(time.monotonic() - self._since)}")


@contextmanager
def waiting(what: str, stream: Any) -> Iterator[None]:
    """Shows what is waited for until it is there; nothing where the stream is no terminal."""
    if not stream.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live

    with Live(Waiting(what), console=Console(file=stream), refresh_per_second=4, transient=True):
        yield


class Progress:
    """Shows how a run goes.

    Args:
      total: Steps of the whole run.
      every: Steps between two plain lines.
      unit: The unit that the loss counts: tokens, examples, or loss terms if unknown.
      flops: FLOP per step of the model, for MFU, or 0; of the first phase, where the batch grows.
      batch: Examples per step of the first phase.
      peak: FLOP per second of all devices, or 0 where they are simulated or unknown: no MFU then.
      stream: Where to.
      events: A file that keeps what is said, a line of JSON each, with the time and the last step; None keeps nothing.
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
        stream=None,
        events: Path | None = None,
    ):
        self.total, self.every, self.unit, self.flops, self.peak = total, every, unit, flops, peak
        self.batch = batch
        self.stream = stream or sys.stdout or io.StringIO()  # a daemon's Python may have no stdout
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

    def waits(self, what: str) -> None:
        """Shows on a terminal what is waited for, and for how long, until the next step."""
        if self._live:
            self._live.update(Waiting(what))

    def say(self, text: str) -> None:
        """Prints a line that stays, and keeps it among the events of the run."""
        if self._events:
            with suppress(OSError):  # training is worth more than what is said of it
                line = json.dumps({"time": time.time(), "step": self._last, "said": text})
                with self._events.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        if self._live:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def step(self, row: dict[str, Any]) -> None:
        """Shows one finished step."""
        self._last = row["step"]
        if is_evaluated(row):
            self._eval = _evaluated(row)
        self._recent = [*self._recent[-19:], row["seconds"]]
        line = self._line(row)
        if self._live and not self.stream.isatty():  # the terminal is gone, and the output goes on in a file
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
        parts.append(f"{show_count(row['tokens'] / typical)} {self.unit}/s")
        if self.peak and self.flops:
            flops = self.flops * row.get("global_batch", self.batch) / self.batch
            parts.append(f"MFU {flops / typical / self.peak:.1%}")
        parts.append(f"{show_seconds(typical)}/step")
        parts.append(f"{show_seconds(max(0.0, typical * (self.total - row['step'])))} left")
        return "  ".join(parts)


def _evaluated(row: dict[str, Any]) -> str:
    """Returns the losses of an evaluation in words: of what is held out, and of each set by its name."""
    accuracy = f" ({row['eval_accuracy']:.2%})" if "eval_accuracy" in row else ""
    held = [f"eval {row['eval_loss']:.4f}{accuracy}"] if "eval_loss" in row else []
    named = [(re.fullmatch("eval_([a-z0-9]+)_loss", name), value) for name, value in row.items()]
    return "  ".join([*held, *(f"{found[1]} {value:.4f}" for found, value in named if found)])
