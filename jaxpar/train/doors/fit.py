"""Training in one call: the loop of a job for whoever writes Python.

    jp.fit(step, data, steps=200, batch=16, run="runs/mine", save_every=50, eval_every=50)

RUN/metrics.jsonl   a line per step       RUN/checkpoints/    the state
RUN/events.jsonl    what was said         RUN/run.json        devices, mesh, layout

The same call goes on from the newest checkpoint of its folder, bit for bit under the same layout.
"""

import io
import json
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.checkpoint.processes import is_first
from jaxpar.data.spec import Data, Source
from jaxpar.data.streams.opening import open_own
from jaxpar.errors import JaxparError, Problem, reading, refuse
from jaxpar.files import make_folder, write_json
from jaxpar.mesh.devices import describe
from jaxpar.step.state import State, init_state
from jaxpar.step.step import Step
from jaxpar.train.best import Best
from jaxpar.train.doors.saving import FOLDER
from jaxpar.train.faults import Faults, Watch
from jaxpar.train.lock import Lock
from jaxpar.train.loop import run as train
from jaxpar.train.metrics import Log, Metrics
from jaxpar.train.progress import Progress
from jaxpar.train.run import Outcome, Run
from jaxpar.train.skipped_batches import SkippedBatches


def fit(
    step: Step,
    data: Any,
    *,
    steps: int,
    batch: int,
    run: str | Path | None = None,
    state: State | None = None,
    save_every: int = 0,
    eval_every: int = 0,
    show_every: int = 20,
    keep_best: int = 0,
    best: str = "eval_loss",
    highest: bool = False,
    patience: int = 0,
    loggers: Sequence[Any] = (),
    faults: Faults | None = None,
    seed: int = 0,
) -> Outcome:
    """Trains to a step; saves, resumes and evaluates on the way.

    Ctrl-C and SIGTERM end it after the step under way, which is saved.

    Args:
      step: As `jp.train_step` returns it.
      data: What `jp.open_data` returns, an object with `batch(step, size)`, or an iterable of batches. Examples that
        it holds out are evaluated.
      steps: The last step of the whole run.
      batch: Examples of a step, over all devices.
      run: The folder of the run, in which it saves itself at its end and goes on; None keeps nothing.
      state: What a new run begins with, which is given up; None makes it of `seed`.
      save_every: Steps between two checkpoints, of which the last two stay; 0 saves every 30 minutes.
      eval_every: Steps between two evaluations; 0 evaluates at the end.
      show_every: Steps between two lines.
      keep_best: How many of the best checkpoints stay besides.
      best: The metric of an evaluation by which they are compared.
      highest: Whether its highest value is the best.
      patience: Evaluations without a better one, after which it ends; 0 for none.
      loggers: Objects with `log(step, values)`.
      faults: What is done about losses that are NaN, infinite or a spike; None stops.
      seed: Of the parameters of a new run.

    Returns:
      The last `state`, the row of metrics of the `last` step, and the signal that it was `stopped_by`, or None.

    Raises:
      JaxparError: If an argument is none, the folder is of other data, a state does not fit, or a step goes wrong.
    """
    _check(step, steps=steps, batch=batch, show_every=show_every)
    saved = Checkpoints(every=save_every, keep_best=keep_best, best=best, best_is="highest" if highest else "lowest")
    judged = Best(metric=best, lowest=not highest, patience=patience)
    folder = None if run is None else Path(run)
    source = _source(data, folder)
    store = Store(folder / FOLDER, saved) if folder else None
    there, first = store.steps() if store else [], is_first()
    if folder:
        make_folder(folder)
    with Lock(folder, print) if folder and first else nullcontext():
        progress = _progress(step, folder, steps, there=bool(there), every=show_every)
        if store and folder:
            store.say = progress.say
            _check_same_data(folder, source, there)
        at = 0
        if store and there:
            state, at = store.restore(step.abstract())
        state = init_state(step.layout, step.optimizer, seed=seed) if state is None else state
        log = Log(folder, Metrics(), start=at, writes=first, loggers=loggers if first else ()) if folder else None
        if folder and first:
            write_json(folder / "run.json", facts(step, source))
        made = Run(
            step=step, source=source, steps=steps, global_batch=batch, eval_every=eval_every, checkpoints=saved,
            store=store, log=log, progress=progress, best=judged, good=None,
            watch=Watch(faults or Faults(), log.recent if log else [], span=steps, skipped=log.skipped if log else 0),
            skipped=SkippedBatches(folder, fresh=not there) if folder else None,
        )  # fmt: skip
        return _train(made, progress, state, at)


def _train(run: Run, progress: Progress, state: State, at: int) -> Outcome:
    with progress:
        begun = f", on from step {at}" if at else ""
        progress.say(f"{run.step.layout.summary()}\n{describe(list(run.step.layout.on.devices.flat))}{begun}")
        try:
            return train(run, state)
        finally:
            if run.store:
                run.store.close()
            if run.log:
                run.log.close()


def facts(step: Step, source: Source) -> dict[str, Any]:
    """Returns the facts of a run about its machine and layout, as `jaxpar report` reads them."""
    layout = step.layout
    return {
        "devices": describe(list(layout.on.devices.flat)),
        "versions": {name: version(name) for name in ("jaxpar", "jax", "flax", "optax")},
        "mesh": layout.sizes,
        "data": source.fingerprint,
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
    return Progress(steps, every=every, unit="loss terms", events=events, stream=quiet)


def _source(data: Any, folder: Path | None) -> Source:
    if type(data).__module__.startswith("jaxpar.data.") and not isinstance(data, Data):
        return data
    if isinstance(data, Data):
        raise refuse(f"data={data!r:.60}", rule="data is opened before it is read", fix="jp.open_data(data)")
    return open_own(Data(source="yours:data"), data, (folder or Path("runs")) / "data")


def _check_same_data(folder: Path, source: Source, there: list[int]) -> None:
    file = folder / "run.json"
    if not there or not file.exists():
        return
    with reading(file, rule="run.json is what a run says of its data", fix=f"rm {file}, if the data is the same"):
        before = json.loads(file.read_text())["data"]
    if before != source.fingerprint:
        raise refuse(
            f"{folder} was trained on data {before}, now it is {source.fingerprint}",
            rule="a run goes on with the data it began with",
            fix="another run=, or the data it began with",
        )


def _check(step: Any, **numbers: Any) -> None:
    problems = []
    if not isinstance(step, Step):
        rule = "a step is what jp.train_step returns"
        problems.append(Problem(f"jp.fit with step={step!r:.60}", rule, "jp.train_step(layout, loss, optimizer)"))
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            problems.append(Problem(f"{key}={number!r:.60}", f"{key} is a positive whole number", f"{key}=16"))
    if problems:
        raise JaxparError(*problems)
