"""Checks the arguments of `jp.fit`, alone and against each other, and opens its data, before the run starts.

A run folder that belongs to other data is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import Checkpoints
from jaxpar.data.spec import Data, Source
from jaxpar.data.streams.sets import EvaluationSet
from jaxpar.data.streams.user_data import open_user_data
from jaxpar.data.text import Examples
from jaxpar.errors import JaxparError, Problem, file_errors, refuse
from jaxpar.models.huggingface.folder import is_folder
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train.faults import Faults
from jaxpar.train.loggers.services import check_name
from jaxpar.train.run import Best
from jaxpar.train.step_trace import check_steps

VALUES = {
    "checkpoints": (Checkpoints, "from jaxpar.checkpoint import Checkpoints; checkpoints=Checkpoints(every=50)"),
    "best": (Best | None, "from jaxpar.train.run import Best; best=Best(metric='eval_loss', patience=3)"),
    "faults": (Faults | None, "from jaxpar.train.faults import Faults; faults=Faults(on_bad_step='skip')"),
}


def check_arguments(
    step: Any,
    numbers: Mapping[str, Any],
    run: object,
    state: State | None,
    checkpoints: Checkpoints,
    best: Best | None,
    eval_every: Any,
    faults: Faults | None,
) -> tuple[Checkpoints, Best]:
    """Checks the arguments of `jp.fit`; returns `checkpoints` and `best`, both with the same metric.

    Args:
      step: The step.
      numbers: Arguments that must be positive integers, by name.
      run: The run folder, or None.
      state: The initial state, or None.
      checkpoints: The argument `checkpoints`.
      best: The argument `best`, or None.
      eval_every: Steps between two evaluations.
      faults: The argument `faults`, or None.

    Raises:
      JaxparError: With a problem for each argument that is invalid or contradicts another.
    """
    given = {"checkpoints": checkpoints, "best": best, "faults": faults}
    problems = [*_steps(step, numbers, eval_every), *_values(given)]
    if not problems:
        problems = [*_combination_problems(step, given, run, eval_every), *_beginning(checkpoints, state)]
    if problems:
        raise JaxparError(*problems)
    lowest = checkpoints.best_is == "lowest"
    if best is None:
        return checkpoints, Best(metric=checkpoints.best, lowest=lowest)
    return replace(checkpoints, best=best.metric, best_is="lowest" if best.lowest else "highest"), best


def check_loggers(loggers: Sequence[object], run: object) -> None:
    """Checks the argument `loggers` of `jp.fit`.

    Raises:
      JaxparError: If a name is unknown or its library not installed, an object has no method `log`, or there is no run
        folder.
    """
    if loggers and run is None:
        rule = "loggers receive the rows that a run keeps in its folder"
        raise refuse("jp.fit with loggers and without run", rule=rule, fix='run="runs/mine"')
    for logger in loggers:
        if isinstance(logger, str):
            check_name(logger, "loggers")
        elif not callable(getattr(logger, "log", None)):
            rule = "a logger is a name, or an object with log(step, values)"
            raise refuse(f"loggers: {logger!r:.60}", rule=rule, fix='loggers=["tensorboard"]')


def check_profile(profile: Sequence[int], steps: int, run: object) -> None:
    """Checks the argument `profile` of `jp.fit`.

    Raises:
      JaxparError: If it is not the first and the last step of a trace, or there is no run folder.
    """
    if profile and run is None:
        raise refuse(f"profile={profile!r:.60} without run", rule="a trace is written to the run folder",
            fix='run="runs/mine"')  # fmt: skip
    check_steps(profile, steps, "profile")


def check_evaluated(
    source: Source, sets: Mapping[str, EvaluationSet], size: int, eval_every: int, saved: Checkpoints, best: Best
) -> None:
    """Refuses settings that need an evaluation if there are no examples for it.

    Raises:
      JaxparError: If neither the source nor a set has held-out examples; if evaluations are compared by `eval_loss`,
        and only sets have examples.
    """
    asked = {"eval_every": eval_every, "checkpoints.keep_best": saved.keep_best}
    said = [f"{key}={value}" for key, value in asked.items() if value]
    if said and not sets and not source.evaluation(0, size):
        raise refuse(
            f"jp.fit with {' and '.join(said)}, and data holds no example out",
            rule="a run is evaluated on examples that are held out",
            fix='sets={"held": what holds them}, evaluation(index, size) in data, or without what asks for it',
        )
    compared = best.metric == Best.metric and (best.patience or saved.keep_best)
    if sets and compared and not source.evaluation(0, size):
        raise refuse(
            f"best.metric = {best.metric!r}, and data holds no example out",
            rule=f"an evaluation has {', '.join(f'eval_{name}_loss' for name in sets)}",
            fix=f'best=Best(metric="eval_{next(iter(sets))}_loss")',
        )


def _steps(step: object, numbers: Mapping[str, object], eval_every: object) -> list[Problem]:
    problems = []
    if not isinstance(step, Step):
        rule = "a step is what jp.train_step returns"
        problems.append(Problem(f"jp.fit with step={step!r:.60}", rule, "jp.train_step(layout, loss, optimizer)"))
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            problems.append(Problem(f"{key}={number!r:.60}", f"{key} is a positive whole number", f"{key}=16"))
    if isinstance(eval_every, bool) or not isinstance(eval_every, int) or eval_every < 0:
        rule = "eval_every is a number of steps, or 0"
        problems.append(Problem(f"eval_every={eval_every!r:.60}", rule, "eval_every=50"))
    return problems


def _values(given: Mapping[str, object]) -> list[Problem]:
    return [
        Problem(f"{key}={value!r:.60}", f"{key} is a value of the class of that name", VALUES[key][1])
        for key, value in given.items()
        if not isinstance(value, VALUES[key][0])
    ]


def _combination_problems(step: Step, given: Mapping[str, Any], run: object, eval_every: int) -> list[Problem]:
    """Returns the problems of arguments that contradict or require each other."""
    saved, best, faults = given["checkpoints"], given["best"], given["faults"]
    problems = []
    said = (saved.best, saved.best_is)
    if (
        best
        and said != (Checkpoints.best, Checkpoints.best_is)
        and said != (best.metric, "lowest" if best.lowest else "highest")
    ):
        got = f"checkpoints.best = {saved.best!r} ({saved.best_is}), best = {best}"
        problems.append(Problem(got, "evaluations are compared in one way", "leave checkpoints.best and best_is out"))
    if best and best.patience and not (eval_every and run is not None):
        rule = "early stopping needs regular evaluations, and a run folder that keeps their results"
        problems.append(Problem(f"best.patience = {best.patience}", rule, 'eval_every=50, run="runs/mine"'))
    if run is None and saved not in (Checkpoints(), _start_fields(saved)):
        rule = "checkpoints are kept in the folder of a run"
        problems.append(Problem(f"{saved} without run", rule, 'run="runs/mine"'))
    if faults and faults.on_bad_step == "rollback" and run is None:
        rule = "a rollback goes to a checkpoint of the run's folder"
        problems.append(Problem("faults.on_bad_step = 'rollback' without run", rule, 'run="runs/mine"'))
    if faults and faults.on_bad_batch == "skip" and run is None:
        rule = "a run that resumes skips the same batches, which its folder lists"
        problems.append(Problem("faults.on_bad_batch = 'skip' without run", rule, 'run="runs/mine"'))
    if faults and faults.on_bad_step == "skip" and not step.guard:
        rule = "updates are skipped inside the compiled step, which is told so"
        problems.append(Problem("faults.on_bad_step = 'skip'", rule, "jp.train_step(..., guard=True)"))
    return problems


def _start_fields(saved: Checkpoints) -> Checkpoints:
    """Returns a copy with only the fields that choose the checkpoint that a new run starts from."""
    return Checkpoints(start_from=saved.start_from, take=saved.take, rename=saved.rename, cast=saved.cast)


def _beginning(saved: Checkpoints, state: State | None) -> list[Problem]:
    if saved.start_from and state is not None:
        rule = "a new run begins with one state"
        return [Problem(f"state, and checkpoints.start_from = {saved.start_from!r}", rule, "one of the two")]
    if saved.rules:
        rule = "rules of a Hugging Face folder are for jobs; in Python its weights are parameters of the first state"
        fix = "jp.fit(..., state=jp.init_state(layout, optimizer, params=jp.from_huggingface(folder, model, rules)))"
        return [Problem(f"checkpoints.rules = {saved.rules!r}", rule, fix)]
    if is_folder(saved.start_from):
        rule = "a folder of Hugging Face's begins the run of a job, which knows its model and tokenizer"
        fix = f'model.name = "{saved.start_from}" in a job: jaxpar train JOB'
        return [Problem(f"checkpoints.start_from = {saved.start_from!r}", rule, fix)]
    return []


def open_fit_data(data: Any, folder: Path | None, held_out: float | None) -> Source:
    """Opens the argument `data` of `jp.fit`.

    Args:
      data: The result of `jp.open_data`, or the user's object.
      folder: The run folder, or None.
      held_out: Share of the examples that is held out; None is `Data.held_out` where a share can be held out.

    Raises:
      JaxparError: If `data` is no source, or `held_out` is given for data of which it cannot hold out a share.
    """
    if isinstance(data, Data):
        raise refuse(f"data={data!r:.60}", rule="data is opened before it is read", fix="jp.open_data(data)")
    if type(data).__module__.startswith("jaxpar.data."):
        if held_out is not None:
            rule = "data that is open has its share held out already"
            raise refuse(f"held_out={held_out!r:.60}, and data of jp.open_data", rule=rule,
                         fix=f"jp.open_data(jp.Data(..., held_out={held_out!r:.60}))")  # fmt: skip
        return data
    spec = Data(source="yours:data", held_out=Data.held_out if held_out is None else held_out)
    source = open_user_data(spec, data, (folder or Path("runs")) / "data")
    if held_out is not None and not isinstance(source, Examples):
        rule = "a share is held out of a dict of arrays, or of a dataset without an evaluation of its own"
        raise refuse(f"held_out={held_out!r:.60}, and data is a {type(data).__name__}", rule=rule,
                     fix='leave it out; sets={"name": examples} evaluates others')  # fmt: skip
    return source


def count_held_out(source: Source) -> int | None:
    """Returns the number of held-out examples; None if the user's own source does not define it."""
    return getattr(source, "held_out_count", None)


