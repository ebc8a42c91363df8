"""Moves parameters from where they are stored to the stages that read them, and gradients back.

    stored    each parameter under its own path, some of its dims split over `pipe` and `fsdp`
    running   the buffers of a stage hold all parameters that it reads, unsharded

So checkpoints and optimizers do not depend on the stages. Once per step each device sends its shards to the stages that
read them, in one all-to-all over `pipe`; an all-gather over `fsdp` completes them. Gradients go the opposite way.
Gradients from the replicas of a stage, or from several stages that read one parameter (a tied embedding), are summed
where the parameter is stored: so each device sends its stage's gradients once, as in a reduce-scatter among replicas. A
parameter that `pipe` does not split, because it is small or no dim is divisible, is already on every stage; its
gradients are summed over the stages.

All methods are called in `jax.shard_map`, where `pipe`, `data` and `fsdp` are manual.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxpar.pipeline.run.stage_buffers import StageBuffers
from jaxpar.pipeline.run.stage_replicas import StageReplicas

LEADING = ("fsdp", "pipe")  # axes of the leading dims of shards that are not joined yet


@dataclass(frozen=True, slots=True)
class ParameterShards:
    """The shards of a parameter.

    Attributes:
      axes: Of each dim, the axes among `pipe` and `fsdp` that split it, the slowest first.
      shape: Shape of the whole parameter.
      sizes: Size of each axis.
    """

    axes: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    sizes: Mapping[str, int]

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split the parameter, in the order of `LEADING`."""
        used = {axis for axes in self.axes for axis in axes}
        return tuple(axis for axis in LEADING if axis in used)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return tuple(
            rows // math.prod(self.sizes[axis] for axis in axes)
            for rows, axes in zip(self.shape, self.axes, strict=True)
        )

    @property
    def size(self) -> int:
        """Number of elements of a shard."""
        return math.prod(self.shard_shape)

    def join(self, shards: jax.Array) -> jax.Array:
        """Joins shards of shape [*axes, *local] to the whole parameter."""
        order = []
        for dim, axes in enumerate(self.axes):
            order += [*(self.split_axes.index(axis) for axis in axes), len(self.split_axes) + dim]
        return jnp.transpose(shards, order).reshape(self.shape)

    def split(self, whole: jax.Array) -> jax.Array:
        """Splits a whole array into shards of shape [*axes, *local]."""
        dims, order, places = [], [0] * (len(self.split_axes) + len(self.shape)), 0
        for dim, axes in enumerate(self.axes):
            for axis in axes:
                order[self.split_axes.index(axis)] = places
                places += 1
            order[len(self.split_axes) + dim] = places
            places += 1
            dims += [*(self.sizes[axis] for axis in axes), self.shard_shape[dim]]
        return jnp.transpose(whole.reshape(dims), order)


def sum_dtype(parameter: DTypeLike) -> DTypeLike:
    """Returns the dtype of a parameter's sum of gradients, as in `StageBuffers.zeros`: float32 or wider, or complex."""
    return jnp.promote_types(parameter, jnp.float32)


