"""What is waited for, and for how long: a line on a terminal that goes when something else is shown."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxpar.units import show_seconds


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