def describe_split(source: Source) -> str:
    """Describes how many examples are held out; "" if the source does not know."""
    count = count_held_out(source)
    if count is None:
        return ""
    share = f" (held_out={source.spec.held_out:g})" if isinstance(source, Examples) else ""
    return f"data: {source.examples:,} examples to train on, {count:,} held out for evaluation{share}"


def check_same_data(folder: Path, source: Source) -> None:
    """Checks that a run that is resumed has the data of its run.json, with the same examples held out.

    Raises:
      JaxparError: If the data differs, examples that were held out would be trained on, or the file is damaged.
    """
    file = folder / "run.json"
    if not file.exists():
        return
    with file_errors(file, rule="run.json records the data of a run", fix=f"rm {file}, if the data is the same"):
        facts = json.loads(file.read_text())
        before, split = facts["data"], facts.get("held_out")
    if before != source.fingerprint:
        raise refuse(
            f"{folder} was trained on data {before}, now it is {source.fingerprint}",
            rule="a run goes on with the data it began with",
            fix="another run=, or the data it began with",
        )
    count = count_held_out(source)
    if split is not None and split != count:
        raise refuse(
            f"{folder} held out {split} examples, now {count} are",
            rule="a resumed run holds out the same examples, so that none of them was trained on",
            fix="another run=, or the same held_out as at its start",
        )
