"""Initializes a new run with parameters of another run: all or some, under their names or new ones.

    checkpoint            rename                     take         job
    encoder/blocks/mlp ─► encoder/blocks = blocks ─► blocks/* ─► blocks/mlp     taken, renamed
    head                                             not taken    head          new

The new run takes the parameters that the other run evaluates, and floating-point statistics (BatchNorm's); the step,
the optimizer and the dropout keys begin anew.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.buckets import pull_folder
from jaxpar.checkpoint import array_files, listing, reading, saved_replicas
from jaxpar.checkpoint.differences import Difference, differences
from jaxpar.checkpoint.manifest import Manifest, SavedArray, SavedReplicas
from jaxpar.checkpoint.spec import Checkpoints
from jaxpar.errors import JaxparError, Problem
from jaxpar.exchange.base import NO_MODEL
from jaxpar.exchange.global_model import several_models
from jaxpar.models.low_rank import quantize_matrix
from jaxpar.optim.patterns import has_prefix, matching, nearest_path, nearest_pattern
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import ROOM as ADAPTERS
from jaxpar.sharding.adapters import SCALES, Adapter
from jaxpar.sharding.names import REFERENCE
from jaxpar.step.state import State, state_from_params

PARTS = ("params", "model_state")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of each parameter of a new run.

    Attributes:
      checkpoint: The checkpoint.
      source_paths: Maps the path of a parameter in the job to its path in the checkpoint.
      fresh: Paths in the job that are initialized anew.
      unused: Paths in the checkpoint that are not taken.
      evaluated: Number of arrays whose evaluated form (such as an average) differs from the trained one.
      replicas: The replicas of the other run, if they made separate steps.
    """

    checkpoint: Path
    source_paths: Mapping[str, str]
    fresh: tuple[str, ...]
    unused: tuple[str, ...]
    evaluated: int = 0
    replicas: SavedReplicas | None = None

    def __str__(self) -> str:
        renamed = sum(job_path != saved_path for job_path, saved_path in self.source_paths.items())
        parts = [f"{len(self.source_paths)} arrays taken from {self.checkpoint}"]
        parts += [f"{renamed} of them renamed"] if renamed else []
        parts += [f"from {self.replicas}"] if self.replicas else []
        parts += [f"{self.evaluated} of them as they are evaluated, not as they are trained"] if self.evaluated else []
        parts.append(f"{len(self.fresh)} new{_name_list(self.fresh)}")
        parts += [f"{len(self.unused)} of it not used{_name_list(self.unused)}"] if self.unused else []
        return "; ".join(parts)


def start(
    spec: Checkpoints, state: State, layout: Layout, optimizer: optax.GradientTransformation
) -> tuple[State, Origin]:
    """Returns a new run's state with parameters of another run, and the origin of each.

    It rounds float matrices if the model stores them in 8 bits, and does not take constants of the model. If replicas
    differ, all begin with the taken parameters.

    Args:
      spec: `start_from`, `take`, `rename` and `cast`.
      state: The result of `init_state`; its arrays are deleted.
      layout: The layout of the state.
      optimizer: The optax chain, whose state is initialized for these parameters.

    Raises:
      JaxparError: If the checkpoint is damaged, a pattern matches nothing, or an array does not fit.
    """
    path, manifest, int8, origin = _resolve(spec, state, layout)
    job_replicas = saved_replicas.describe_replicas(layout)
    saved = saved_replicas.describe_as_one(manifest.arrays, manifest.replicas)
    targets = saved_replicas.describe_as_one(array_files.describe(state), job_replicas)
    leaves = array_files.flatten(state)
    for name in [name for name in origin.source_paths if name in int8]:
        matrix, scales = f"params/{name}", f"params/{SCALES}/{name}"
        sharding, adapter, source = (
            (leaves[matrix].sharding, leaves[scales].sharding),
            int8[name],
            _full_path(origin.source_paths[name], saved),
        )
        abstract = jax.ShapeDtypeStruct(leaves[matrix].shape, adapter.float_dtype, sharding=sharding[0])
        loaded = saved_replicas.read_as_one(path, manifest, {source: abstract})
        quantize = jax.jit(partial(quantize_matrix, lead=adapter.lead, inputs=adapter.inputs), out_shardings=sharding)
        # waits, so that no two matrices are in floats at once
        leaves[matrix], leaves[scales] = jax.block_until_ready(quantize(loaded.pop(source)))
    requests = {}
    for name, source in origin.source_paths.items():
        if name in int8:
            continue
        leaf, full_name = leaves[_full_path(name, targets)], _full_path(name, targets)
        sharding = leaf.sharding if targets[full_name].shape == leaf.shape else _without_replicas(leaf.sharding)
        requests[_full_path(source, saved)] = jax.ShapeDtypeStruct(
            targets[full_name].shape, leaf.dtype, sharding=sharding
        )
        if sharding == leaf.sharding:
            leaf.delete()  # so that no device holds both the new array and the taken one
    loaded = saved_replicas.read_as_one(path, manifest, requests)
    new_arrays = {
        _full_path(name, targets): loaded[_full_path(source, saved)]
        for name, source in origin.source_paths.items()
        if name not in int8
    }
    if job_replicas is not None:
        return _begin_replicas(layout, optimizer, state, new_arrays), origin
    leaves |= new_arrays
    new_state = array_files.unflatten(state, leaves)
    opt_shardings = jax.tree.map(lambda leaf: leaf.sharding, state.optimizer)
    # some chains store a copy of the initial parameters
    opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(new_state.params)
    return dataclasses.replace(new_state, optimizer=opt_state), origin


