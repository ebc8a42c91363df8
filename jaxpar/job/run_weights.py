"""Weights of a run: restored from its folder alone, started from a Hugging Face decoder, or exported as one.

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

from jaxpar.buckets import local_folder, pull_folder
from jaxpar.checkpoint import Store, listing, reading, saved_replicas
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.data.tokens import TOKENIZER_FOLDER
from jaxpar.errors import refuse
from jaxpar.exchange.base import NO_MODEL
from jaxpar.files import write_json
from jaxpar.job.build import BuiltJob
from jaxpar.job.file.run_folder import NAME, read_job
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import data_ends, end_tokens, with_saved_tokenizer
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.names import PREFERENCES
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.job.parts.pretrained_start import check_start, decoder_settings, import_rules
from jaxpar.mesh.devices import visible_devices
from jaxpar.models.huggingface.folder import (
    CONFIG,
    EOS,
    GENERATION,
    SMALL_FILES,
    copy_small_files,
    end_ids,
    is_folder,
    read_config,
)
from jaxpar.models.huggingface.weights import export
from jaxpar.parallel.compose import as_blueprint, compose
from jaxpar.parallel.declaration import Parallel
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import merge_adapters
from jaxpar.sharding.names import leaves_by_path
from jaxpar.step import state
from jaxpar.step.initial_params import start_from_params
from jaxpar.step.model import model
from jaxpar.step.state import State

HUGGINGFACE_FOLDER = "huggingface"  # folder in a run folder with the small files of its pretrained model


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
    job = read_job(path, allow_import=allow_import)
    if job.sweep.over or job.effective_parallel.exchange.global_model == NO_MODEL:
        raise refuse(
            f"jp.model of {str(folder)!r:.200}, a run of several models",
            rule="one model is returned",
            fix="jp.model(layout, state, replica=0), of a state that jp.restore returns",
        )
    layout, restored = restore_run(with_saved_tokenizer(job, path), path, parallel or Parallel(), at=at)
    return model(layout, restored, device=device)


def start_run(built: BuiltJob) -> tuple[State, str]:
    """Returns the first state of a run with the parameters of `checkpoint.start_from`, and a message about it.

    Raises:
      JaxparError: If the folder cannot be read, or does not fit the job.
    """
    job = built.job
    start = check_start(job, built.layout)
    first_state = start_from_params(
        built.layout, built.optimizer, start.params, fresh=start.origin.fresh, seed=job.train.seed,
        offload=job.train.offload,
    )  # fmt: skip
    if jax.process_index() == 0:  # the folder may be gone when the run is exported
        source, to = Path(job.checkpoint.start_from).expanduser(), local_folder(job.run.dir) / HUGGINGFACE_FOLDER
        copy_small_files(source, to, names=(CONFIG, *SMALL_FILES))
    return first_state, f"{start.origin}, {start.kind}"


def _write_ends(job: Job, run: Path, to: Path) -> None:
    """Writes the run's end-of-text tokens into the exported configs, unless these include them already."""
    vocab = read_config(to / CONFIG).get("vocab_size", 0) if job.checkpoint.rules else decoder_settings(job).vocab
    ends = [token for token in end_tokens(job, run, run / HUGGINGFACE_FOLDER) if token < vocab]
    if not set(data_ends(job, run)) <= set(end_ids(to)):
        for file in (to / CONFIG, to / GENERATION):
            if file.is_file():
                write_json(file, read_config(file) | {EOS: ends if ends[1:] else ends[0]})


def _write_tokenizer(source: Path, to: Path) -> list[Path]:
    """Exports the tokenizer of a run without a pretrained model, and its bos token."""
    if (begin := read_tokenizer(source).special_id("bos_token")) is not None:
        write_json(to / CONFIG, read_config(to / CONFIG) | {"bos_token_id": begin})
    return copy_small_files(source, to)


def export_checkpoint(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Exports a checkpoint as a Hugging Face folder: evaluation parameters, with adapters merged.

    The model is jaxpar's decoder, or any model whose run started from such a folder with `checkpoint.rules`.

    Tokenizer, special ids and generation config come from the run's pretrained model; a run without one exports the
    tokenizer that it was trained with. The eos ids include the ends of the run's own documents and answers.

    Raises:
      JaxparError: If the checkpoint is damaged, is not of such a run, or Hugging Face has no such model.
    """
    path = listing.find(where, step).resolve()
    manifest = reading.read_manifest(path)
    run = path.parent.parent
    job = with_saved_tokenizer(read_job(run), run)
    settings = None if job.checkpoint.rules else decoder_settings(job)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    targets = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for name, array in saved_replicas.describe_as_one(manifest.arrays, manifest.replicas).items()
        if name.startswith("params/")
    }
    params = {
        name.removeprefix("params/"): value
        for name, value in saved_replicas.read_as_one(path, manifest, targets).items()
    }
    if job.train.adapters.rank or job.train.loss == PREFERENCES:
        params = leaves_by_path(merge_adapters(as_blueprint(resolve_model(job, resolve_loss(job))), params))
    origin = run / HUGGINGFACE_FOLDER if is_folder(run / HUGGINGFACE_FOLDER) else None
    files = (
        export(params, settings, to, origin=origin)
        if settings
        else _export_by_rules(job, params, to, run / HUGGINGFACE_FOLDER)
    )
    if not is_folder(run / HUGGINGFACE_FOLDER) and job.data.tokenizer not in OURS:
        files += _write_tokenizer(run / "data" / TOKENIZER_FOLDER, to)
    if job.data.is_text:
        _write_ends(job, run, to)
    return {"from": str(path), "to": str(to), "bytes": sum(file.stat().st_size for file in files)}


def _export_by_rules(job: Job, params: dict[str, Any], to: Path, origin: Path) -> list[Path]:
    from jaxpar.train.api.huggingface import write_by_rules  # other runs do not load it

    return write_by_rules(to, params, import_rules(job), origin=origin)
