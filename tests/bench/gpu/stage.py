"""A stage of `python -m tests.bench.gpu`: what it measures, beside what, how long it takes, and its sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxpar.plan.machine.hardware import Hardware

from ..gpu.predicted import Numbers
from ..gpu.work import Work


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage, run as a process of its own.

    Attributes:
      name: Its name, for `--only`.
      seconds: How long it takes: an estimate. It is not started when less is left.
      limit: Seconds after which it is stopped.
      measures: What, in words.
      beside: What its numbers are compared with.
      real: Its sizes on a GPU.
      tiny: Its sizes in a rehearsal, of the same kind.
      run: Takes the measurements, each through `Work.measure`.
      predict: From sizes and hardware to predictions, by the names of the measurements; None where there are none.
      flags: Of XLA, for its process.
    """

    name: str
    seconds: float
    limit: float
    measures: str
    beside: str
    real: Any
    tiny: Any
    run: Callable[[Work], None]
    predict: Callable[[Any, Hardware], Iterator[tuple[str, Numbers]]] | None = None
    flags: str = ""

    def sizes(self, *, rehearsal: bool) -> Any:
        """Returns the sizes to run with."""
        return self.tiny if rehearsal else self.real
