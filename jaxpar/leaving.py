"""Ends a process when it is told to, and for certain, whatever becomes of its output and its other threads."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

SPEAKING = 1.0  # seconds for the last words: a pipe that is full and that nobody empties never takes them


def wishes_to_stop() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a run to stop: Ctrl-C, SIGTERM, and a terminal that closes.

    `nohup` ignores the last on purpose: then it stays ignored.
    """
    hung_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hung_up)


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
