"""A trained model to evaluate, and its job without what only training needs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from jaxpar.checkpoint import Checkpoints
from jaxpar.exchange.all_reduce import AllReduce
from jaxpar.job.evaluation.overrides import DataChoice
from jaxpar.job.file.schema import Job
from jaxpar.optim.optimizer import Optimizer
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train.faults import Faults


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(ABC):
    """A trained model to evaluate.

    Attributes:
      job: The job with the settings of the evaluation; its `run.dir` is a temporary folder.
      choice: The examples that the overrides ask for.
      steps: The steps of its checkpoints; (None,) for a model without checkpoints.
      several: Whether it is several models, as members of a sweep are, with the optimizer in their state.
      has_data: Whether the job or the overrides name data besides sets.
    """

    job: Job
    choice: DataChoice
    steps: tuple[int | None, ...]
    several: bool
    has_data: bool

    @abstractmethod
    def read_state(self, step: Step, number: int | None) -> State:
        """Reads the parameters to evaluate of a checkpoint, with the shardings of the step that evaluates them."""

    @abstractmethod
    def check_data(self, fingerprint: str) -> None:
        """Refuses data that are not those the model was trained on, if their held-out examples are evaluated."""


def without_training(job: Job, work: Path, *, starts: bool, several: bool = False) -> Job:
    """Returns a job without what only training needs, such as its optimizer and the exchange between replicas.

    Args:
      job: The job.
      work: The folder for its packed texts.
      starts: Whether `checkpoint.start_from` still decides the parameters or their storage.
      several: Whether its replicas are several models, which keep their optimizer and exchange.
    """
    train = replace(job.train, eval_every=0, patience=0, grow=(), accumulate=1, freeze=(), remat="none", offload=False)
    checkpoint = job.checkpoint if starts else Checkpoints(replicas="mean")
    job = replace(
        job,
        run=replace(job.run, dir=str(work)),
        train=train,
        checkpoint=replace(checkpoint, keep_best=0, best=Checkpoints.best),
        faults=Faults(),
        metrics=replace(job.metrics, noise_every=0, loggers=()),
    )
    if several:
        return job
    return replace(job, optimizer=Optimizer(), parallel=replace(job.parallel, exchange=AllReduce()))
