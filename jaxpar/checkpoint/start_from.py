"""A new run begins with the parameters of another: all or some, under their names or new ones.

    checkpoint            rename                     take         job
    encoder/blocks/mlp ─► encoder/blocks = blocks ─► blocks/* ─► blocks/mlp     taken, renamed
    head                                             not taken    head          new

Parameters, as the other run evaluates them, and floating-point statistics (BatchNorm's) are taken; step, optimizer, and
keys for dropout begin anew.
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

from jaxpar.buckets import opened
from jaxpar.checkpoint import listing, one_model, paths, reading
from jaxpar.checkpoint.differences import Difference, differences
from jaxpar.checkpoint.manifest import Array, Manifest, SavedReplicas
from jaxpar.checkpoint.spec import Checkpoints
from jaxpar.errors import JaxparError, Problem
from jaxpar.exchange.base import NO_MODEL
from jaxpar.exchange.global_model import several_models
from jaxpar.models.blocks.eight_bits import rounded
from jaxpar.optim.patterns import begins, meant, nearest_path
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import ROOM as ADAPTERS
from jaxpar.sharding.adapters import SCALES, Adapter
from jaxpar.step.state import State, begun

PARTS = ("params", "model_state")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of each parameter of a new run.

    Attributes:
      checkpoint: The checkpoint.
      taken: Path in the job to path in the checkpoint.
      fresh: Paths in the job that begin anew.
      unused: Paths of parameters in the checkpoint that nothing was made of.
      judged: How many are taken as the other run evaluates them, which is not as it trains them.
      replicas: Of the other run, if they made their steps apart.
    """

    checkpoint: Path
    taken: Mapping[str, str]
    fresh: tuple[str, ...]
    unused: tuple[str, ...]
    judged: int = 0
    replicas: SavedReplicas | None = None

    def __str__(self) -> str:
        renamed = sum(new != old for new, old in self.taken.items())
        parts = [f"{len(self.taken)} arrays taken from {self.checkpoint}"]
        parts += [f"{renamed} of them renamed"] if renamed else []
        parts += [f"from {self.replicas}"] if self.replicas else []
        parts += [f"{self.judged} of them as they are evaluated, not as they are trained"] if self.judged else []
        parts.append(f"{len(self.fresh)} new{_which(self.fresh)}")
        parts += [f"{len(self.unused)} of it not used{_which(self.unused)}"] if self.unused else []
        return "; ".join(parts)


def start(
    spec: Checkpoints, state: State, layout: Layout, optimizer: optax.GradientTransformation
) -> tuple[State, Origin]:
    """Returns a new run's state with parameters of another run, and where each comes from.

    What the model keeps in 8 bits is rounded, where it is taken of floats; arrays that the model makes, and no run
    changes, are not taken. SavedReplicas that differ all begin with what is taken.

    Args:
      spec: `start_from`, `take`, `rename` and `cast`.
      state: As made by `init_state`; it is given up.
      layout: Of the state.
      optimizer: The optax chain, whose state is made anew for these parameters.

    Raises:
      JaxparError: If the checkpoint is damaged, a pattern matches nothing, or an array does not fit.
    """
    path, found, made, origin = _look(spec, state, layout)
    mine = one_model.replicas_of(layout)
    saved = one_model.described(found.arrays, found.replicas)
    here = one_model.described(paths.described(state), mine)
    leaves = paths.flat(state)
    for new in [new for new in origin.taken if new in made]:
        whole, scales = f"params/{new}", f"params/{SCALES}/{new}"
        on, each, old = (leaves[whole].sharding, leaves[scales].sharding), made[new], _full(origin.taken[new], saved)
        one = jax.ShapeDtypeStruct(leaves[whole].shape, each.wide, sharding=on[0])
        read = one_model.read(path, found, {old: one})
        round_it = jax.jit(partial(rounded, lead=each.lead, inputs=each.inputs), out_shardings=on)
        leaves[whole], leaves[scales] = jax.block_until_ready(round_it(read.pop(old)))  # no two in floats at once
    wanted = {}
    for new, old in origin.taken.items():
        if new in made:
            continue
        leaf, name = leaves[_full(new, here)], _full(new, here)
        on = leaf.sharding if here[name].shape == leaf.shape else _of_one(leaf.sharding)
        wanted[_full(old, saved)] = jax.ShapeDtypeStruct(here[name].shape, leaf.dtype, sharding=on)
        if on == leaf.sharding:
            leaf.delete()  # so that no device holds the new and the taken one
    read = one_model.read(path, found, wanted)
    taken = {_full(new, here): read[_full(old, saved)] for new, old in origin.taken.items() if new not in made}
    if mine is not None:
        return _of_replicas(layout, optimizer, state, taken), origin
    leaves |= taken
    started = paths.unflat(state, leaves)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state.optimizer)
    # some chains keep a copy of the parameters that they begin with
    began = jax.jit(optimizer.init, out_shardings=placed)(started.params)
    return dataclasses.replace(started, optimizer=began), origin