class ShardExchange:
    """The exchange of the parameters of unequal stages between storage and buffers.

    Attributes:
      buffers: The buffers of the stages.
      shards: Path to the shards of every parameter.
    """

    def __init__(
        self,
        buffers: StageBuffers,
        replicas: StageReplicas,
        specs: Mapping[str, PartitionSpec],
        sizes: Mapping[str, int],
    ):
        """Reads the shards of parameters from their specs.

        Args:
          buffers: The buffers of the stages.
          replicas: The devices of the stages.
          specs: Path to the spec of a stored parameter.
          sizes: Mesh axis to size.
        """
        self.buffers, self._replicas, self._sizes = buffers, replicas, sizes
        self._shapes = {path: leaf for stage in buffers.stages for path, leaf in stage.items()}
        self.shards = {
            path: ParameterShards(_axes(specs[path], leaf.shape, sizes), leaf.shape, sizes)
            for path, leaf in self._shapes.items()
        }
        self._groups: dict[tuple, list[str]] = {}  # of the parameters that `pipe` splits, by axes and dtype
        for path, shards in self.shards.items():
            if "pipe" in shards.split_axes:
                self._groups.setdefault((shards.split_axes, self._shapes[path].dtype.name), []).append(path)

    def send_params(self, params: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Returns the buffers of this device's stage, given its shards of all parameters."""
        received = {}
        for key, paths in self._groups.items():
            owned = self._paths_by_stage(paths)
            outbox = jnp.stack([self._pack([params[path] for path in owned[stage]], paths) for stage in self._stages])
            shards = lax.all_to_all(outbox, "pipe", 0, 0)  # [devices of pipe, elements]
            received[key] = lax.all_gather(shards, "fsdp") if "fsdp" in key[0] else shards
        others = {path: self._gather_fsdp(path, value) for path, value in params.items() if self._is_unsplit(path)}

        def branch(stage: int):
            def fill(received, others):
                params = {path: value for path, value in others.items() if path in self.buffers.stages[stage]}
                for key, paths in self._groups.items():
                    start = 0
                    for path in self._paths_by_stage(paths)[stage]:
                        shards = self.shards[path]
                        part = received[key][..., start : start + shards.size]
                        params[path] = shards.join(part.reshape(*part.shape[:-1], *shards.shard_shape))
                        start += shards.size
                return self.buffers.fill(stage, params)

            return fill

        return lax.switch(self._stage_index(), [branch(i) for i in range(len(self.buffers.stages))], received, others)

    def send_gradients(self, sums: Sequence[jax.Array], batch_axes: Sequence[str]) -> dict[str, jax.Array]:
        """Returns this device's shards of the gradients of all parameters, summed over stages and `batch_axes`."""
        others = [path for path in self.shards if self._is_unsplit(path)]

        def branch(stage: int):
            def send(sums):
                grads = self.buffers.read(sums, stage)
                rows = {}
                for key, paths in self._groups.items():
                    parts = [self.shards[path].split(grads[path]) for path in self._paths_by_stage(paths)[stage]]
                    lead = [self._sizes[axis] for axis in key[0]]
                    flat = [value.reshape(*lead, -1) for value in parts]
                    missing = self._max_size(paths) - sum(value.shape[-1] for value in flat)
                    rows[key] = jnp.concatenate([*flat, jnp.zeros((*lead, missing), sum_dtype(key[1]))], axis=-1)
                zeros = {
                    path: jnp.zeros(self._shapes[path].shape, sum_dtype(self._shapes[path].dtype)) for path in others
                }
                return rows, {path: grads.get(path, zeros[path]) for path in others}

            return send

        branches = [branch(stage) for stage in range(len(self.buffers.stages))]
        sent, whole = lax.switch(self._stage_index(), branches, sums)
        result = {}
        for key, paths in self._groups.items():
            rows = sent[key]
            if "fsdp" in key[0]:
                rows = lax.psum_scatter(rows, "fsdp")
            if rest := tuple(axis for axis in batch_axes if axis not in key[0]):
                rows = lax.psum(rows, rest)
            received = lax.all_to_all(rows, "pipe", 0, 0)  # [devices of pipe, elements]
            for stage, stage_paths in enumerate(self._paths_by_stage(paths)):
                start, stage_sum = 0, jnp.sum(received[self._stages == stage], axis=0)
                for path in stage_paths:
                    shards = self.shards[path]
                    part = stage_sum[start : start + shards.size].reshape(shards.shard_shape)
                    result[path] = result[path] + part if path in result else part
                    start += shards.size
        for path, value in whole.items():
            total = lax.psum(value, ("pipe", *batch_axes))
            for dim, axes in enumerate(self.shards[path].axes):
                if axes:  # `fsdp` alone
                    rows = self.shards[path].shard_shape[dim]
                    total = lax.dynamic_slice_in_dim(total, lax.axis_index("fsdp") * rows, rows, dim)
            result[path] = total
        return result

    @property
    def _stages(self) -> np.ndarray:
        return self._replicas.stages

    def _stage_index(self) -> jax.Array:
        return jnp.asarray(self._stages)[lax.axis_index("pipe")]

    def _is_unsplit(self, path: str) -> bool:
        """Whether a device has the parameter already, perhaps sharded over `fsdp`, because `pipe` does not split it."""
        return path in self.shards and "pipe" not in self.shards[path].split_axes

    def _gather_fsdp(self, path: str, value: jax.Array) -> jax.Array:
        for dim, axes in enumerate(self.shards[path].axes):
            value = lax.all_gather(value, "fsdp", axis=dim, tiled=True) if axes else value
        return value

    def _paths_by_stage(self, paths: Sequence[str]) -> list[list[str]]:
        """Returns for each stage the paths that it reads."""
        return [[path for path in paths if path in stage] for stage in self.buffers.stages]

    def _max_size(self, paths: Sequence[str]) -> int:
        """Returns the most elements that a device sends to a stage."""
        return max(sum(self.shards[path].size for path in stage_paths) for stage_paths in self._paths_by_stage(paths))

    def _pack(self, shards: Sequence[jax.Array], paths: Sequence[str]) -> jax.Array:
        flat = [shard.ravel() for shard in shards]
        missing = self._max_size(paths) - sum(part.size for part in flat)
        return jnp.concatenate([*flat, jnp.zeros(missing, self._shapes[paths[0]].dtype)])


def _axes(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Returns for each dim the axes that split it, among `pipe` and `fsdp`, without axes of size 1."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in (*spec, *(None,) * len(shape))]
    return tuple(
        tuple(axis for axis in entries[dim] if axis in LEADING and sizes.get(axis, 1) > 1) for dim in range(len(shape))
    )
