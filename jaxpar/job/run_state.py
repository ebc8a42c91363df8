"""Restores the state of a run from its folder alone: for `jaxpar sample`, and for `jp.model("runs/mine")`.

    RUN/job.toml     ─► model, optimizer ─► layout ─┐
    RUN/data         ─► its tokenizer               ├─► state ─► the user's model
    RUN/checkpoints  ───────────────────────────────┘

The data that the run was trained on may be gone.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpar.buckets import pull_folder
from jaxpar.checkpoint import Store
from jaxpar.errors import refuse
from jaxpar.exchange.base import NO_MODEL
from jaxpar.job.file.run_folder import NAME, job_of
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import with_saved_tokenizer
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.mesh.devices import visible_devices
from jaxpar.parallel.compose import compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.step import state
from jaxpar.step.model import model
from jaxpar.step.state import State


def restore_run(job: Job, folder: Path, parallel: Parallel, *, at: int | None = None) -> tuple[Layout, State]:
    """Restores a checkpoint of a run on a layout of its own; replicas that differ become their mean.

    Args:
      job: The job of the run folder.
      folder: The run folder.
      parallel: The declaration; the default one is for the first device, any other for all visible devices.
      at: The step of the checkpoint; None takes the newest intact one.

    Raises:
      JaxparError: If there is no checkpoint, it is damaged, or it does not fit.
    """
    blueprint = resolve_model(job, resolve_loss(job))
    devices: Any = visible_devices()
    layout = compose(blueprint, parallel, devices[:1] if parallel == Parallel() else devices)
    shapes = state.abstract(layout, resolve_optimizer(job, layout.blueprint))
    places = state.shardings(layout, shapes)
    shapes = jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, places)
    spec = replace(job.checkpoint, replicas="mean")
    store = Store(folder / "checkpoints", spec, say=partial(print, file=sys.stderr), is_owner=False)
    return layout, store.restore(shapes, at)[0]


def load_model(
    folder: str | Path,
    *,
    parallel: Parallel | None = None,
    at: int | None = None,
    device: Any = None,
    allow_import: bool = False,
) -> Any:
    """Implements `jp.model` of a run folder; see there for the arguments.

    Raises:
      JaxparError: If the folder has no job or no checkpoint, the run trained several models, or its model is not found.
    """
    path = pull_folder(folder)
    if not (path / NAME).is_file():
        raise refuse(
            f"jp.model of {str(folder)!r:.200}, which holds no {NAME}" + ("" if path.is_dir() else ": it is no folder"),
            rule="the folder of a run of `jaxpar train` says which model was trained",
            fix="jp.model(step.layout, jp.restore(folder, step)), with the step of a run of jp.fit",
        )
    job = job_of(path, allow_import=allow_import)
    if job.sweep.over or job.effective_parallel.exchange.global_model == NO_MODEL:
        raise refuse(
            f"jp.model of {str(folder)!r:.200}, a run of several models",
            rule="one model is returned",
            fix="jp.model(layout, state, replica=0), of a state that jp.restore returns",
        )
    layout, restored = restore_run(with_saved_tokenizer(job, path), path, parallel or Parallel(), at=at)
    return model(layout, restored, device=device)
