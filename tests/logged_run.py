"""A run as its loggers see it, which `train/test_loggers.py` kills at any step; and readers of what each library wrote.

python tests/logged_run.py RUN LOGGER START END [kill] [FACTOR]
"""

import json
import os
import signal
import struct
import sys
from pathlib import Path

from jaxpar.train.loggers.base import LoggedRun
from jaxpar.train.loggers.services import open_logger
from jaxpar.train.metrics import Log

EVERY = 3  # steps between two evaluations
CONFIG = {"train.steps": "12", "versions.jax": "1.2.3", "report": "RUN/report.html"}
TEXTS = {"job": "[train]\nsteps = 12", "layout": "kernel  fsdp"}


def expected(first, last, factor=1.0):
    """The curves of the steps first..last."""
    steps = range(first, last + 1)
    losses = [(step, factor / step) for step in steps]
    return {"loss": losses, "eval_loss": [(step, 2 * loss) for step, loss in losses if step % EVERY == 0]}


def write(folder, logger, start, end, *, kill=False, factor=1.0):
    folder.mkdir(exist_ok=True)
    run = LoggedRun(folder=folder, config=CONFIG, texts=TEXTS)
    log = Log(folder, start=start, loggers=[open_logger(logger, "loggers")], run=run)
    for step in range(start + 1, end + 1):
        log.write({"step": step, "loss": factor / step, "seconds": 0.1, "grad_norm": float("nan")})
        if step % EVERY == 0:
            log.amend({"eval_loss": 2 * factor / step}, step=step)
    if kill:
        os.killpg(0, signal.SIGKILL)
    log.close()


def _points(rows):
    return {name: [(step, value) for step, values in rows for key, value in values.items() if key == name]
            for name in ("loss", "eval_loss")}  # fmt: skip


def read_tensorboard(folder):
    """Reads event files as TensorBoard does: a start drops the steps of earlier files from its own on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    rows, texts = [], {}
    for file in sorted((folder / "tensorboard").glob("events*")):
        data, at = file.read_bytes(), 0
        while at + 12 <= len(data):
            size = struct.unpack_from("<Q", data, at)[0]
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                rows = [(step, values) for step, values in rows if step < event.step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    rows.append((event.step, {value.tag: value.simple_value}))
                else:
                    texts[value.tag.removesuffix("/text_summary")] = value.tensor.string_val[0].decode()
    return _points(rows), texts


def read_wandb(folder):
    """Reads the records that `wandb sync` would upload."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    data, at, part, rows, config = file.read_bytes(), 7, b"", [], {}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # records do not cross blocks
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part = (b"" if kind in (1, 2) else part) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = Record.FromString(part)
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.append((record.history.step.num, items))
            if record.HasField("run"):
                config |= {item.key or item.nested_key[0]: item.value_json for item in record.run.config.update}
    assert file.stem == f"run-{json.loads((folder / 'loggers.json').read_text())['wandb'][-1]}"
    return _points(rows), config


def read_mlflow(folder):
    """Reads the newest run from the store, by MLflow's client."""
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    run = json.loads((folder / "loggers.json").read_text())["mlflow"][-1]
    points = {
        name: [(point.step, point.value) for point in client.get_metric_history(run, name)]
        for name in ("loss", "eval_loss")
    }
    files = {path.stem: path.read_text() for path in (folder / "mlflow" / "files").rglob("*.txt")}
    return points, client.get_run(run).data.params | files


def read_trackio(folder):
    """Reads the run from the database."""
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    (run,) = SQLiteStorage.get_runs("jaxpar")
    rows = [(row["step"], row) for row in SQLiteStorage.get_logs("jaxpar", run)]
    return _points(rows), SQLiteStorage.get_run_config("jaxpar", run)


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}

if __name__ == "__main__":
    to, name, begin, last, *more = sys.argv[1:]
    if name == "read":  # in a process of its own, as libraries read their folder from the environment once
        print(json.dumps(READERS[begin](Path(to))))
    else:
        numbers = [float(word) for word in more if word != "kill"]
        write(Path(to), name, int(begin), int(last), kill="kill" in more, factor=(numbers or [1.0])[0])