def _of_replicas(
    layout: Layout, optimizer: optax.GradientTransformation, state: State, taken: Mapping[str, jax.Array]
) -> State:
    """Returns the state of replicas that make their steps apart, all begun with what is taken.

    Random keys stay those of the state, as each replica has its own.
    """

    def begin(state: State, taken: Mapping[str, jax.Array]) -> State:
        several = layout.parallel.exchange.differ
        flat = paths.flat(state.params)
        one = {path: taken.get(f"params/{path}", x[0] if several else x) for path, x in flat.items()}
        made = begun(
            layout, optimizer, paths.unflat(state.params, one), jax.tree.map(lambda x: x[0], state.model_state)
        )
        held = paths.flat(state.model_state)
        spread = {path: jnp.broadcast_to(taken.get(f"model_state/{path}", x), x.shape) for path, x in held.items()}
        return dataclasses.replace(made, model_state=paths.unflat(state.model_state, spread))

    return jax.jit(begin, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))(state, taken)


def _of_one(on: NamedSharding) -> NamedSharding:
    """Returns where one replica's entry of an array goes, on all devices."""
    return NamedSharding(on.mesh, PartitionSpec(*on.spec[1:]), memory_kind=on.memory_kind)


def check(spec: Checkpoints, state: State, layout: Layout) -> Origin:
    """Returns where each parameter of a new run would come from; no array is read.

    Args:
      spec: As for `start`.
      state: The new run's state, which may be abstract.
      layout: Of the state.

    Raises:
      JaxparError: If there is no such checkpoint, a pattern matches nothing, or an array does not fit.
    """
    return _look(spec, state, layout)[-1]


def _look(spec: Checkpoints, state: State, layout: Layout) -> tuple[Path, Manifest, dict[str, Adapter], Origin]:
    """Returns the checkpoint, its list, the adapters whose base is rounded to 8 bits, and the origin of each array."""
    path = listing.find(opened(spec.start_from)).resolve()
    found = reading.listed(path)
    if found.replicas and found.replicas.model == NO_MODEL:
        raise several_models(found.replicas.exchange)
    adapters, constants = layout.blueprint.adapters, layout.blueprint.constants
    both = (paths.described(state), one_model.replicas_of(layout)), (found.arrays, found.replicas)
    mine, theirs = (
        {p: a for p, a in _takable(one_model.described(*each)).items() if p not in constants} for each in both
    )
    made = {} if any(begins(name, SCALES) for name in theirs) else {p: a for p, a in adapters.items() if a.wide}
    origin = plan(spec, path, theirs, _in_floats(mine, made))
    judged = len(reading.judged(found).keys() & set(origin.taken.values()))
    return path, found, made, dataclasses.replace(origin, judged=judged, replicas=found.replicas)


def _in_floats(described: Mapping[str, Array], adapters: Mapping[str, Adapter]) -> dict[str, Array]:
    """Returns what another run has of a job's arrays, by path: those in 8 bits in floats, without scales."""
    floats = {
        path: dataclasses.replace(described[path], dtype=str(jnp.dtype(each.wide))) for path, each in adapters.items()
    }
    scales = {f"{SCALES}/{path}" for path in adapters}
    return {path: array for path, array in {**described, **floats}.items() if path not in scales}


