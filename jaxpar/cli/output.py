"""Lets a run continue when the reader of its output goes away: redirects the output to the run folder.

    stdout ──► head, less, a terminal, a tee on a full disk
       └─────► RUN/output.log        from the first write that stdout does not take

Training does not stop because a terminal, a pager or an ssh connection goes away, or because `| head` has
its lines. To stop a run, use Ctrl-C, SIGTERM or SIGHUP. If the reader exists but does not read (a pager on
its first page, a stopped terminal), a write waits for `PATIENCE` only: a process blocked in a write handles
no signal. The same holds for `train` alone and for `launch`.

A daemon or `ssh` may start a command with closed descriptors (`<&-`, `>&-`). They are opened on /dev/null; otherwise
the next file that the process opens, such as its metrics, would get descriptor 1, and prints would go into it. The
output of a run without a stdout goes to its folder from the first line.
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
PATIENCE = 4.0  # seconds that a write waits for the reader


class ClosedStream(io.TextIOWrapper):
    """A stream that replaces one closed at the start of the process; it drops its output."""


def open_closed_streams() -> None:
    """Opens closed descriptors among 0, 1 and 2 on /dev/null, and creates the missing streams of `sys`.

    `exec` closes them again, so a process that restarts itself finds the original descriptors.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:  # another thread has closed a lower descriptor meanwhile
                os.dup2(handle, number, inheritable=False)
                os.close(handle)
        if getattr(sys, name) is None:
            stream = open(number, closefd=False) if name == "stdin" else _closed_stream(number)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _closed_stream(number: int) -> ClosedStream:
    return ClosedStream(io.FileIO(number, "wb", closefd=False), encoding="utf-8", errors="replace", line_buffering=True)


def redirect_on_failure(folder: Path) -> None:
    """Redirects this process's stdout and stderr to a run folder once they cannot be written.

    Leaves streams that replace `sys.stdout` or `sys.stderr` unchanged.
    """
    for name, stream in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        if stream is not None and getattr(sys, name) is stream:
            raw = _RedirectedOutput(stream.fileno(), name, folder / NAME, closed=isinstance(stream, ClosedStream))
            setattr(sys, name, io.TextIOWrapper(
                io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace",
                line_buffering=stream.line_buffering,
            ))  # fmt: skip


class _RedirectedOutput(io.FileIO):
    """A file descriptor redirected to another file when a write fails, also for native code."""

    def __init__(self, number: int, stream: str, log: Path, *, closed: bool):
        super().__init__(number, "wb", closefd=False)
        self._stream, self._log, self._moved, self._began_closed = stream, log, False, closed

    def write(self, data) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Writes bytes to the stream, or to the log if that fails; returns the number of bytes written."""
        try:
            return super().write(self._writable_part(memoryview(data)))
        except OSError as error:
            if self._moved:  # the log cannot be written either: drop the output and continue the run
                return len(data)
            self._redirect(error)
            return self.write(data)

    def _writable_part(self, data: memoryview) -> memoryview:
        """Returns the part of the data that a pipe accepts without waiting for its reader."""
        if self._began_closed and not self._moved:
            raise OSError(errno.EBADF, "it was closed when the run began")
        ready = select.poll()
        ready.register(self.fileno(), select.POLLOUT)
        if not ready.poll(1000 * PATIENCE):
            raise OSError(errno.ETIMEDOUT, f"nothing was read for {PATIENCE:g} s")
        return data[: select.PIPE_BUF]

    def _redirect(self, error: OSError) -> None:
        self._moved = True
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:  # no run folder either: drop the output
            log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, self.fileno())
        os.close(log)
        reason = f"{self._stream} can no longer be written ({error.strerror}): the run goes on, and says so"
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason} here\n".encode())
        if self._stream == "stdout":
            with suppress(OSError, ValueError):
                print(f"jaxpar: {reason} in {self._log}", file=sys.stderr, flush=True)
