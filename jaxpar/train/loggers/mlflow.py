"""MLflow. `MLFLOW_TRACKING_URI` says where to; by default RUN/mlflow/mlflow.db, a file of SQLite.

    mlflow ui --backend-store-uri sqlite:///RUN/mlflow/mlflow.db

MLflow never deletes a point, and draws a step twice that it got twice. So a resumed run reads the last step that MLflow
has of each metric, sends what comes after it, and does not send again what it has; its id is in RUN/loggers.json.
After a rollback, or with other settings, the steps have other values: the run goes on as a new run of MLflow, with all
rows from the first one, and the tag `jaxpar.replaces` names the one before.
"""

import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jaxpar.train.loggers.base import LoggedRun, load_ids, save_id

NAME = "mlflow"
EVERY = 1.0  # seconds between two writes: each takes some milliseconds, on a server more
LIMIT = 1000  # metrics of a batch, by MLflow's protocol


class MLflow:
    """Writes to a run of MLflow; `MLFLOW_EXPERIMENT_NAME` is its experiment, `jaxpar` by default."""

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
        ids = load_ids(run, NAME)
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
        if len(self._pending) >= LIMIT or time.monotonic() - self._written > EVERY:
            self._send()

    def close(self) -> None:
        """Writes the last values, and ends the run of MLflow."""
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._id)

    def _send(self) -> None:
        while self._pending:
            self._client.log_batch(self._id, metrics=self._pending[:LIMIT])
            del self._pending[:LIMIT]
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
        return save_id(run, NAME, created)


def _tracking_uri(run: LoggedRun) -> str:
    """Returns the store: that of the environment, or a file of SQLite in the run folder."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    (run.folder / "mlflow").mkdir(exist_ok=True)
    return f"sqlite:///{(run.folder / 'mlflow' / 'mlflow.db').resolve()}"
