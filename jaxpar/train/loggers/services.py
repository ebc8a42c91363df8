"""The loggers that jaxpar brings, by name, one class for each library, which is imported when its logger is opened."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from jaxpar.errors import refuse, suggest
from jaxpar.train.loggers.base import LoggedRun, load_ids, new_id, save_id

WANDB = "wandb"
MLFLOW = "mlflow"
MLFLOW_PAUSE = 1.0  # seconds between two writes: each takes some milliseconds, on a server more
MLFLOW_LIMIT = 1000  # metrics of a batch, by MLflow's protocol
TRACKIO, PROJECT = "trackio", "jaxpar"
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TensorBoard:
    """Writes TensorBoard's event files in RUN/tensorboard, by tensorboardX, which needs no TensorFlow.

        tensorboard --logdir RUN/tensorboard

    Each start adds a file. Its first events tell readers to drop the steps of earlier files from the one that it goes
    on from. That step is written again, because the run may have been killed after its loss and before its evaluation.
    Rows are on the disk before the checkpoint of their step, so none is missing. A logger that is added to a run later
    writes all rows.
    """

    def __init__(self):
        self._writer: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Begins an event file, which replaces the steps from `run.step` on."""
        # not `SummaryWriter`: its `flush` does not wait for the thread that writes, so a kill loses rows
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.summary import text as text_summary

        self.close()
        folder = run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        number = len([*folder.glob("events.out.tfevents.*")])
        # files have the second in their names, by which readers sort them: the number tells two of a second apart
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{number:06d}")
        start = import_module("tensorboardX.proto.event_pb2").SessionLog.START
        self._add(run.step or 1, session_log={"status": start})
        for step, values in run.rows():
            if not number or step == run.step:
                self._add_scalars(step, values)
        texts = {**run.texts, "config": "\n".join(f"{key} = {value}" for key, value in run.config.items())}
        for name, text in texts.items():
            block = "\n".join(f"    {line}" for line in text.splitlines())
            self._add(run.step, summary=text_summary(name, block))
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values of a step to the disk."""
        self._add_scalars(step, values)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_scalars(self, step: int, values: Mapping[str, object]) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._add(step, summary=scalar(name, value))

    def _add(self, step: int, **content: Any) -> None:
        event = import_module("tensorboardX.proto.event_pb2").Event
        self._writer.write_event(event(wall_time=time.time(), step=step, **content))


class WeightsAndBiases:
    """Writes to a run of Weights & Biases; `WANDB_PROJECT` is its project, `jaxpar` by default.

    `WANDB_MODE=offline` writes to RUN/wandb, and `wandb sync RUN/wandb/offline-run-*` uploads it. A resumed run keeps
    its id, which is in RUN/loggers.json. wandb cannot change steps that it has, so:

    offline   each start writes all rows from the first one to a new offline folder, and renames the folders before it
              to `earlier-…`: `wandb sync` replaces a run of the same id by the newest upload and would not join the
              parts
    online    wandb's `resume` continues the run, and only rows that the server does not have are sent. After a
              rollback, or with other settings, a new run with a new id begins, and gets all rows from the first one
    """

    def __init__(self):
        self._run: Any = None
        self._last = 0  # the last step that wandb has already

    def begin(self, run: LoggedRun) -> None:
        """Opens the run, and sends it all rows that it lacks."""
        wandb = import_module("wandb")
        self.close()
        ids = load_ids(run, WANDB)
        settings = wandb.Settings(console="off", silent=True)
        is_offline = os.environ.get("WANDB_MODE", settings.mode) in ("offline", "dryrun")
        if is_offline:
            _set_aside(run)
        if not ids or not (run.repeats or is_offline):
            ids = [save_id(run, WANDB, new_id())]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxpar"), id=ids[-1], name=run.name, dir=str(run.folder),
            config=dict(run.config) | dict(run.texts), settings=settings,
            resume=None if is_offline else "allow", allow_val_change=True,
        )  # fmt: skip
        self._last = 0 if is_offline else self._run.starting_step - 1
        for step, values in run.rows():
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends the values of a step, unless wandb has it."""
        if step > self._last:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finishes the run of wandb."""
        if self._run is not None:
            self._run.finish()


def _set_aside(run: LoggedRun) -> None:
    for folder in sorted((run.folder / "wandb").glob("offline-run-*")):
        folder.rename(folder.with_name(f"earlier-{folder.name}"))


class MLflow:
    """Writes to a run of MLflow; `MLFLOW_EXPERIMENT_NAME` is its experiment, `jaxpar` by default.

    `MLFLOW_TRACKING_URI` says where to; by default RUN/mlflow/mlflow.db, a file of SQLite:

        mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db

    MLflow never deletes a point, and draws a step twice that it got twice. So a resumed run reads the last step that
    MLflow has of each metric, sends what comes after it, and does not send again what it has; its id is in
    RUN/loggers.json. After a rollback, or with other settings, the steps have other values: the run goes on as a new
    run of MLflow, with all rows from the first one, and the tag `jaxpar.replaces` names the one before.
    """

    def __init__(self):
        self._client: Any = None
        self._id = ""
        self._last: dict[str, int] = {}  # metric -> the last step for which MLflow has a value
        self._pending: list[Any] = []
        self._written = 0.0

    def begin(self, run: LoggedRun) -> None:
        """Opens the run, and sends it all values that it lacks."""
        self._send()
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=_tracking_uri(run))
        ids = load_ids(run, MLFLOW)
        self._last = self._last_steps(ids[-1]) if ids else {}
        replaces = not run.repeats and max(self._last.values(), default=0) > run.step
        if not ids or replaces:
            self._id, self._last = self._create(run, ids), {}
        else:
            self._id = ids[-1]
            self._client.update_run(self._id, status="RUNNING")
        for name, text in run.texts.items():
            self._client.log_text(self._id, text, f"{name}.txt")
        for step, values in run.rows():
            self.log(step, values)
        self._send()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Queues the values that MLflow does not have yet, and writes the queue at most once a second."""
        metric, now = import_module("mlflow.entities").Metric, int(1000 * time.time())
        fresh = {name: value for name, value in values.items() if step > self._last.get(name, 0)}
        self._pending += [metric(name, float(value), now, step) for name, value in fresh.items()]
        if len(self._pending) >= MLFLOW_LIMIT or time.monotonic() - self._written > MLFLOW_PAUSE:
            self._send()

    def close(self) -> None:
        """Writes the last values, and ends the run of MLflow."""
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._id)

    def _send(self) -> None:
        while self._pending:
            self._client.log_batch(self._id, metrics=self._pending[:MLFLOW_LIMIT])
            del self._pending[:MLFLOW_LIMIT]
        self._written = time.monotonic()

    def _last_steps(self, name: str) -> dict[str, int]:
        metrics = self._client.get_run(name).data.metrics
        return {key: max(point.step for point in self._client.get_metric_history(name, key)) for key in metrics}

    def _create(self, run: LoggedRun, ids: list[str]) -> str:
        """Creates a run of MLflow with its configuration, which MLflow never changes; returns its id."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxpar")
        experiment = self._client.get_experiment_by_name(name)
        place = None if os.environ.get("MLFLOW_TRACKING_URI") else (run.folder / "mlflow" / "files").resolve().as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment(name, place)
        tags = {"jaxpar.folder": str(run.folder.resolve())} | ({"jaxpar.replaces": ids[-1]} if ids else {})
        created = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        param = import_module("mlflow.entities").Param
        params = [param(key, str(value)[:6000]) for key, value in run.config.items() if value != ""]
        for first in range(0, len(params), 100):
            self._client.log_batch(created, params=params[first : first + 100])
        return save_id(run, MLFLOW, created)


def _tracking_uri(run: LoggedRun) -> str:
    """Returns the store: that of the environment, or a file of SQLite in the run folder."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    (run.folder / "mlflow").mkdir(exist_ok=True)
    return f"sqlite:///{(run.folder / 'mlflow' / 'mlflow.db').resolve()}"