def plan(spec: Checkpoints, path: Path, saved: Mapping[str, Array], wanted: Mapping[str, Array]) -> Origin:
    """Returns where each array comes from, before any is read.

    Args:
      spec: As for `start`.
      path: The checkpoint, for messages.
      saved: Arrays of the checkpoint that may be taken, by path as users know it.
      wanted: Those of the job.

    Raises:
      JaxparError: With every pattern that matches nothing and every array that does not fit.
    """
    called = {_renamed(name, spec.rename): name for name in saved}
    wrong = [
        Problem(f"checkpoint.take: {pattern!r} matches nothing",
                "each pattern matches at least one parameter of the job", nearest_path(pattern, wanted))
        for pattern in spec.take
        if not meant(wanted, [pattern])
    ]  # fmt: skip
    wrong += [
        Problem(f"checkpoint.rename: nothing in {path} begins with {old!r}",
                "each key of rename is the beginning of a path in the checkpoint", nearest_path(old, saved))
        for old in spec.rename
        if not any(begins(name, old) for name in saved)
    ]  # fmt: skip
    begun = [name for name in wanted if name in called or not begins(name, ADAPTERS)]  # adapters begin with a run
    names = meant(begun, spec.take)
    found = differences({new: saved[old] for new, old in called.items() if new in names}, {n: wanted[n] for n in names})
    unfit = [each for each in found if not (each.kind == "dtype" and spec.cast and not _scaled(each))]
    if wrong or unfit:
        bad = {each.path for each in unfit}
        raise JaxparError(*wrong, *_unfit(unfit, [name for name in names if name not in bad]))
    taken = {name: called[name] for name in names}
    fresh = tuple(name for name in wanted if name not in taken)
    return Origin(checkpoint=path, taken=taken, fresh=fresh, unused=tuple(sorted(set(saved) - set(taken.values()))))


def _unfit(found: list[Difference], good: list[str]) -> list[Problem]:
    """Returns a problem for each kind of misfit, with the `take` that leaves the misfits out."""
    tops = sorted({name.split("/")[0] for name in good} - {each.path.split("/")[0] for each in found})
    take = "take = [" + ", ".join(f'"{top}*"' if top in good else f'"{top}/*"' for top in tops) + "]"
    fixes = {"dtype": "cast = true", "missing": f"{take}, or rename" if tops else "rename it"}
    made = []
    if scaled := list(filter(_scaled, found)):
        rule = "a matrix in 8 bits is whole numbers and scales, and no other dtype is a cast of these"
        fix = 'base = "int8" among the adapters of both, or what `jaxpar checkpoint export --format safetensors` writes'
        made.append(Problem(scaled[0].describe(), rule, fix))
        found = [each for each in found if each.kind != "dtype" or not _scaled(each)]
    for kind in ("missing", "shape", "dtype"):
        if some := [each for each in found if each.kind == kind]:
            more = f", and {len(some) - 1} more like it" if some[1:] else ""
            rule = "arrays that are taken are in the checkpoint, with the shape and dtype of the job"
            made.append(
                Problem(f"{some[0].describe()}{more}", rule, fixes.get(kind, take if tops else "another model"))
            )
    return made


def _scaled(each: Difference) -> bool:
    """Returns whether one of the two is a matrix in 8 bits, and the other is none."""
    return each.kind == "dtype" and "int8" in (each.was and each.was.dtype, each.now and each.now.dtype)


def _takable(described: Mapping[str, Array]) -> dict[str, Array]:
    """Returns parameters and statistics by path without its first word."""
    return {
        path.partition("/")[2]: array
        for path, array in described.items()
        if path.startswith("params/") or (path.startswith("model_state/") and _is_statistic(array))
    }


def _is_statistic(array: Array) -> bool:
    return not array.dtype.startswith("key<") and jnp.issubdtype(jnp.dtype(array.dtype), jnp.inexact)


def _full(name: str, among: Mapping[str, Array]) -> str:
    return next((f"{part}/{name}" for part in PARTS if f"{part}/{name}" in among), f"params/{name}")


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    """Returns the path in the job for a path in the checkpoint: the longest beginning that matches is replaced."""
    fits = [old for old in rename if begins(name, old)]
    if not fits:
        return name
    old = max(fits, key=len)
    return rename[old].strip("/") + name[len(old.strip("/")) :]


def _which(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names[:4])}{', ...' if names[4:] else ''})" if names else ""