def _begin_replicas(
    layout: Layout, optimizer: optax.GradientTransformation, state: State, taken: Mapping[str, jax.Array]
) -> State:
    """Returns the state of replicas with separate steps, all initialized with the taken arrays.

    The random keys are those of the state, because they differ between replicas.
    """

    def begin(state: State, taken: Mapping[str, jax.Array]) -> State:
        has_replica_dim = layout.parallel.exchange.replicas_differ
        flat = array_files.flatten(state.params)
        params = {path: taken.get(f"params/{path}", x[0] if has_replica_dim else x) for path, x in flat.items()}
        fresh = state_from_params(
            layout,
            optimizer,
            array_files.unflatten(state.params, params),
            jax.tree.map(lambda x: x[0], state.model_state),
        )
        stats = array_files.flatten(state.model_state)
        stacked = {path: jnp.broadcast_to(taken.get(f"model_state/{path}", x), x.shape) for path, x in stats.items()}
        return dataclasses.replace(fresh, model_state=array_files.unflatten(state.model_state, stacked))

    return jax.jit(begin, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))(state, taken)


def _without_replicas(on: NamedSharding) -> NamedSharding:
    """Sharding of an array [replica, ...] without its first dim, replicated over the replicas' axis."""
    return NamedSharding(on.mesh, PartitionSpec(*on.spec[1:]), memory_kind=on.memory_kind)


def check(spec: Checkpoints, state: State, layout: Layout) -> Origin:
    """Returns the origin of each parameter of a new run; no array is read.

    Args:
      spec: As for `start`.
      state: The new run's state, which may be abstract.
      layout: The layout of the state.

    Raises:
      JaxparError: If there is no such checkpoint, a pattern matches nothing, or an array does not fit.
    """
    return _resolve(spec, state, layout)[-1]


def _resolve(spec: Checkpoints, state: State, layout: Layout) -> tuple[Path, Manifest, dict[str, Adapter], Origin]:
    """Returns the checkpoint, its manifest, the adapters whose base is rounded to 8 bits, and each array's origin."""
    path = listing.find(pull_folder(spec.start_from)).resolve()
    manifest = reading.read_manifest(path)
    if manifest.replicas and manifest.replicas.model == NO_MODEL:
        raise several_models(manifest.replicas.exchange)
    adapters, constants = layout.blueprint.adapters, layout.blueprint.constants
    sides = (
        (array_files.describe(state), saved_replicas.describe_replicas(layout)),
        (manifest.arrays, manifest.replicas),
    )
    job, saved = (
        {k: x for k, x in _takable(saved_replicas.describe_as_one(*side)).items() if k not in constants}
        for side in sides
    )
    int8 = (
        {} if any(has_prefix(name, SCALES) for name in saved) else {k: x for k, x in adapters.items() if x.float_dtype}
    )
    origin = plan(spec, path, saved, _as_floats(job, int8))
    evaluated = len(reading.evaluation_copies(manifest).keys() & set(origin.source_paths.values()))
    return path, manifest, int8, dataclasses.replace(origin, evaluated=evaluated, replicas=manifest.replicas)


def _as_floats(described: Mapping[str, SavedArray], adapters: Mapping[str, Adapter]) -> dict[str, SavedArray]:
    """Describes a job's arrays without quantization: 8-bit matrices as floats, without scales."""
    floats = {
        path: dataclasses.replace(described[path], dtype=str(jnp.dtype(x.float_dtype))) for path, x in adapters.items()
    }
    scales = {f"{SCALES}/{path}" for path in adapters}
    return {path: array for path, array in {**described, **floats}.items() if path not in scales}


