"""`StepTrace`, a trace of a few steps by `jax.profiler`, in the run folder.

    train.profile = [100, 103]     steps 100, 101, 102 and 103

    RUN/profile/steps_100_103/                                   xprof --logdir shows this folder
        plugins/profile/DATE/HOST.xplane.pb, HOST.trace.json.gz  the latter for ui.perfetto.dev and `jaxpar report`
        steps.json                                               the steps and the seconds that they took

No step is in flight when the trace begins or ends, so it contains exactly these steps. Only process 0 writes a trace.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxpar.errors import refuse
from jaxpar.files import write_json

FOLDER, FACTS = "profile", "steps.json"


def check_steps(steps: Sequence[int], last: int, key: str) -> None:
    """Checks the first and the last step of a trace.

    Args:
      steps: First and last step, counted from 1, both traced; empty for no trace.
      last: The last step of the run.
      key: The job's key or the argument, for messages.

    Raises:
      JaxparError: If they are not two steps of the run in this order.
    """
    numbers = [step for step in steps if isinstance(step, int) and not isinstance(step, bool)]
    if not len(steps) or (len(numbers) == len(steps) == 2 and 1 <= numbers[0] <= numbers[1] <= last):
        return
    first = max(1, min(10, last - 2))
    raise refuse(
        f"{key} = {list(steps)}",
        rule=f"a trace has a first and a last step, both traced, within 1..{last}",
        fix=f"{key} = [{first}, {min(first + 2, last)}]",
    )


class StepTrace:
    """The trace of a run; the loop calls it around each step.

    Args:
      folder: The run folder; None traces nothing.
      steps: First and last step of the trace, both traced; empty for none.
      say: Prints a line for the user.
    """

    def __init__(self, folder: Path | None = None, steps: Sequence[int] = (), say: Callable[[str], None] = print):
        self._steps = range(steps[0], steps[1] + 1) if folder and steps else range(0)
        self._folder, self._say = (folder or Path()) / FOLDER, say
        self._first = 0  # the first traced step, while the trace runs
        self._start = 0.0
        self._is_done = False

    def begin(self, step: int, finish_steps: Callable[[], None]) -> None:
        """Begins the trace before its first step, or before a later one if the run resumes between them.

        Args:
          step: The step that comes next, from 1.
          finish_steps: Waits for the steps in flight.
        """
        if self._is_done or self._first or step not in self._steps:
            return
        import jax  # a job is read without it

        finish_steps()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python would be most of the trace
        self._first, self._start = step, time.perf_counter()
        self._path.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(self._path), profiler_options=options)

    def ends(self, step: int) -> bool:
        """Returns whether the trace ends after this step, which must then be finished."""
        return bool(self._first) and step == self._steps[-1]

    def end(self, step: int) -> None:
        """Ends a running trace after the last finished step, `step`, and prints its folder."""
        if not self._first:
            return
        self._stop()
        seconds, folder = time.perf_counter() - self._start, self._path
        write_json(folder / FACTS, {"first": self._first, "last": step, "seconds": seconds})
        self._say(f"profile of steps {self._first} to {step}: {folder}")
        self._first = 0

    def close(self) -> None:
        """Ends a trace that an error interrupted; it has no `steps.json`."""
        if self._first:
            self._stop()
            self._first = 0

    def _stop(self) -> None:
        import jax

        jax.profiler.stop_trace()
        self._is_done = True

    @property
    def _path(self) -> Path:
        return self._folder / f"steps_{self._steps[0]}_{self._steps[-1]}"
