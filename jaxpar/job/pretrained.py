"""Starts a run from a Hugging Face decoder, and exports a run's decoder as one."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Sharding

from jaxpar.buckets import local_folder
from jaxpar.checkpoint import listing, reading, saved_replicas
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.data.tokens import KEPT as KEPT_TOKENIZER
from jaxpar.errors import JaxparError, Problem, shape_differences
from jaxpar.files import write_json
from jaxpar.job.build import BuiltJob
from jaxpar.job.file.run_folder import job_of
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import data_ends, end_tokens, with_saved_tokenizer
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.names import PREFERENCES
from jaxpar.job.parts.pretrained_start import check_start, decoder_of
from jaxpar.models.blocks.int8 import QuantizedMatrix
from jaxpar.models.huggingface.export import export
from jaxpar.models.huggingface.folder import (
    ALONG,
    CONFIG,
    EOS,
    GENERATION,
    copy_small_files,
    end_ids,
    is_folder,
    read_config,
)
from jaxpar.parallel.compose import as_blueprint
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import SCALES, checkpoint_leaves, merge_adapters
from jaxpar.sharding.names import Leaf, by_path, path_of
from jaxpar.step.state import State, abstract, shardings, state_from_params

# Training begins with parameters that are there already, each device's part read or made on its own.


def start_from_params(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    params: Mapping[str, Any],
    *,
    fresh: Collection[str] = (),
    seed: int = 0,
    offload: bool = False,
) -> State:
    """Builds the state at step 0 from these parameters.

    Args:
      layout: The sharding of all arrays.
      optimizer: Any optax chain.
      params: Path to parameter, such as `Pretrained.params`: an object with `shape` that is indexed by slices and holds
        floats. If the job stores a matrix in 8 bits, it is read and rounded layer by layer.
      fresh: Paths of parameters to initialize as `init_state` does.
      seed: Seed of these parameters, and of dropout.
      offload: Whether to place the optimizer state in host memory.

    Raises:
      JaxparError: If parameters are missing, unexpected or of another shape; the message has all of them.
    """
    like = abstract(layout, optimizer)
    if problems := _differences(layout, params, fresh):
        raise JaxparError(*problems)
    placed = shardings(layout, like, offload=offload)
    parts = {path: part for path in params if path not in fresh for path, part in _parts(layout, path, params[path])}
    born = {
        path: _born(parts[path], place.leaf, layout.sharding(place.stored))
        for path, place in layout.placements.items()
        if path in parts
    }

    def begin(given, key) -> State:
        made, model_state = layout.blueprint.init(key)
        params = jax.tree_util.tree_map_with_path(lambda keys, leaf: given.get(path_of(keys), leaf), made)
        return state_from_params(layout, optimizer, params, model_state)

    given = () if layout.parallel.exchange.replicas_differ else (0,)  # the arrays of one model are no replica's
    return jax.jit(begin, out_shardings=placed, donate_argnums=given)(born, jax.random.key(seed))


def _parts(layout: Layout, path: str, value: Any) -> Iterator[tuple[str, Callable]]:
    """Yields the arrays of a parameter (in 8 bits also its scales), each with a function that reads a part of it."""
    each = layout.blueprint.adapters.get(path)
    if each is None or each.float_dtype is None:
        yield path, value.__getitem__
        return
    made = QuantizedMatrix(path, value, each.lead, each.inputs)
    yield path, made.int8_values
    yield f"{SCALES}/{path}", made.scales


def _born(read: Callable, leaf: Leaf, on: Sharding) -> jax.Array:
    """Places a parameter on its devices; reads a part only once if several devices hold it."""
    parts: dict[str, np.ndarray] = {}

    def part(index):
        key = str(index)
        if key not in parts:
            parts[key] = np.asarray(read(index), leaf.dtype)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, on, part)


def _differences(layout: Layout, params: Mapping[str, Any], fresh: Collection[str]) -> list[Problem]:
    shapes = {path: leaf.shape for path, leaf in checkpoint_leaves(layout.blueprint).items() if path not in fresh}
    found = shape_differences(params, shapes, owner="the model")
    rule, fix = "training begins with all parameters of the model", "[model] as the settings that were loaded"
    return [Problem(f"parameters {what}: {', '.join(names)}", rule, fix) for what, names in found.items()]


KEPT = "huggingface"  # folder in a run folder with the small files of its pretrained model


def start_run(built: BuiltJob) -> tuple[State, str]:
    """Returns the first state of a run with the parameters of `checkpoint.start_from`, and a message about it.

    Raises:
      JaxparError: If the folder cannot be read, or does not fit the job.
    """
    job = built.job
    model, origin = check_start(job, built.layout)
    params = {path: model.params[source_path] for path, source_path in origin.taken.items()}
    first_state = start_from_params(
        built.layout, built.optimizer, params, fresh=origin.fresh, seed=job.train.seed, offload=job.train.offload
    )  # fmt: skip
    if jax.process_index() == 0:  # the folder may be gone when the run is exported
        source, to = Path(job.checkpoint.start_from).expanduser(), local_folder(job.run.dir) / KEPT
        copy_small_files(source, to, names=(CONFIG, *ALONG))
    return first_state, f"{origin}, a Hugging Face {model.kind}"


def _write_ends(job: Job, run: Path, to: Path) -> None:
    """Writes the run's end-of-text tokens into the exported configs, unless these include them already."""
    ends = [token for token in end_tokens(job, run, run / KEPT) if token < decoder_of(job).vocab]
    if not set(data_ends(job, run)) <= set(end_ids(to)):
        for file in (to / CONFIG, to / GENERATION):
            if file.is_file():
                write_json(file, read_config(file) | {EOS: ends if ends[1:] else ends[0]})


def _write_tokenizer(source: Path, to: Path) -> list[Path]:
    """Exports the tokenizer of a run without a pretrained model, and its bos token."""
    if (begin := read_tokenizer(source).id_of("bos_token")) is not None:
        write_json(to / CONFIG, read_config(to / CONFIG) | {"bos_token_id": begin})
    return copy_small_files(source, to)


def export_checkpoint(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Exports the decoder of a checkpoint as a Hugging Face folder: evaluation parameters, with adapters merged.

    Tokenizer, special ids and generation config come from the run's pretrained model; a run without one exports the
    tokenizer that it was trained with. The eos ids include the ends of the run's own documents and answers.

    Raises:
      JaxparError: If the checkpoint is damaged, is not of a decoder's run, or Hugging Face has no such model.
    """
    path = listing.find(where, step).resolve()
    manifest = reading.read_manifest(path)
    run = path.parent.parent
    job = with_saved_tokenizer(job_of(run), run)
    settings = decoder_of(job)
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
        params = by_path(merge_adapters(as_blueprint(resolve_model(job, resolve_loss(job))), params))
    files = export(params, settings, to, origin=run / KEPT if is_folder(run / KEPT) else None)
    if not is_folder(run / KEPT) and job.data.tokenizer not in OURS:
        files += _write_tokenizer(run / "data" / KEPT_TOKENIZER, to)
    if job.data.is_text:
        _write_ends(job, run, to)
    return {"from": str(path), "to": str(to), "bytes": sum(file.stat().st_size for file in files)}
