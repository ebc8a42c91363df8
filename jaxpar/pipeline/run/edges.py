"""Messages between unequal stages: one edge for each pair of parts that exchange them, and an inbox on every device.

    part 0 ──► part 1 ──► part 2      forwards: any tree of arrays, of other shapes on every edge
           ◄──        ◄──             backwards: gradients of its floating-point arrays

A message travels as bytes, by one permute for each edge that is as long as the message. The inbox is laid out by the
stage that reads it: it has as many places for an edge as messages of that edge are alive at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.sharding.names import MESSAGE, Tree


@dataclass(frozen=True, eq=False)
class Edge:
    """Messages from one part of a model to another.

    Attributes:
      kind: x, the input of a part; or g, the gradient of what a part has sent.
      source: The part that sends.
      target: The part that receives.
      tree: Shapes and dtypes of a message.
    """

    kind: Literal["x", "g"]
    source: int
    target: int
    tree: Tree

    @property
    def bytes(self) -> int:
        """Bytes of a message."""
        return sum(data.size * data.dtype.itemsize for data in map(_data_shape, jax.tree.leaves(self.tree)))


class Inbox:
    """Places of messages in the inboxes of all stages.

    Attributes:
      edges: The edges.
      stages: Of each part, the stage that runs it.
      size: Bytes of an inbox: those of the stage that needs most.
    """

    def __init__(self, edges: Sequence[Edge], stages: Sequence[int], lifetimes: Sequence[Sequence[tuple[int, int]]]):
        """Assigns places to messages.

        Args:
          edges: The edges.
          stages: Of each part, the stage that runs it.
          lifetimes: Of each edge and microbatch, the tick in which the message is sent, and the last that reads it.
        """
        self.edges, self.stages = list(edges), list(stages)
        ends = [0] * (max(stages) + 1)
        self._starts: dict[Edge, np.ndarray] = {}  # of each microbatch, the first byte of its place
        for edge, spans in zip(edges, lifetimes, strict=True):
            count, places = _places(spans)
            stage = stages[edge.target]
            self._starts[edge] = (ends[stage] + places * edge.bytes).astype(np.int32)
            ends[stage] += count * edge.bytes
        self.size = max([1, *ends])

    def edge(self, kind: str, target: int) -> Edge:
        """Returns the edge on which a part receives messages of a kind."""
        return next(edge for edge in self.edges if (edge.kind, edge.target) == (kind, target))

    def read(self, inbox: jax.Array, edge: Edge, microbatch: jax.Array) -> Tree:
        """Returns a message."""
        start = jnp.asarray(self._starts[edge])[microbatch]
        return decode(lax.dynamic_slice(inbox, (start,), (edge.bytes,)), edge.tree)

    def send(self, inbox: jax.Array, outbox: jax.Array, microbatches: jax.Array) -> jax.Array:
        """Sends a message on each edge, in `jax.shard_map` over `pipe`; returns the inbox with what arrives.

        All devices call this in every tick, also those that send nothing: a permute that some do not reach never ends.

        Args:
          inbox: Shape [size], uint8.
          outbox: What this device sends: a message begins at its first byte.
          microbatches: Of each edge, the microbatch whose message travels in this tick, or -1.
        """
        stage = lax.axis_index("pipe")
        for edge, microbatch in zip(self.edges, microbatches, strict=True):
            source, target = self.stages[edge.source], self.stages[edge.target]
            message = outbox[: edge.bytes]
            if source != target:
                with jax.named_scope(MESSAGE):
                    message = lax.ppermute(message, "pipe", [(source, target)])
            arrives = (stage == target) & (microbatch >= 0)
            start = jnp.where(arrives, jnp.asarray(self._starts[edge])[jnp.maximum(microbatch, 0)], 0)
            kept = lax.dynamic_slice(inbox, (start,), (edge.bytes,))
            inbox = lax.dynamic_update_slice(inbox, jnp.where(arrives, message, kept), (start,))
        return inbox


def _places(spans: Iterable[tuple[int, int]]) -> tuple[int, np.ndarray]:
    """Returns the number of places, and the place of each microbatch's message.

    Greedy in the order of sends, which is optimal for intervals. A place is free again in the tick that last reads it:
    reads come before the sends of a tick.
    """
    free_from: list[int] = []
    spans = list(spans)
    places = np.zeros(len(spans), np.int64)
    for start, end, microbatch in sorted((start, end, microbatch) for microbatch, (start, end) in enumerate(spans)):
        place = next((i for i, last in enumerate(free_from) if last <= start), len(free_from))
        free_from[place : place + 1] = [end]
        places[microbatch] = place
    return len(free_from), places


# Trees of arrays as bytes.


def encode(tree: Tree, size: int) -> jax.Array:
    """Returns the bytes of a tree of arrays, with zeros up to a size. PRNG keys travel as their data."""
    parts = []
    for data in map(_data, jax.tree.leaves(tree)):
        bits = data.astype(jnp.uint8) if data.dtype == bool else lax.bitcast_convert_type(data, jnp.uint8)
        parts.append(bits.ravel())
    missing = size - sum(part.size for part in parts)
    return jnp.concatenate([*parts, jnp.zeros(missing, jnp.uint8)])


def decode(message: jax.Array, tree: Tree) -> Tree:
    """Returns the tree of arrays of a message.

    Args:
      message: Its bytes, in uint8.
      tree: The shapes and dtypes of its arrays.
    """
    start, leaves = 0, []
    for leaf in jax.tree.leaves(tree):
        data = _data_shape(leaf)
        end = start + data.size * data.dtype.itemsize
        bits = lax.slice(message, (start,), (end,)).reshape(*data.shape, data.dtype.itemsize)
        start = end
        if data.dtype.itemsize == 1:
            bits = bits[..., 0]
        value = bits.astype(bool) if data.dtype == bool else lax.bitcast_convert_type(bits, data.dtype)
        leaves.append(_like(value, leaf))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _data_shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_data, leaf)


def _like(data: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns data as keys if the leaf is of keys."""
    return jax.random.wrap_key_data(data, impl=leaf.dtype._impl) if _is_key(leaf) else data
