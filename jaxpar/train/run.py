"""The parts of a run and its outcome, as the loop, the rollback and the job know them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.data.spec import Source
from jaxpar.data.streams.sets import EvaluationSet
from jaxpar.data.validate import BatchSpec
from jaxpar.optim.growth import Growth
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train.best import Best
from jaxpar.train.faults import Watch
from jaxpar.train.metrics import Log
from jaxpar.train.noise import Noise
from jaxpar.train.progress import Progress
from jaxpar.train.skipped_batches import SkippedBatches
from jaxpar.train.watchdog.thread import SingleProcess


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run, besides its state.

    Attributes:
      step: The compiled step.
      source: Where batches come from.
      steps: Updates of the whole run.
      global_batch: Examples per step, over all devices; of the first phase, if the batch grows.
      eval_every: Steps between evaluations; 0 evaluates at the end only.
      eval_batches: Most batches per evaluation and set; 0 takes all that are held out.
      ahead: Batches that a thread reads ahead; with 0 one is read while devices compute the step before.
      sets: Evaluation sets by name, beside the examples that the source holds out.
      checkpoints: When they are written.
      store: Where they are written, or None.
      log: Where rows go, or None.
      progress: What the user sees, or None.
      learning_rate: Step to learning rate, for the rows.
      watchdog: The other processes of the run.
      watch: Judges each step's numbers.
      good: What a good batch is, or None where none is looked at.
      skipped: Batches that are passed over, or None where none can be.
      noise: Measures the noise of gradients and updates.
      growth: How the batch grows.
      derived: What evaluations say that follows from their loss: names of `DERIVED`.
      best: How evaluations are compared, and how long the run waits for a better one.
      larger: The compiled steps of its later phases, by the times that their batches are of the first.
    """

    step: Step
    source: Source
    steps: int
    global_batch: int
    eval_every: int = 0
    eval_batches: int = 0
    ahead: int = 0
    sets: Mapping[str, EvaluationSet] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    store: Store | None = None
    log: Log | None = None
    progress: Progress | None = None
    learning_rate: Callable[[int], float] | None = None
    watchdog: SingleProcess = field(default_factory=SingleProcess)
    watch: Watch = field(default_factory=Watch)
    good: BatchSpec | None = None
    skipped: SkippedBatches | None = None
    noise: Noise = field(default_factory=Noise)
    growth: Growth = field(default_factory=Growth)
    derived: tuple[str, ...] = ()
    best: Best = field(default_factory=Best)
    larger: Mapping[int, Step] = field(default_factory=dict)

    def step_at(self, step: int) -> Step:
        """Returns the compiled step that makes a step, from 0."""
        factor = self.growth.factor(step)
        return self.step if factor == 1 else self.larger[factor]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run.

    Attributes:
      state: The last state.
      last: The row of the last step that this process made; nothing if it made none.
      stopped_by: Name of the signal that ended it early, or None.
    """

    state: State
    last: dict[str, Any]
    stopped_by: str | None
