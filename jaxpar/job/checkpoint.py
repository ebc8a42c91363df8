"""Compares, exports and checks the checkpoints of a job.

Orbax is imported in one function alone, because its v1 API is not stable yet.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.buckets import is_address
from jaxpar.checkpoint import array_files, checkpoint_tables, listing, manifest, reading, saved_replicas, start_from
from jaxpar.checkpoint.differences import Difference, differences, problems
from jaxpar.checkpoint.manifest import Manifest, SavedArray
from jaxpar.errors import JaxparError, Problem, refuse, suggest
from jaxpar.files import check_local
from jaxpar.job import run_weights
from jaxpar.job.check import device_count
from jaxpar.job.file import run_folder
from jaxpar.job.file.parse import load
from jaxpar.job.file.run_folder import check_folder, check_same_data, check_writable
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import open_data
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.mesh.devices import use_cpu_only, visible_devices
from jaxpar.models.huggingface.folder import is_folder
from jaxpar.parallel.compose import compose
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import nest
from jaxpar.step import state


def export_orbax(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Writes a checkpoint in Orbax format.

    The names are those of `jaxpar checkpoint show`, nested: `ocp.load(to)["params"]["embed"]["embedding"]`. Random keys
    are written as their key data. One process holds the whole state in memory.

    Raises:
      JaxparError: If the checkpoint is damaged, or the target exists or cannot be written.
    """
    path = listing.find(where, step)
    entries = reading.read_manifest(path)
    numbers = {
        name: _numbers(array)
        for name, array in reading.read_arrays(path, entries, _on_one_device(entries.arrays)).items()
    }
    _save_orbax(to, nest({tuple(name.split("/")): array for name, array in numbers.items()}))
    return {"from": str(path), "to": str(to), "bytes": sum(file.stat().st_size for file in to.rglob("*"))}


FORMATS: dict[str, Callable[[Path, int | None, Path], dict[str, Any]]] = {
    "jaxpar": checkpoint_tables.export,
    "safetensors": run_weights.export_checkpoint,
    "orbax": export_orbax,
}


def export(where: Path, step: int | None, to: Path, *, form: str) -> dict[str, Any]:
    """Exports a checkpoint to another folder in one of `FORMATS`.

    Raises:
      JaxparError: If the format is unknown, or the checkpoint cannot be exported.
    """
    if form not in FORMATS:
        raise refuse(f"--format {form}", rule=f"a format is {', '.join(FORMATS)}", fix=suggest(form, FORMATS))
    return FORMATS[form](where, step, to)


def diff(first: Path, second: Path, overrides: Sequence[str] = ()) -> tuple[list[Difference], dict[str, float]]:
    """Compares two checkpoints, or a checkpoint and a job.

    Args:
      first: A checkpoint, or a run folder for its latest.
      second: The same, or a job file.
      overrides: Overrides of the job.

    Returns:
      The arrays that differ in shape or dtype or exist on one side only; and, if two checkpoints have none, the largest
      absolute difference of each array with unequal values, by path.

    Raises:
      JaxparError: If either is not a checkpoint, or is damaged.
    """
    path, first_manifest = _find_checkpoint(first)
    if second.is_file():
        return differences(first_manifest.arrays, job_arrays(second, overrides)), {}
    if overrides:
        raise refuse(f"{second} is no job file", rule="overrides apply to a job file", fix="leave them out")
    second_path, second_manifest = _find_checkpoint(second)
    changes = differences(first_manifest.arrays, second_manifest.arrays)
    return changes, {} if changes else _values(path, second_path, first_manifest.arrays)


def job_arrays(job: Path, overrides: Sequence[str] = ()) -> dict[str, SavedArray]:
    """Returns the arrays of a job's state as shapes; nothing is allocated or compiled.

    Raises:
      JaxparError: With all problems of the job.
    """
    parsed = load(job, overrides)
    if parsed.mesh.names_devices:
        use_cpu_only()
    layout = compose(resolve_model(parsed, resolve_loss(parsed)), parsed.effective_parallel, device_count(parsed))
    return array_files.describe(state.abstract(layout, resolve_optimizer(parsed, layout.blueprint)))


def _find_checkpoint(where: Path) -> tuple[Path, Manifest]:
    path = listing.find(where)
    return path, manifest.read(path)


