"""Shardings of the arrays of a pipelined step: between steps, around the table, and inside of it.

    stored ─► cast ─► dealt to the stages ─► gathered over fsdp ─► (the table) ─► summed ─► stored again
                                                                    placed: over the axes that are not manual

Inside the table `pipe`, `data` and `fsdp` are manual, and `tensor` is XLA's. With gather="tick" layers are shards over
`fsdp` there: each is gathered where it runs, and its gradient reduced to a shard at once.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.mesh.axes import AXES
from jaxpar.models.named import constrain_to
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.run.gathers import Gather, gathered
from jaxpar.pipeline.run.redistribute import deal, padded
from jaxpar.pipeline.run.sum_shards import Shards
from jaxpar.sharding.constrain import activation_names
from jaxpar.sharding.names import GRADIENT, SCOPE, Tree, pick


@dataclass(frozen=True, eq=False)
class Shardings:
    """Shardings of the arrays of a pipelined step. Paths are those of parameters, such as `blocks/mlp/up`.

    Attributes:
      layout: With an axis `pipe`.
      dtype: What parameters are cast to before they travel, or None.
    """

    layout: Layout
    dtype: Any

    @property
    def per_tick(self) -> bool:
        """Whether each layer is gathered over `fsdp` where it runs, rather than all of them once per step."""
        return self.layout.parallel.pipeline.gather == "tick"

    @property
    def manual(self) -> tuple[str, ...]:
        """Mesh axes that are manual inside the table."""
        return tuple(axis for axis in self.layout.sizes if AXES[axis].manual)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those of them that split the rows of the batch."""
        return tuple(axis for axis in self.layout.batch_axes if axis in self.manual)

    @cached_property
    def stacked(self) -> dict[str, tuple[str, ...]]:
        """Path to keys of the parameters that are spread over the stages: dim 0 is the layers."""
        return {path: tuple(path.split("/")) for path in self.layout.stacked}

    @cached_property
    def shared(self) -> dict[str, tuple[str, ...]]:
        """Path to keys of all others, which every stage may read."""
        return {path: tuple(path.split("/")) for path in self.layout.placements if path not in self.stacked}

    @cached_property
    def dims(self) -> dict[str, int]:
        """Path to the dim over which `fsdp` cuts sums of gradients inside the table; those not in it are whole."""
        if self.layout.parallel.stage != 2 and not self.per_tick:
            return {}
        cut = {path: _axes_of(self._run_on(path, "updated")) for path in self.layout.placements}
        return {path: dim for path, entries in cut.items() for dim, axes in enumerate(entries) if "fsdp" in axes}

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Axes that are XLA's inside the table."""
        return tuple(axis for axis, size in self.layout.sizes.items() if size > 1 and axis not in self.manual)

    @cached_property
    def shards(self) -> Shards | None:
        """How sums of gradients are cut that are made whole: with zero=2 all of them; else of what no layer reads."""
        if not self.dims:
            return None
        dims = {path: dim for path, dim in self.dims.items() if path in self.shared or not self.per_tick}
        specs = {path: spec for path in dims if (spec := self._beside(path)) is not None}
        return Shards(axis="fsdp", ways=self.layout.sizes["fsdp"], dims=dims, others=self.others, specs=specs)

    def cut(self, path: str) -> tuple[str | None, ...]:
        """Returns the manual axis that each dim of a sum of gradients is cut over."""
        dim = self.dims.get(path, -1)
        return (*(None,) * dim, "fsdp") if dim >= 0 else ()

    def held(self, path: str) -> PartitionSpec:
        """Returns the manual axes over which the table holds a parameter of the layers."""
        return PartitionSpec("pipe", *(self.cut(path)[1:] if self.per_tick else ()))

    @property
    def uneven(self) -> tuple[int, ...]:
        """Layers of each stage where they differ, else nothing."""
        return tuple(self.layout.parallel.pipeline.layers)

    @property
    def replicas(self) -> int:
        """Ways in which the rows of the batch are split by hand."""
        return math.prod(self.layout.sizes[axis] for axis in self.batch_axes)

    def inside(self):
        """Inside the table names of activations mean the axes that are not manual there."""
        sizes = {axis: 1 if axis in self.manual else size for axis, size in self.layout.sizes.items()}
        return activation_names(self.layout.names, sizes)

    def between(self):
        """Between the stages `pipe` is one more axis that names of activations may mean."""
        sizes = {axis: 1 if axis in self.batch_axes else size for axis, size in self.layout.sizes.items()}
        return activation_names(self.layout.names, sizes)

    def cast(self, value: jax.Array) -> jax.Array:
        """Returns a parameter in the dtype that products run in, where it is floating point."""
        floating = self.dtype is not None and jnp.issubdtype(value.dtype, jnp.floating)
        return value.astype(self.dtype) if floating else value

    def whole(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a parameter outside of the stack as the table reads it, cast before it is gathered."""
        return self.gathered(path, self.cast(value))

    def layer(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a parameter where a layer reads it: gathered over `fsdp` there, if that is not done once per step."""
        if not self.per_tick or path not in self.dims:
            return self.cast(value)
        gone = len(self.layout.placements[path].leaf.shape) - value.ndim  # dims that the model scans over
        spec, read = self._beside(path), jax.eval_shape(self.cast, value)
        how = Gather(
            axis="fsdp",
            dim=self.dims[path] - gone,
            dtype=read.dtype,
            stored=value.dtype,
            others=() if spec is None else self.others,
            spec=PartitionSpec(*(spec or ())[gone:]),
        )
        return gathered(value, how)

    def dealt(self, layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the layers on the stages that run them."""
        if not self.uneven:
            return deal(self.layout.on, self.layout.schedule.cut, layers)
        # spare places repeat a layer, so this is no permutation: XLA gathers by index
        order, _ = padded(self.uneven)
        moved = {path: jnp.take(value, order, axis=0) for path, value in layers.items()}
        return {path: self.on(value, self._run_on(path, "stored")) for path, value in moved.items()}

    def stored(self, layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the layers where they are stored."""
        if not self.uneven:
            # else XLA merges the slices of the deal with those to the shards, and reduces all of it to take them
            layers = jax.lax.optimization_barrier(layers) if self.layout.schedule.chunks > 1 else layers
            return deal(self.layout.on, self.layout.schedule.cut, layers, back=True)
        _, places = padded(self.uneven)
        specs = {path: pick(self.layout.updated, words) for path, words in self.stacked.items()}
        moved = {path: self.on(value, specs[path]) for path, value in layers.items()}
        return {path: self.on(jnp.take(value, places, axis=0), specs[path]) for path, value in moved.items()}

    def gathered(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a parameter as the table reads it: gathered over `fsdp` once per step, cast before it travels."""
        with jax.named_scope(SCOPE + path.replace("/", ".")):
            # first held to the shards: else XLA may gather what comes before the cast, twice the bytes
            return self.on(self.on(value, self._run_on(path, "stored")), self._run_on(path, "used"))

    def spread(self, path: str, value: jax.Array) -> jax.Array:
        """Returns a gradient of an end that is spread, on one replica of the batch, over `pipe` and `tensor`."""
        return constrain_to(value, _without(self.layout.placements[path].used, self.batch_axes))

    def summed(self, path: str, stacked: jax.Array, over) -> jax.Array:
        """Returns the sum of gradients [ways, ...] over an axis, placed as the update reads them."""
        with jax.named_scope(GRADIENT):
            # each device holds its own entry of dim 0: XLA makes one reduction of the sum, to the shards of `updated`
            return jnp.sum(self.on(stacked, PartitionSpec(over, *self._run_on(path, "updated"))), axis=0)

    def on(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns a value with the sharding of a spec."""
        return jax.lax.with_sharding_constraint(value, self.layout.sharding(spec))

    def place(self, what: str, tree: Tree) -> Tree:
        """Returns what is inside the table with its sharding over the axes that are not manual."""
        if what in ("x", "slots"):
            dims = ((), self.layout.names["seq"], ())
            ahead = ((),) * (what == "slots")

            def placed(x):  # [batch, seq, embed], or a tree of which only the rows are known
                own = x.ndim - len(ahead)
                return self.constrained(x, (*ahead, *(dims if own == 3 else dims[: min(own, 1)])))

            return jax.tree.map(placed, tree)
        specs = {path: self.layout.placements[path].used for path in tree}
        if what == "layers":
            return {path: self.constrained(x, ((), (), *specs[path][1:])) for path, x in tree.items()}
        return {path: self.constrained(x, specs[path]) for path, x in tree.items()}

    def constrained(self, x: jax.Array, entries) -> jax.Array:
        """Constrains a value inside the table; axes that are manual there, or of size 1, are left out."""
        each = ((entry,) if isinstance(entry, str) else entry or () for entry in entries)
        free = [tuple(a for a in axes if a not in self.manual and self.layout.sizes[a] > 1) for axes in each]
        if not any(size > 1 for axis, size in self.layout.sizes.items() if axis not in self.manual):
            return x
        return constrain_to(x, PartitionSpec(*(axes or None for axes in free)))

    def _beside(self, path: str) -> PartitionSpec | None:
        """Returns what axes of XLA's split a parameter by, where none of them splits the dim that `fsdp` cuts."""
        spec, dim = self._run_on(path, "used"), self.dims[path]
        alone = not any(set(axes).intersection(self.others) for axes in _axes_of(spec)[dim : dim + 1])
        return _without(spec, self.manual) if alone else None

    def _run_on(self, path: str, which: str) -> PartitionSpec:
        """Returns a spec of a parameter for the time that the table runs: layers are split over `pipe` then."""
        words = tuple(path.split("/"))
        spec = pick(self.layout.updated, words) if which == "updated" else getattr(self.layout.placements[path], which)
        if path not in self.stacked:
            return spec
        return PartitionSpec("pipe", *_without(spec, ("pipe",))[1:])


def _without(spec: PartitionSpec, left_out: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(tuple(a for a in axes if a not in left_out) or None for axes in _axes_of(spec)))


def _axes_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dim."""
    return [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
