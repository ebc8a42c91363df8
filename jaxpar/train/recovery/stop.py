"""Stop signals: a wish to stop after this step, heard at once, also while XLA compiles.

    signal ─► Python's handler     runs between two bytecodes of the main thread: after the compilation
         └──► a byte in a pipe ─► thread: says that it was heard, and saves the state if no step is in flight

A compilation may take longer than the time that a queue gives a job to end (30 s in SLURM and Kubernetes).
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from jaxpar.checkpoint import processes
from jaxpar.errors import JaxparError
from jaxpar.process_exit import stop_signals

PATIENCE = 0.5  # seconds after which a signal that the main thread has not seen is said by the thread


class Stop:
    """The signal that asked a run to stop, if any.

    Args:
      say: Takes a line for the user.

    Attributes:
      name: The name of the signal, or None.
    """

    def __init__(self, say: Callable[[str], None] = print):
        self.name: str | None = None
        self._say, self._lock, self._seen = say, threading.Lock(), threading.Event()
        self._save: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        """The number of the signal, 0 for none."""
        return signal.Signals[self.name] if self.name else 0

    @contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Saves the state if a signal comes while the main thread is in this block, which may compile.

        Args:
          save: Saves the state, which nothing in the block gives up.
        """
        self._save = save
        try:
            yield
        finally:
            with self._lock:  # what the thread is saving is saved first
                self._save = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals of this process; a second Ctrl-C stops at once, without a save."""
        try:
            before = {number: signal.signal(number, self._wish) for number in stop_signals()}
        except ValueError:  # not the main thread (a notebook's worker): signals are not ours to take
            yield
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        others = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        arguments = (reading, frozenset(map(int, before)), others)
        thread = threading.Thread(target=self._listen, args=arguments, name="jaxpar-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(others)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writing)  # ends the thread
            thread.join()
            os.close(reading)

    def _wish(self, number: int, _frame) -> None:
        self._seen.set()
        if self.name is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # a cluster may say it twice: what is being saved is saved
        self.name = signal.Signals(number).name

    def _listen(self, reading: int, ours: frozenset[int], others: int) -> None:
        while heard := os.read(reading, 1):
            if others >= 0:  # an event loop of the user's, as a notebook has, which listens too
                with suppress(OSError):
                    os.write(others, heard)
            if heard[0] in ours and not self._seen.wait(PATIENCE):
                self._meanwhile(signal.Signals(heard[0]).name)

    def _meanwhile(self, name: str) -> None:
        """Says that a signal was heard, and saves, as the main thread is busy: XLA compiles."""
        with self._lock, suppress(OSError, ValueError):  # nobody may be there to read what is said
            save = self._save
            if save is None or processes.is_multiprocess():  # several must agree on what they save
                self._say(f"{name} heard: the run stops when XLA has compiled")
                return
            self._say(f"{name} heard while XLA compiles: saving meanwhile")
            try:
                save()
            except JaxparError as error:
                self._say(error.problems[0].got)
