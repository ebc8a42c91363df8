"""Checkpoints beside each other, beside a job, and in other formats."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.checkpoint import listing, manifest, orbax, paths, reading, report
from jaxpar.checkpoint.differences import Difference, differences
from jaxpar.checkpoint.manifest import Array, Manifest
from jaxpar.errors import nearest, refuse
from jaxpar.job import pretrained
from jaxpar.job.check import device_count
from jaxpar.job.file.parse import load
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.mesh.devices import leave_alone, visible
from jaxpar.parallel.compose import compose
from jaxpar.sharding.names import nest
from jaxpar.step import state


def export_orbax(where: Path, step: int | None, to: Path) -> dict[str, Any]:
    """Writes a checkpoint as Orbax does, for programs that read its format.

    The names are those of `jaxpar checkpoint show`, nested: `ocp.load(to)["params"]["embed"]["embedding"]`. Random keys
    are written as the numbers they consist of. One process holds the whole state in memory.

    Raises:
      JaxparError: If it is damaged, or the target is there already or cannot be written.
    """
    path = listing.find(where, step)
    made = reading.listed(path)
    found = {name: _numbers(array) for name, array in reading.arrays(path, made, _alone(made.arrays)).items()}
    orbax.save(to, nest({tuple(name.split("/")): array for name, array in found.items()}))
    return {"from": str(path), "to": str(to), "bytes": sum(each.stat().st_size for each in to.rglob("*"))}


FORMATS: dict[str, Callable[[Path, int | None, Path], dict[str, Any]]] = {
    "jaxpar": report.export,
    "safetensors": pretrained.write,
    "orbax": export_orbax,
}


def export(where: Path, step: int | None, to: Path, *, form: str) -> dict[str, Any]:
    """Writes a checkpoint in another place, in one of `FORMATS`.

    Raises:
      JaxparError: If there is no such format, or the checkpoint cannot be exported.
    """
    if form not in FORMATS:
        raise refuse(f"--format {form}", rule=f"a format is {', '.join(FORMATS)}", fix=nearest(form, FORMATS))
    return FORMATS[form](where, step, to)


def diff(first: Path, second: Path, overrides: Sequence[str] = ()) -> tuple[list[Difference], dict[str, float]]:
    """Returns how two checkpoints, or a checkpoint and a job, differ.

    Args:
      first: A checkpoint, or the run folder whose latest is meant.
      second: The same, or a job file.
      overrides: Of the job.

    Returns:
      The arrays that differ in shape or dtype or are in one only; and, between checkpoints that do not, path to the
      largest absolute difference for the arrays whose values differ.

    Raises:
      JaxparError: If either is none, or damaged.
    """
    path, saved = _listed(first)
    if second.is_file():
        return differences(saved.arrays, wanted(second, overrides)), {}
    if overrides:
        raise refuse(f"{second} is no job file", rule="overrides apply to a job file", fix="leave them out")
    other, listed = _listed(second)
    found = differences(saved.arrays, listed.arrays)
    return found, {} if found else _values(path, other, saved.arrays)


def wanted(job: Path, overrides: Sequence[str] = ()) -> dict[str, Array]:
    """Returns the arrays that a job trains; nothing is made or compiled.

    Raises:
      JaxparError: With every problem of the job.
    """
    made = load(job, overrides)
    if made.mesh.declared:
        leave_alone()
    layout = compose(resolve_model(made, resolve_loss(made)), made.declared, device_count(made))
    return paths.described(state.abstract(layout, resolve_optimizer(made, layout.blueprint)))


def adopt(where: Path, step: int | None = None) -> Path:
    """Makes the MANIFEST of a checkpoint that an older jaxpar wrote, from its present files.

    Raises:
      JaxparError: If it has one, or is no checkpoint.
    """
    path = listing.find(where, step)
    if (path / manifest.NAME).exists():
        raise refuse(
            f"{path} has a MANIFEST",
            rule="a MANIFEST is made anew only for a checkpoint that never had one",
            fix=f"jaxpar checkpoint verify {path}",
        )
    listed, scores = orbax.unlisted(path)
    made = path.stat().st_mtime
    manifest.adopt(path, step=int(path.name), written=made, scores=scores, arrays=listed)
    return path


def _listed(where: Path) -> tuple[Path, Manifest]:
    path = listing.find(where)
    if listing.is_older(path):
        raise listing.refuse_older(path)
    return path, manifest.read(path)


def _values(first: Path, second: Path, listed: dict[str, Array]) -> dict[str, float]:
    """Returns path to largest absolute difference, of arrays that are not equal; one array at a time."""
    lists = [(path, reading.listed(path)) for path in (first, second)]
    found = {}
    for name, array in listed.items():
        want = _alone({name: array})
        here, there = (_numbers(reading.arrays(path, made, want)[name]) for path, made in lists)
        if here.tobytes() != there.tobytes():
            found[name] = float(np.max(np.abs(here.astype(np.float64) - there.astype(np.float64))))
    return found


def _alone(arrays: Mapping[str, Array]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns arrays as they are asked for whole, on one device."""
    alone = jax.sharding.SingleDeviceSharding(visible()[0])
    kinds = {
        name: jax.random.key(0).dtype if array.dtype.startswith("key<") else array.dtype
        for name, array in arrays.items()
    }
    return {name: jax.ShapeDtypeStruct(arrays[name].shape, kind, sharding=alone) for name, kind in kinds.items()}


def _numbers(array: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)