def plan(spec: Checkpoints, path: Path, saved: Mapping[str, SavedArray], wanted: Mapping[str, SavedArray]) -> Origin:
    """Returns the origin of each array, before any is read.

    Args:
      spec: As for `start`.
      path: The checkpoint, for messages.
      saved: Arrays of the checkpoint that may be taken, by path without `params/` or `model_state/`.
      wanted: Arrays of the job, likewise.

    Raises:
      JaxparError: With every pattern that matches nothing and every array that does not fit.
    """
    renames = {_job_path(name, spec.rename): name for name in saved}
    mistakes = [
        Problem(f"checkpoint.take: {pattern!r} matches nothing",
                "each pattern matches at least one parameter of the job", nearest_pattern(pattern, wanted))
        for pattern in spec.take
        if not matching(wanted, [pattern])
    ]  # fmt: skip
    mistakes += [
        Problem(f"checkpoint.rename: nothing in {path} begins with {old!r}",
                "each key of rename is the beginning of a path in the checkpoint", nearest_path(old, saved))
        for old in spec.rename
        if not any(has_prefix(name, old) for name in saved)
    ]  # fmt: skip
    # a new run initializes its adapters, and makes its reference
    candidates = [
        name
        for name in wanted
        if not has_prefix(name, REFERENCE) and (name in renames or not has_prefix(name, ADAPTERS))
    ]
    names = matching(candidates, spec.take)
    mismatches = differences(
        {new: saved[old] for new, old in renames.items() if new in names}, {n: wanted[n] for n in names}
    )
    misfits = [item for item in mismatches if not (item.kind == "dtype" and spec.cast and not _is_quantization(item))]
    if mistakes or misfits:
        bad_names = {item.path for item in misfits}
        raise JaxparError(*mistakes, *_misfit_problems(misfits, [name for name in names if name not in bad_names]))
    sources = {name: renames[name] for name in names}
    fresh = tuple(name for name in wanted if name not in sources)
    return Origin(
        checkpoint=path, source_paths=sources, fresh=fresh, unused=tuple(sorted(set(saved) - set(sources.values())))
    )


def _misfit_problems(found: list[Difference], good: list[str]) -> list[Problem]:
    """One problem per kind of mismatch, with a `take` that excludes the mismatched arrays."""
    tops = sorted({name.split("/")[0] for name in good} - {difference.path.split("/")[0] for difference in found})
    take = "take = [" + ", ".join(f'"{top}*"' if top in good else f'"{top}/*"' for top in tops) + "]"
    fixes = {"dtype": "cast = true", "missing": f"{take}, or rename" if tops else "rename it"}
    result = []
    if scaled := list(filter(_is_quantization, found)):
        rule = "a matrix in 8 bits is stored as integers and scales, which no cast turns into another dtype"
        fix = 'base = "int8" among the adapters of both, or what `jaxpar checkpoint export --format safetensors` writes'
        result.append(Problem(scaled[0].describe(), rule, fix))
        found = [difference for difference in found if difference.kind != "dtype" or not _is_quantization(difference)]
    for kind in ("missing", "shape", "dtype"):
        if matches := [difference for difference in found if difference.kind == kind]:
            suffix = f", and {len(matches) - 1} more like it" if matches[1:] else ""
            rule = "arrays that are taken are in the checkpoint, with the shape and dtype of the job"
            result.append(
                Problem(f"{matches[0].describe()}{suffix}", rule, fixes.get(kind, take if tops else "another model"))
            )
    return result


def _is_quantization(each: Difference) -> bool:
    """Whether one of two different dtypes is int8, so that a cast cannot convert them."""
    return each.kind == "dtype" and "int8" in (each.was and each.was.dtype, each.now and each.now.dtype)


def _takable(described: Mapping[str, SavedArray]) -> dict[str, SavedArray]:
    """Selects parameters and statistics, by path without `params/` or `model_state/`."""
    return {
        path.partition("/")[2]: array
        for path, array in described.items()
        if path.startswith("params/") or (path.startswith("model_state/") and _is_statistic(array))
    }


def _is_statistic(array: SavedArray) -> bool:
    return not array.dtype.startswith("key<") and jnp.issubdtype(jnp.dtype(array.dtype), jnp.inexact)


def _full_path(name: str, among: Mapping[str, SavedArray]) -> str:
    return next((f"{part}/{name}" for part in PARTS if f"{part}/{name}" in among), f"params/{name}")


def _job_path(name: str, rename: Mapping[str, str]) -> str:
    """Maps a path in the checkpoint to one in the job: replaces the longest matching prefix."""
    prefixes = [prefix for prefix in rename if has_prefix(name, prefix)]
    if not prefixes:
        return name
    prefix = max(prefixes, key=len)
    return rename[prefix].strip("/") + name[len(prefix.strip("/")) :]


def _name_list(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names[:4])}{', ...' if names[4:] else ''})" if names else ""