class Trackio:
    """Writes to a run of Trackio, in the project `jaxpar`.

    It lies in RUN/trackio, or in `TRACKIO_DIR` if it is set, so that several runs share a page:

        TRACKIO_DIR=RUN/trackio trackio show

    Trackio writes twice a second, and a kill loses what is not written. So each start of a local run writes all rows
    anew, from those of RUN/metrics.jsonl, and deletes what Trackio has of the run. In a Space or on a server
    (`TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`) nothing can be deleted: there each start is a run of its own in the group
    of the run folder, with all rows from the first one.
    """

    def __init__(self):
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Opens the run, and sends it all rows."""
        os.environ.setdefault("TRACKIO_DIR", str((run.folder / "trackio").resolve()))  # is read by the import
        with redirect_stdout(sys.stderr):  # where it prints
            trackio = import_module("trackio")
            self.close()
            ids = load_ids(run, TRACKIO)
            if not ids or any(os.environ.get(name) for name in REMOTE):
                ids = [save_id(run, TRACKIO, f"{run.name}-{new_id()}")]
            else:
                _delete(trackio, ids[-1])
            self._run = trackio.init(
                project=PROJECT, name=ids[-1], group=run.name, config=dict(run.config) | dict(run.texts), embed=False,
                auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip
        for step, values in run.rows():
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Queues the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Writes all that is queued."""
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()


def _delete(trackio: Any, name: str) -> None:
    try:
        runs = trackio.Api().runs(PROJECT)
    except ValueError:  # no project: the run was killed before Trackio wrote anything
        return
    for run in [run for run in runs if run.name == name]:
        run.delete()


@dataclass(frozen=True)
class LoggerEntry:
    """A row of `LOGGERS`.

    Attributes:
      kind: The class.
      libraries: The modules that must be installed.
    """

    kind: type
    libraries: tuple[str, ...]


LOGGERS = {
    "tensorboard": LoggerEntry(TensorBoard, ("tensorboardX",)),
    "wandb": LoggerEntry(WeightsAndBiases, ("wandb",)),
    "mlflow": LoggerEntry(MLflow, ("mlflow", "sqlalchemy", "alembic")),
    "trackio": LoggerEntry(Trackio, ("trackio",)),
}


def check_name(name: str, key: str) -> None:
    """Checks that a logger of this name exists and that its library is installed.

    Args:
      name: The name.
      key: The job's key or the argument, for messages.

    Raises:
      JaxparError: If there is none, or a module is not installed.
    """
    if name not in LOGGERS:
        raise refuse(
            f"{key} = {name!r}",
            rule=f'a logger is {", ".join(LOGGERS)}, or "package.module:Object" with log(step, values)',
            fix=suggest(name, LOGGERS),
        )
    missing = [module for module in LOGGERS[name].libraries if find_spec(module) is None]
    if missing:
        raise refuse(
            f"{key} = {name!r} without {missing[0]}",
            rule=f"the logger {name} writes by the package {missing[0]}, which is not installed",
            fix=f"pip install 'jaxpar[{name}]'",
        )


def open_logger(name: str, key: str) -> Any:
    """Returns the logger of a name; nothing is written before its `begin`.

    Raises:
      JaxparError: As `check_name`.
    """
    check_name(name, key)
    return LOGGERS[name].kind()