def _values(first: Path, second: Path, listed: dict[str, SavedArray]) -> dict[str, float]:
    """Returns the largest absolute difference of each unequal array, by path; holds one array at a time."""
    lists = [(path, reading.read_manifest(path)) for path in (first, second)]
    result = {}
    for name, array in listed.items():
        target = _on_one_device({name: array})
        first_values, second_values = (
            _numbers(reading.read_arrays(path, entry, target)[name]) for path, entry in lists
        )
        if first_values.tobytes() != second_values.tobytes():
            result[name] = float(np.max(np.abs(first_values.astype(np.float64) - second_values.astype(np.float64))))
    return result


def _on_one_device(arrays: Mapping[str, SavedArray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes arrays for a restore onto a single device, unsharded."""
    sharding = jax.sharding.SingleDeviceSharding(visible_devices()[0])
    dtypes = {
        name: jax.random.key(0).dtype if array.dtype.startswith("key<") else array.dtype
        for name, array in arrays.items()
    }
    return {name: jax.ShapeDtypeStruct(arrays[name].shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def _numbers(array: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


# Checks the first state of a run against checkpoint manifests, without reading an array.
#
# RUN has no checkpoint   ─►  checkpoint.start_from: does it exist, do its parameters fit?
# RUN has checkpoints     ─►  do the arrays of the newest intact one fit, are job and data unchanged?


def check_run(job: Job, layout: Layout) -> list[Problem]:
    """Returns the problems of the run folder and the first state that `train` would report before its first step.

    It does not pack text, so only `train` detects that the text has changed.

    Args:
      job: A job without other problems.
      layout: The layout of its model.
    """
    if is_address(job.run.dir) or is_address(job.checkpoint.start_from):
        return []  # a bucket is read when the run starts
    folder = Path(job.run.dir)
    try:
        steps = check_folder(job, folder)
        check_writable(folder)
        if steps:
            changed = run_folder.compare_jobs(folder, job)
            check_same_data(folder, None if job.data.is_text else open_data(job).fingerprint)
            run_folder.check_changes(changed, job, _check_resume(job, layout, folder / "checkpoints", steps))
        elif job.checkpoint.start_from and not is_folder(job.checkpoint.start_from):
            shapes = state.abstract(layout, resolve_optimizer(job, layout.blueprint))
            start_from.check(job.checkpoint, shapes, layout)
    except JaxparError as error:
        return [*error.problems]
    return []


def _check_resume(job: Job, layout: Layout, folder: Path, steps: list[int]) -> int:
    """Returns the step of the newest intact checkpoint, judged by names and sizes of its files.

    Raises:
      JaxparError: If no checkpoint is intact, or it does not fit the job.
    """
    damaged: list[Problem] = []
    for step in reversed(steps):
        path = folder / listing.folder_name(step)
        try:
            manifest = reading.read_manifest(path)
        except reading.DamagedCheckpoint as error:
            damaged += error.problems
            continue
        replica_mode, run = job.checkpoint.replicas, str(folder.parent)
        arrays = array_files.describe(state.abstract(layout, resolve_optimizer(job, layout.blueprint)))
        if manifest.replicas and manifest.replicas.model and not layout.parallel.exchange.replicas_differ:
            saved_replicas.check_one_model(manifest, manifest.replicas, arrays, how=replica_mode, run=run)
        elif replica_mode == "same" and (mismatches := problems(differences(manifest.arrays, arrays), run)):
            raise JaxparError(*mismatches)  # for other values, arrays are derived from the saved ones to fit the mesh
        return step
    raise JaxparError(*damaged)


def _save_orbax(folder: Path, tree: object) -> None:
    """Writes a tree of arrays as an Orbax checkpoint.

    Raises:
      JaxparError: If Orbax is not installed, or the folder is there already or cannot be written.
    """
    if find_spec("orbax") is None or find_spec("orbax.checkpoint") is None:
        raise refuse(
            "--format orbax without Orbax",
            rule="the package orbax-checkpoint writes this format",
            fix="pip install 'jaxpar[orbax]'",
        )
    from orbax.checkpoint import v1 as ocp

    check_local(folder, "--to")
    if folder.exists():
        rule = "--to is a folder that does not exist yet"
        raise refuse(f"--to {folder} is there already", rule=rule, fix=f"--to {folder}-2")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        ocp.save(str(folder.resolve()), tree)
    except (OSError, ValueError) as error:
        raise refuse(
            f"--to {folder}: {str(error).splitlines()[0]:.120}",
            rule="--to is a folder that can be made, on a disk with enough free space",
            fix="--to a folder that you may write, on a disk with free space for the checkpoint",
        ) from error
