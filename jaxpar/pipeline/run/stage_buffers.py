"""Buffers of a stage: its slots, and the parameters of unequal stages, in the same few buffers on every device.

Slots are entries of dim 0 of a stage's buffers; a row of the table has the numbers of slots to read and to write.

One program runs on all devices, so all have the same buffers. Their shapes are those of the largest stage's parameters,
so that it reads them and sums their gradients without a copy. The parameters of every other stage are packed into the
same buffers, the largest first; a parameter that fits in none of them adds a buffer.

    largest stage   | kernel [9216, 4096]            | kernel [4096, 4096]   | bias |
    another stage   | conv 1 | conv 2 |              | conv 3 |              |      |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any
Shapes = Mapping[str, jax.ShapeDtypeStruct]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Interleaved:
    """Slots that lie along dim 1 of an array: with them along dim 0, rows of a batch would be copied.

    Attributes:
      rows: The slots. Shape [rows per slot, slots, ...].
    """

    rows: jax.Array


def _is_interleaved(leaf: object) -> bool:
    return isinstance(leaf, Interleaved)


def load(tree: Tree, index: jax.Array | int) -> Tree:
    """Reads one slot of each buffer; index -1 reads slot 0, for an op whose result is dropped."""
    index = jnp.maximum(index, 0)

    def load_leaf(leaf):
        array, dim = (leaf.rows, 1) if _is_interleaved(leaf) else (leaf, 0)
        return jax.lax.dynamic_index_in_dim(array, index, dim, keepdims=False)

    return jax.tree.map(load_leaf, tree, is_leaf=_is_interleaved)


def slot_shapes(tree: Tree) -> Tree:
    """Returns the shapes of one slot of each buffer."""
    return jax.eval_shape(lambda tree: load(tree, 0), tree)


def store(tree: Tree, new: Tree, index: jax.Array | int, mask: jax.Array | bool) -> Tree:
    """Writes one slot of each buffer if `mask` is true."""
    index = jnp.maximum(index, 0)

    def store_leaf(buffer, value):
        # selects on one slot: a `where` over the whole buffer would rewrite every slot in every tick
        old = jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(mask, value, old), index, 0)

    return jax.tree.map(store_leaf, tree, new)


@dataclass(frozen=True, slots=True)
class Region:
    """The place of a parameter: the index of a buffer, and of its first element there."""

    buffer: int
    start: int


class StageBuffers:
    """Flat buffers that hold the parameters of any one stage.

    Attributes:
      stages: Of each stage, path to the shape and dtype of every parameter that it reads.
      buffers: Shapes of the buffers.
      regions: Of each stage, path to the region of every parameter.
    """

    def __init__(self, stages: Sequence[Shapes]):
        self.stages = [dict(stage) for stage in stages]
        self.buffers: list[jax.ShapeDtypeStruct] = []
        self.regions: list[dict[str, Region]] = [{} for _ in stages]
        for stage in sorted(range(len(stages)), key=lambda stage: -stage_bytes(self.stages[stage])):
            self._lay_out(stage)

    def _lay_out(self, stage: int) -> None:
        used = [0] * len(self.buffers)
        for path, leaf in sorted(self.stages[stage].items(), key=lambda item: (-item[1].size, item[0])):
            # best fit: the buffer with the least space that suffices, and one in use before an empty one
            fits = [
                (used[i] == 0, buffer.size - used[i], i)
                for i, buffer in enumerate(self.buffers)
                if buffer.dtype == leaf.dtype and buffer.size - used[i] >= leaf.size
            ]
            index = min(fits)[2] if fits else len(self.buffers)
            if not fits:
                self.buffers.append(jax.ShapeDtypeStruct((leaf.size,), leaf.dtype))
                used.append(0)
            self.regions[stage][path] = Region(index, used[index])
            used[index] += leaf.size

    def fill(self, stage: int, params: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Returns the buffers with a stage's parameters, and zeros where it has none."""
        parts: list[list[tuple[int, jax.Array]]] = [[] for _ in self.buffers]
        for path, region in self.regions[stage].items():
            parts[region.buffer].append((region.start, params[path].ravel()))
        filled = []
        for buffer, items in zip(self.buffers, parts, strict=True):
            values = [value for _, value in sorted(items, key=lambda item: item[0])]
            if missing := buffer.size - sum(value.size for value in values):
                values.append(jnp.zeros(missing, buffer.dtype))
            filled.append(jnp.concatenate(values) if len(values) > 1 else values[0])
        return filled

    def read(self, buffers: Sequence[jax.Array], stage: int) -> dict[str, jax.Array]:
        """Returns a stage's parameters."""
        return {
            path: _slice(buffers[region.buffer], region.start, leaf.size).reshape(leaf.shape)
            for path, leaf in self.stages[stage].items()
            for region in [self.regions[stage][path]]
        }

    def used_sizes(self, stage: int) -> list[int]:
        """Returns the number of elements of each buffer up to the last that a stage has."""
        sizes = [0] * len(self.buffers)
        for path, region in self.regions[stage].items():
            sizes[region.buffer] = max(sizes[region.buffer], region.start + self.stages[stage][path].size)
        return sizes

    def zeros(self) -> list[jax.Array]:
        """Returns buffers for sums of gradients, in float32 or wider."""
        return [jnp.zeros(buffer.shape, jnp.promote_types(buffer.dtype, jnp.float32)) for buffer in self.buffers]

    def add(self, sums: Sequence[jax.Array], stage: int, gradients: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Adds gradients of some of a stage's parameters to the sums.

        XLA updates the sums in place, and only in these regions: a concatenation would write all bytes of the buffers.
        """
        result = list(sums)
        for path, gradient in gradients.items():
            region, total = self.regions[stage][path], result[self.regions[stage][path].buffer]
            flat = gradient.ravel().astype(total.dtype)
            if flat.size == total.size:
                result[region.buffer] = total + flat
            else:
                region_sum = _slice(total, region.start, flat.size) + flat
                result[region.buffer] = lax.dynamic_update_slice(total, region_sum, (region.start,))
        return result


def stage_bytes(stage: Shapes) -> int:
    """Returns the bytes of a stage's parameters."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in stage.values())


def _slice(buffer: jax.Array, start: int, size: int) -> jax.Array:
    return buffer if size == buffer.size else lax.slice(buffer, (start,), (start + size,))
