"""Output that outlasts its reader: a run goes on, and what it says goes on in its folder.

    stdout ──► head, less, a terminal, a tee on a full disk
       └─────► RUN/output.log        from the moment that the other does not take it

A run is worth more than whoever watches it: hours of training are not lost because a terminal, a pager or
an ssh connection went away, and `| head` asks for a few lines, not for the end of the run. Who wants the
end says so: Ctrl-C, SIGTERM or SIGHUP. A reader that is there and does not read, a pager on its first page
or a terminal that was stopped, is waited for for `PATIENCE`: a process that waits in a write hears no
signal. The same holds for `train` alone and for `launch`.

A daemon or `ssh` may start a command with closed descriptors (`<&-`, `>&-`). They are opened on /dev/null, else
the next file that the process opens, such as its metrics, gets the number 1, and whatever prints writes into it. The
output of a run without a stdout is in its folder from the first line.
"""

import errno
import io
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

NAME = "output.log"
PATIENCE = 4.0  # seconds for a reader that is there to take some more


class Closed(io.TextIOWrapper):
    """A stream in place of one that was closed when the process began: what is written to it is dropped."""


def open_closed() -> None:
    """Opens the descriptors 0, 1 and 2 on /dev/null where they are closed, and makes the streams that Python lacks.

    They close again when this process starts itself anew by `exec`, which then finds them as this one did.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:  # a lower one is closed too, which another thread has opened and closed meanwhile
                os.dup2(handle, number, inheritable=False)
                os.close(handle)
        if getattr(sys, name) is None:
            made = open(number, closefd=False) if name == "stdin" else _closed(number)
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)


def _closed(number: int) -> Closed:
    return Closed(io.FileIO(number, "wb", closefd=False), encoding="utf-8", errors="replace", line_buffering=True)


def outlast(folder: Path) -> None:
    """Lets this process's own stdout and stderr go on in a run folder when they cannot be written any more.

    Streams that somebody has put in their place are left as they are.
    """
    for name, own in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        if own is not None and getattr(sys, name) is own:
            raw = _Outlasting(own.fileno(), name, folder / NAME, closed=isinstance(own, Closed))
            setattr(sys, name, io.TextIOWrapper(
                io.BufferedWriter(raw), encoding=own.encoding, errors="backslashreplace",
                line_buffering=own.line_buffering,
            ))  # fmt: skip


class _Outlasting(io.FileIO):
    """A file descriptor that becomes another file when a write fails: native code that writes to it follows."""

    def __init__(self, number: int, stream: str, log: Path, *, closed: bool):
        super().__init__(number, "wb", closefd=False)
        self._stream, self._log, self._moved, self._began_closed = stream, log, False, closed

    def write(self, data) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Writes some bytes, if need be elsewhere; returns how many."""
        try:
            return super().write(self._taken(memoryview(data)))
        except OSError as error:
            if self._moved:  # neither is there room in the run folder: training is worth more than its output
                return len(data)
            self._move(error)
            return self.write(data)

    def _taken(self, data: memoryview) -> memoryview:
        """Returns as much of the data as is written at once: who writes more to a pipe waits for its reader."""
        if self._began_closed and not self._moved:
            raise OSError(errno.EBADF, "it was closed when the run began")
        ready = select.poll()
        ready.register(self.fileno(), select.POLLOUT)
        if not ready.poll(1000 * PATIENCE):
            raise OSError(errno.ETIMEDOUT, f"nothing was read for {PATIENCE:g} s")
        return data[: select.PIPE_BUF]

    def _move(self, error: OSError) -> None:
        self._moved = True
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:  # no run folder either: then there is nowhere to say it
            log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, self.fileno())
        os.close(log)
        why = f"{self._stream} can no longer be written ({error.strerror}): the run goes on, and says so"
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why} here\n".encode())
        if self._stream == "stdout":
            with suppress(OSError, ValueError):
                print(f"jaxpar: {why} in {self._log}", file=sys.stderr, flush=True)
