"""The keys of a job that an evaluation may override: the data, the devices, and the metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpar.errors import Problem, refuse
from jaxpar.job.file.schema import Job

SECTIONS = ("data", "parallel", "mesh", "metrics")
TRAIN = ("eval_batches", "global_batch", "precision", "loss")  # keys of [train] that an evaluation reads
OTHER_DATA = ("source", "path")  # keys of [data] that name other examples
TOKENS = ("tokenizer", "vocab", "end")
# keys of [data] that describe the run's own examples, and are not inherited by other data
OF_RUN = {"weights": "[]", "evaluation": '""', "augment": "[]", "held_out": "0.0", "shuffle": "false"}


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


def key_of(override: str) -> str:
    """Returns the key of an override.

    >>> key_of("data.path=test.txt")
    'data.path'
    """
    return ".".join(word.strip() for word in override.partition("=")[0].split("."))


def check_overrides(overrides: Sequence[str]) -> list[Problem]:
    """Returns a problem for each override that an evaluation does not read; `loads` reports malformed ones."""
    problems = []
    for override in overrides:
        section, _, rest = key_of(override).partition(".")
        if rest and section not in SECTIONS and (section != "train" or rest.partition(".")[0] not in TRAIN):
            rule = f"an evaluation reads {', '.join(SECTIONS)} and train.{', train.'.join(TRAIN)}"
            problems.append(Problem(f"override {override!r:.200}", rule, "leave it out, or data.path=FILE"))
    return problems


def choose_data(overrides: Sequence[str]) -> DataChoice:
    """Returns the examples that the overrides ask for."""
    words = [key_of(override).split(".") for override in overrides]
    keys = {parts[1] for parts in words if parts[0] == "data" and len(parts) > 1}
    sets = [parts[2] for parts in words if parts[:2] == ["data", "sets"] and len(parts) > 2]
    return DataChoice(
        is_other=bool(keys & {*OTHER_DATA}), is_held_out="held_out" in keys, sets=tuple(dict.fromkeys(sets))
    )


def with_defaults(overrides: Sequence[str], choice: DataChoice) -> list[str]:
    """Adds the keys that other data do not inherit from the run: all of its examples are evaluated, in order."""
    defaults = OF_RUN if choice.is_other else {}
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
        section, _, key = key_of(override).partition(".")
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
