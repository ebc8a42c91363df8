"""A trained model to evaluate: its job without what only training needs, and the keys that an evaluation may override.

These are the data, the devices, and the metrics.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxpar.checkpoint import Checkpoints
from jaxpar.errors import Problem, refuse
from jaxpar.exchange.base import AllReduce
from jaxpar.job.file.schema import Job
from jaxpar.optim.optimizer import Optimizer
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train.faults import Faults

SECTIONS = ("data", "parallel", "mesh", "metrics")
TRAIN = ("eval_batches", "global_batch", "precision", "loss")  # keys of [train] that an evaluation reads
OTHER_DATA = ("source", "path")  # keys of [data] that name other examples
TOKENS = ("tokenizer", "vocab", "end")
# keys of [data] that describe the run's own examples, and are not inherited by other data
OTHER_DATA_DEFAULTS = {"weights": "[]", "evaluation": '""', "augment": "[]", "held_out": "0.0", "shuffle": "false"}


@dataclass(frozen=True)
class DataChoice:
    """The examples that overrides ask for.

    Attributes:
      is_other: Whether they name other data than those of the run.
      is_held_out: Whether a share of the data is evaluated, and not all of it.
      sets: Names of the evaluation sets that they define.
    """

    is_other: bool
    is_held_out: bool
    sets: tuple[str, ...]

    def select_sets(self, job: Job) -> Job:
        """Leaves out the run's own evaluation sets if the overrides name other data."""
        if not self.is_other:
            return job
        sets = {name: table for name, table in job.data.sets.items() if name in self.sets}
        return replace(job, data=replace(job.data, sets=sets))


def override_key(override: str) -> str:
    """Returns the key of an override.

    >>> override_key("data.path=test.txt")
    'data.path'
    """
    return ".".join(word.strip() for word in override.partition("=")[0].split("."))


def check_overrides(overrides: Sequence[str]) -> list[Problem]:
    """Returns a problem for each override that an evaluation does not read; `loads` reports malformed ones."""
    problems = []
    for override in overrides:
        section, _, rest = override_key(override).partition(".")
        if rest and section not in SECTIONS and (section != "train" or rest.partition(".")[0] not in TRAIN):
            rule = f"an evaluation reads {', '.join(SECTIONS)} and train.{', train.'.join(TRAIN)}"
            problems.append(Problem(f"override {override!r:.200}", rule, "leave it out, or data.path=FILE"))
    return problems


def choose_data(overrides: Sequence[str]) -> DataChoice:
    """Returns the examples that the overrides ask for."""
    words = [override_key(override).split(".") for override in overrides]
    keys = {parts[1] for parts in words if parts[0] == "data" and len(parts) > 1}
    sets = [parts[2] for parts in words if parts[:2] == ["data", "sets"] and len(parts) > 2]
    return DataChoice(
        is_other=bool(keys & {*OTHER_DATA}), is_held_out="held_out" in keys, sets=tuple(dict.fromkeys(sets))
    )


def with_defaults(overrides: Sequence[str], choice: DataChoice) -> list[str]:
    """Adds the keys that other data do not inherit from the run: all of its examples are evaluated, in order."""
    defaults = OTHER_DATA_DEFAULTS if choice.is_other else {}
    return [*(f"data.{key}={value}" for key, value in defaults.items()), *overrides]


def check_own_data(overrides: Sequence[str], choice: DataChoice, *, is_text: bool) -> None:
    """Refuses overrides that change which of the run's own examples are held out, or the tokens of its text.

    Args:
      overrides: The overrides.
      choice: The examples that they ask for.
      is_text: Whether the run was trained on text.

    Raises:
      JaxparError: If there is such an override.
    """
    for override in overrides:
        section, _, key = override_key(override).partition(".")
        if section != "data" or key.split(".")[0] in ("sets", "ahead"):
            continue
        if is_text and key in TOKENS:
            raise refuse(
                f"override {override!r:.200} of a trained run",
                rule="a model is evaluated on the tokens that it was trained on",
                fix="leave it out",
            )
        if not choice.is_other:
            raise refuse(
                f"override {override!r:.200} of a run's own data",
                rule="it was not trained on the examples that its job holds out; another value holds out others",
                fix="with data.path=FILE of other data, or leave it out",
            )


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
