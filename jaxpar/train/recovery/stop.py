"""Stop signals: they end the run after the current step, and are answered at once even while XLA compiles.

    signal ─► Python's handler     runs between two bytecodes of the main thread: only after the compilation
         └──► a byte in a pipe ─► thread: prints that the signal arrived, and saves the state if no step is in flight

The thread is needed because a compilation may outlast the grace period of a cluster (30 s in SLURM and Kubernetes).
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from jaxpar.checkpoint import processes
from jaxpar.errors import JaxparError
from jaxpar.process_exit import stop_signals

PATIENCE = 0.5  # seconds that the thread leaves the main thread to handle a signal


class Stop:
    """Receives the signal that asks the run to stop.

    Args:
      say: Prints a line for the user.

    Attributes:
      name: Name of the signal, or None if none has arrived.
    """

    def __init__(self, say: Callable[[str], None] = print):
        self.name: str | None = None
        self._say, self._lock, self._seen = say, threading.Lock(), threading.Event()
        self._save: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        """The number of the signal; 0 if none has arrived."""
        return signal.Signals[self.name] if self.name else 0

    @contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Saves the state if a signal arrives while the main thread compiles inside this block.

        Args:
          save: Saves the state. Nothing in the block may donate its arrays.
        """
        self._save = save
        try:
            yield
        finally:
            with self._lock:  # waits until a save by the thread has finished
                self._save = None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handles the stop signals of this process inside the block; a second Ctrl-C stops at once, without a save."""
        try:
            before = {number: signal.signal(number, self._handle_signal) for number in stop_signals()}
        except ValueError:  # only the main thread may set handlers; this is another one, such as a notebook's
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

    def _handle_signal(self, number: int, _frame) -> None:
        self._seen.set()
        if self.name is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # a cluster may send the signal twice: the save in progress continues
        self.name = signal.Signals(number).name

    def _listen(self, reading: int, ours: frozenset[int], others: int) -> None:
        while heard := os.read(reading, 1):
            if others >= 0:  # an event loop, as in a notebook, also waits for signals
                with suppress(OSError):
                    os.write(others, heard)
            if heard[0] in ours and not self._seen.wait(PATIENCE):
                self._save_while_compiling(signal.Signals(heard[0]).name)

    def _save_while_compiling(self, name: str) -> None:
        """Prints that a signal arrived, and saves the state while the main thread compiles."""
        with self._lock, suppress(OSError, ValueError):  # stdout may be closed
            save = self._save
            if save is None or processes.is_multiprocess():  # several processes must agree on the step that they save
                self._say(f"{name} heard: the run stops when XLA has compiled")
                return
            self._say(f"{name} heard while XLA compiles: saving meanwhile")
            try:
                save()
            except JaxparError as error:
                self._say(error.problems[0].got)
