"""`jp.fit`: the training loop of a job as one Python call.

    from jaxpar.checkpoint import Checkpoints
    from jaxpar.train.run import Best

    wiki = jp.Data(source="text", path="wiki.txt", tokenizer="my-llama")  # tokenizer of the training data
    jp.fit(step, data, steps=200, batch=16, run="runs/mine", eval_every=50, sets={"wiki": wiki},
           checkpoints=Checkpoints(every=50, keep_best=1), best=Best(metric="eval_wiki_loss", patience=3))

RUN/metrics.jsonl   a line per step       RUN/checkpoints/    the state
RUN/events.jsonl    printed messages      RUN/run.json        devices, mesh, layout

The same call continues from the newest checkpoint of its folder, bit for bit under the same layout.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jaxpar.buckets import Bucket, is_address, local_folder
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.checkpoint.processes import is_first, is_multiprocess
from jaxpar.checkpoint.saved_replicas import describe_replicas
from jaxpar.checkpoint.start_from import start
from jaxpar.data.spec import Source
from jaxpar.data.streams.sets import open_sets
from jaxpar.data.validate import BatchSpec
from jaxpar.errors import refuse
from jaxpar.files import make_folder, write_json
from jaxpar.mesh.devices import describe, is_simulated
from jaxpar.step.checks.input_state import check_not_donated
from jaxpar.step.init_state import init_state
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train.api.fit_inputs import (
    check_arguments,
    check_evaluated,
    check_loggers,
    check_profile,
    check_same_data,
    count_held_out,
    describe_split,
    open_fit_data,
)
from jaxpar.train.api.saving import FOLDER
from jaxpar.train.faults import Faults, SkippedBatches, Watch
from jaxpar.train.lock import Lock
from jaxpar.train.loggers.base import LoggedRun
from jaxpar.train.loggers.services import open_logger
from jaxpar.train.loop import run as train
from jaxpar.train.memory_explanation import explained_state
from jaxpar.train.metrics import Log
from jaxpar.train.progress import Progress, say_and_record
from jaxpar.train.run import Best, Outcome, Run
from jaxpar.train.step_trace import StepTrace

USUAL = Checkpoints()
NO_SETS: Mapping[str, Any] = MappingProxyType({})


def fit(
    step: Step,
    data: object,
    *,
    steps: int,
    batch: int,
    run: str | Path | None = None,
    state: State | None = None,
    seed: int = 0,
    checkpoints: Checkpoints = USUAL,
    eval_every: int = 0,
    sets: Mapping[str, object] = NO_SETS,
    best: Best | None = None,
    faults: Faults | None = None,
    loggers: Sequence[object] = (),
    show_every: int = 20,
    profile: Sequence[int] = (),
    held_out: float | None = None,
) -> Outcome:
    """Trains until step `steps`, with checkpoints, resumption and evaluations. Ctrl-C and SIGTERM save and end it.

    Args:
      step: The result of `jp.train_step`.
      data: The result of `jp.open_data`, a dict of arrays, an object with `batch(step, size)`, or an iterable of
        batches. Its held-out examples are evaluated; a line at the beginning says how many there are.
      steps: The last step of the whole run.
      batch: Examples per step, over all devices.
      run: The run folder, to which the run is saved and from which it resumes; None writes nothing.
      state: The initial state of a new run, whose arrays are donated; None initializes one from `seed`.
      seed: Seed of the initial parameters of a new run.
      checkpoints: When checkpoints are written, which are retained, and which one a new run starts from: the
        [checkpoint] table of a job.
      eval_every: Steps between two evaluations; 0 evaluates at the end only.
      sets: Evaluation sets by name, evaluated as eval_NAME_loss: a `jp.Data` (all of it), an object with
        `evaluation(index, size)`, a dataset indexed by number, a dict of arrays, or an iterable of batches.
      best: The comparison of evaluations, and the patience of early stopping; None compares as `checkpoints` does.
      faults: The reaction to losses that are NaN, infinite or a spike, and to corrupt batches. None stops at such a
        loss, names the numbers of its batch that are not finite, and checks no batch before its step.
      loggers: Objects with `log(step, values)`, or names: tensorboard, wandb, mlflow, trackio. They need `run`.
      show_every: Steps between two printed lines.
      profile: (first, last): the profiler of JAX traces these steps, both of them and those between, to RUN/profile.
      held_out: Share of the examples that is held out for evaluation, of a dict of arrays or of a dataset with numbered
        examples; None is 0.02 there, 0 trains on all examples. The result of `jp.open_data` has a share of its own.

    Returns:
      The last `state`, the row of metrics of the `last` step, and the signal that it was `stopped_by`, or None.

    Raises:
      JaxparError: If an argument is invalid, the folder belongs to other data, a state does not fit, or a step is bad.
    """
    numbers = {"steps": steps, "batch": batch, "show_every": show_every}
    checkpoints, best = check_arguments(step, numbers, run, state, checkpoints, best, eval_every, faults)
    check_loggers(loggers, run)
    check_profile(profile, steps, run)
    folder = None if run is None else local_folder(run)
    bucket = _bucket(run)
    with _folder_lock(folder), bucket.synchronized() if bucket else nullcontext():
        source = open_fit_data(data, folder, held_out)
        eval_sets = open_sets(sets, (folder or Path("runs")) / "data", batch)
        check_evaluated(source, eval_sets, batch, eval_every, checkpoints, best)
        store, progress = _store(folder, checkpoints, source, step=step, steps=steps, every=show_every)
        if store and bucket:
            store.on_commit = bucket.push
        with explained_state(step.layout, step.optimizer, offload=step.numerics.offload):
            state, first = _initial_state(step, store, state, checkpoints, seed=seed, say=progress.say)
            jax.block_until_ready(state.step)  # XLA may report only here that it could not allocate the arrays
        log = _log(folder, first, loggers, step=step, source=source, say=progress.say, config=numbers | {"seed": seed})
        settings = Run(
            step=step, source=source, steps=steps, global_batch=batch, eval_every=eval_every, sets=eval_sets,
            checkpoints=checkpoints, store=store, log=log, progress=progress, best=best,
            watch=Watch(faults or Faults(), log.recent if log else [], span=steps, skipped=log.skipped if log else 0),
            good=BatchSpec() if faults and faults.on_bad_batch == "skip" else None,
            skipped=SkippedBatches(folder, fresh=not first) if folder else None,
            trace=StepTrace(folder if is_first() else None, profile, progress.say),
        )  # fmt: skip
        return _train(settings, progress, state, first)


def _bucket(run: str | Path | None) -> Bucket | None:
    """Returns the bucket of a run, or None if `run` is not a bucket address.

    Raises:
      JaxparError: If several processes would write to the bucket.
    """
    if run is None or not is_address(run):
        return None
    if is_multiprocess():
        raise refuse(
            f"run={str(run)!r:.200} with several processes",
            rule="several processes write one folder, each its part",
            fix="a bucket that is mounted on all hosts, and its folder",
        )
    return Bucket(run)


@contextmanager
def _folder_lock(folder: Path | None) -> Iterator[None]:
    """Creates and locks the run folder."""
    if folder:
        make_folder(folder)
    with Lock(folder, say_and_record(folder, print)) if folder and is_first() else nullcontext():
        yield


def _store(
    folder: Path | None, saved: Checkpoints, source: Source, *, step: Step, steps: int, every: int
) -> tuple[Store | None, Progress]:
    """Returns the checkpoint store (or None) and the progress; refuses a folder that belongs to other data."""
    store = Store(folder / FOLDER, saved) if folder else None
    there = store.steps() if store else []
    progress = _progress(step, folder, steps, there=bool(there), every=every)
    if store and folder:
        store.say, store.replicas = progress.say, describe_replicas(step.layout)
        if there:
            check_same_data(folder, source)
    return store, progress


def _log(
    folder: Path | None,
    first_step: int,
    loggers: Sequence[object],
    *,
    step: Step,
    source: Source,
    say: Callable[[str], None],
    config: Mapping[str, object],
) -> Log | None:
    """Returns the log of metrics, and writes run.json."""
    if not folder:
        return None
    writes = is_first()
    contents = facts(step, source) if writes else {}
    if writes:
        write_json(folder / "run.json", contents)
    opened = [open_logger(each, "loggers") if isinstance(each, str) else each for each in loggers if writes]
    logged_run = _logged_run(folder, step, config, contents) if opened else None
    return Log(folder, start=first_step, writes=writes, loggers=opened, run=logged_run, say=say)


def _logged_run(folder: Path, step: Step, config: Mapping[str, Any], written: Mapping[str, Any]) -> LoggedRun:
    tables = {f"{table}.{key}": value for table in ("versions", "mesh") for key, value in written[table].items()}
    names = {"devices": written["devices"], "report": str(folder.resolve() / "report.html")}
    return LoggedRun(folder=folder, config={**config, **tables, **names}, texts={"layout": step.layout.explain()})


def _initial_state(
    step: Step, store: Store | None, state: State | None, saved: Checkpoints, *, seed: int, say: Callable[[str], None]
) -> tuple[State, int]:
    """Returns the initial state and its step: from the newest checkpoint, or for a new run."""
    if store and store.steps():
        return store.restore(step.abstract())
    if state is None:
        state = init_state(step.layout, step.optimizer, seed=seed)
    else:
        check_not_donated(state)
    if saved.start_from:
        state, origin = start(saved, state, step.layout, step.optimizer)
        say(str(origin))
    return state, 0


def _train(run: Run, progress: Progress, state: State, at: int) -> Outcome:
    with progress:
        progress.resume(at)
        begun = f", on from step {at}" if at else ""
        devices = describe(list(run.step.layout.device_mesh.devices.flat))
        lines = [run.step.layout.summary(), f"{devices}{begun}", describe_split(run.source)]
        progress.say("\n".join(filter(None, lines)))
        try:
            return train(run, state)
        finally:
            if run.store:
                run.store.close()
            if run.log:
                run.log.close()


def facts(step: Step, source: Source) -> dict[str, Any]:
    """Returns the contents of run.json: devices, versions, data and layout, which `jaxpar report` reads."""
    layout = step.layout
    return {
        "devices": describe(list(layout.device_mesh.devices.flat)),
        "versions": {name: version(name) for name in ("jaxpar", "jax", "flax", "optax")},
        "mesh": layout.sizes,
        "data": source.fingerprint,
        "held_out": count_held_out(source),
        "parameters": sum(place.leaf.size for place in layout.placements.values()),
        "chosen": [*layout.notes],
        "summary": layout.summary(),
        "placed": {path: layout.describe(path) for path in layout.placements},
        "layout": layout.to_dict(),
    }


def _progress(step: Step, folder: Path | None, steps: int, *, there: bool, every: int) -> Progress:
    events = folder / "events.jsonl" if folder and is_first() else None
    if events and not there:
        events.unlink(missing_ok=True)
    quiet = None if is_first() else io.StringIO()
    simulated = is_simulated(step.layout.device_mesh.devices.flat)
    return Progress(steps, every=every, unit="loss terms", simulated=simulated, events=events, stream=quiet)
