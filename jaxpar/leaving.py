"""Ends a process when it is told to, and for certain, whatever becomes of its output and its other threads."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SPEAKING = 1.0  # seconds for the last words: a pipe that is full and that nobody empties never takes them


WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of SLURM, LSF, SGE and submitit before a job's end


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a run to stop: Ctrl-C, SIGTERM, a terminal that closes, the warnings of queues.

    `nohup` ignores SIGHUP on purpose: then it stays ignored. A warning for which the user's own code has a handler,
    such as faulthandler's, stays the user's.
    """
    hung_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    caught = _caught()
    warnings = [each for each in WARNINGS if signal.getsignal(each) is signal.SIG_DFL and not caught >> (each - 1) & 1]
    return (signal.SIGINT, signal.SIGTERM, *hung_up, *warnings)


def _caught() -> int:
    """Returns the mask of the signals that have a handler, of C code too, which Python does not know of."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # no Linux
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)


def leave(status: int, last_words: str = "", *, pause: float = 0.0) -> NoReturn:
    """Ends this process at once, from any thread; nothing is cleaned up, and JAX waits for nobody.

    To print may raise, where the reader is gone, or wait for ever, where it has stopped reading; another thread
    also may hold the stream while it waits. So a thread of its own speaks, and is not waited for for long.

    Args:
      status: The exit status.
      last_words: Said on stderr, if anybody listens.
      pause: Seconds between the words and the end.
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
