"""Recovery: rollbacks after bad steps, checks of parameters before a save, saves before an error, and stop signals.

A stop signal ends the run after the current step, and is answered at once even while XLA compiles:

    signal ─► Python's handler     runs between two bytecodes of the main thread: only after the compilation
         └──► a byte in a pipe ─► thread: prints that the signal arrived, and saves the state if no step is in flight

The thread is needed because a compilation may outlast the grace period of a cluster (30 s in SLURM and Kubernetes).
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import jax

from jaxpar.checkpoint import processes
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.process_exit import stop_signals
from jaxpar.step.numerics import are_finite
from jaxpar.step.state import State
from jaxpar.train.faults import LOWER_RATE, BadStep
from jaxpar.train.run import Run

PATIENCE = 0.5  # seconds that the thread leaves the main thread to handle a signal


def roll_back(job: Run, bad: JaxparError, start: int) -> State:
    """Restores the newest checkpoint, and makes the run skip the batches since it. Returns the restored state.

    If the first step after a checkpoint is bad, the checkpoint itself may be bad: it is renamed, and the one before it
    restored.

    Args:
      job: The run.
      bad: The error that ended the training. Only a `BadStep` is handled; any other error is raised again.
      start: The step at which this training began.

    Raises:
      JaxparError: `bad` itself, after pending saves have finished, if `faults.on_bad_step` is not "rollback"; if there
        is no checkpoint to restore; if the run has used up its rollbacks.
    """
    faults, skipped = job.watch.faults, job.skipped
    if job.store and (isinstance(bad, BadStep) or jax.process_count() == 1):  # else others may never join the save
        job.store.wait()
    if not isinstance(bad, BadStep):
        raise bad
    steps = job.store.steps() if job.store else []
    older = [step for step in steps if step < start]
    at_once = bad.step == start + 1 and start in steps and bool(older)
    if faults.on_bad_step != "rollback":
        raise _suggest_older_checkpoint(bad, older[-1]) if at_once else bad
    if job.store is None or skipped is None or not steps:
        raise refuse(f"{bad.problems[0].got}, and no checkpoint to go back to", rule="faults.on_bad_step = 'rollback' "
            "goes back to a checkpoint", fix="a smaller checkpoint.every") from bad  # fmt: skip
    if skipped.rollbacks >= faults.rollbacks:
        raise refuse(f"{bad.problems[0].got}, after {skipped.rollbacks} rollbacks", rule=f"a run goes back at most "
            f"faults.rollbacks = {faults.rollbacks} times", fix=bad.problems[0].fix) from bad  # fmt: skip
    job.watchdog.begin_activity(bad.step, "restoring")
    if at_once and jax.process_index() == 0:
        left = ", ".join(job.store.set_aside_after(older[-1]))
        if job.progress:
            job.progress.say(f"the first step after step {start} is bad: its checkpoint is renamed to {left}")
    state, back = job.store.restore(job.step.abstract())
    skipped.go_back(job.growth.total_draws(bad.step), to=job.growth.total_draws(back), why=bad.problems[0].got)
    job.watch.rewind(back)
    if job.log:
        job.log.rewind(back)
        job.watch.skipped = job.log.skipped
        job.noise.resume(job.log.measured)
    if job.progress:
        job.progress.say(f"{bad.problems[0].got}: back to step {back}, on with the batch after it")
    return state


def _suggest_older_checkpoint(bad: BadStep, step: int) -> BadStep:
    """Adds to the error the command that continues from an older checkpoint, as the newest one may be bad."""
    problem = bad.problems[0]
    return BadStep(bad.step, Problem(problem.got, problem.rule, f"{problem.fix}; or jaxpar train JOB --from {step}"))


# Checks the parameters before a save.

_are_finite = jax.jit(are_finite)


def check_before_save(step: int, params: Mapping[str, object]) -> None:
    """Checks the parameters before a save: an update may overflow although its loss and gradients are finite.

    Raises:
      BadStep: If a parameter is NaN or infinite.
    """
    if not _are_finite(params):
        got = f"the parameters of step {step} are not finite, though its loss and gradients are"
        raise BadStep(step, Problem(got, "a checkpoint is saved only while all parameters are finite", LOWER_RATE))


# Saves the state when user code raises between two steps: data that end, a wrong batch size, an evaluation.

WAIT = 10.0  # seconds to wait for the other processes to raise the same error


@contextmanager
def saves_before_errors(save: Callable[[], None]) -> Iterator[None]:
    """Calls `save` before an error is raised again, except a `BadStep`, whose state must not be saved."""
    try:
        yield
    except BadStep:
        raise
    except Exception:
        # all exceptions, because user code (data, loggers, measures) may raise any; each is raised again
        save()
        raise


def can_save(run: Run, state: State, start: int) -> bool:
    """Returns whether the state is newer than the start, and all processes have reached this point to save it.

    Args:
      run: The run.
      state: The state after the newest step.
      start: The step at which this training began.
    """
    if run.store is None or run.watch.is_skipping or any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return False  # an error inside the step: it has already donated its input state
    step = int(state.step)
    return step > start and processes.barrier(f"rescue/{step}", WAIT)


def say_saved(run: Run, step: int, save: Callable[[], None]) -> None:
    """Saves a step and prints the result; a failed save is printed, not raised, as the first error is raised later."""
    say = run.progress.say if run.progress else print
    try:
        save()
    except JaxparError as error:
        say(f"step {step} could not be saved before the error below: {error.problems[0].got}")
    else:
        say(f"step {step} is saved before the error below: the same command goes on from there")


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
