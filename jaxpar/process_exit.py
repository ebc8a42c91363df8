"""Ends a process reliably, whatever the state of its output streams and its other threads."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SPEAKING = 1.0  # seconds to print the last words: a full pipe without a reader would block for ever
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # from SLURM, LSF, SGE and submitit before a job's end


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a run to stop: Ctrl-C, SIGTERM, a closing terminal, the warnings of job queues.

    Leaves out SIGHUP if it is ignored, as under `nohup`, and warnings that user code handles, such as by faulthandler.
    """
    hung_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    caught = _caught()
    warnings = [sig for sig in WARNINGS if signal.getsignal(sig) is signal.SIG_DFL and not caught >> (sig - 1) & 1]
    return (signal.SIGINT, signal.SIGTERM, *hung_up, *warnings)


def _caught() -> int:
    """Returns the mask of signals with a handler, including handlers in C that Python does not see."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)


def exit_process(status: int, last_words: str = "", *, pause: float = 0.0) -> NoReturn:
    """Ends this process at once, from any thread, without cleanup, and without waiting for other processes.

    A print may raise if the reader is gone, or block for ever if it has stopped reading or another thread holds the
    stream. So a separate thread prints, and is joined with a timeout.

    Args:
      status: The exit status.
      last_words: Printed to stderr, if it can be written.
      pause: Seconds between the print and the end.
    """
    try:
        speaker = threading.Thread(target=_speak, args=(last_words,), daemon=True)
        speaker.start()
        speaker.join(SPEAKING)
        time.sleep(pause)
    finally:
        os._exit(status)


def _speak(last_words: str) -> None:
    with suppress(OSError, ValueError):  # broken, or closed
        if last_words:
            print(last_words, file=sys.stderr)
        sys.stderr.flush()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
