"""Messages between unequal stages: an edge for each pair of parts of which one reads values of the other.

    part 0 ──► part 1 ──► part 2      forwards: the arrays that this part reads, of other shapes on every edge
       └─────────────────────┘        a skip connection is an edge like any other
           ◄──        ◄──             backwards: gradients of the floating-point arrays among them

Each edge has one permute per tick, which sends a message as bytes. A stage's inbox has as many slots for an edge as
messages of that edge wait at once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.pipeline.run.stage_replicas import StageReplicas
from jaxpar.sharding.names import MESSAGE, Tree


@dataclass(frozen=True, eq=False)
class Edge:
    """Messages from one part of a model to another.

    Attributes:
      kind: "x" for values that the target reads, "g" for gradients of values that it has sent.
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
        return tree_bytes(self.tree)


class Outbox:
    """Places of the messages that one op of a part sends, one edge after the other.

    Attributes:
      edges: The edges.
      size: Bytes of the messages of one microbatch.
    """

    def __init__(self, edges: Sequence[Edge]):
        self.edges = list(edges)
        ends = np.cumsum([0, *(edge.bytes for edge in edges)])
        self.starts: dict[Edge, int] = {edge: int(start) for edge, start in zip(edges, ends, strict=False)}
        self.size = int(ends[-1])

    def fill(self, messages: Mapping[int, Tree]) -> jax.Array:
        """Returns the bytes of the messages to each part."""
        return encode([messages[edge.target] for edge in self.edges], self.size)


class Inbox:
    """Places of messages in the inboxes of all devices.

    Attributes:
      edges: The edges.
      size: Bytes of an inbox: those of the stage that needs most.
    """

    def __init__(
        self,
        outboxes: Mapping[tuple[str, int], Outbox],
        stages: Sequence[int],
        replicas: StageReplicas,
        lifetimes: Mapping[Edge, Sequence[tuple[int, int]]],
    ):
        """Assigns places to messages.

        Args:
          outboxes: The outbox of the edges of each kind and source.
          stages: Of each part, the stage that runs it.
          replicas: The devices of the stages.
          lifetimes: Of each edge and group, the tick in which the messages are sent, and the last that reads them.
        """
        self.edges, self._outboxes, self._stages, self._replicas = list(lifetimes), outboxes, stages, replicas
        ends = [0] * len(replicas.counts)
        self._starts: dict[Edge, np.ndarray] = {}  # of each group, the first byte of its place
        for edge, spans in lifetimes.items():
            count, places = assign_places(spans)
            stage = stages[edge.target]
            place_bytes = replicas.share(stage) * edge.bytes
            self._starts[edge] = (ends[stage] + places * place_bytes).astype(np.int32)
            ends[stage] += count * place_bytes
        self.size = max([1, *ends])

    def read(self, inbox: jax.Array, edge: Edge, group: jax.Array, number: jax.Array | int) -> Tree:
        """Returns the message of a microbatch: the one with index `number` in its group on this device."""
        start = jnp.asarray(self._starts[edge])[group] + number * edge.bytes
        return decode(lax.dynamic_slice(inbox, (start,), (edge.bytes,)), edge.tree)

    def send(self, inbox: jax.Array, outbox: jax.Array, groups: jax.Array) -> jax.Array:
        """Sends the messages of a tick on all edges, and returns the inbox with those that arrived.

        All devices run all permutes, because a permute that some do not reach never ends.

        Args:
          inbox: Shape [size], uint8.
          outbox: The bytes that this device sends: the outboxes of its microbatches, one after the other.
          groups: Of each edge, the group whose messages travel in this tick, or -1.
        """
        for edge, group in zip(self.edges, groups, strict=True):
            place = jnp.asarray(self._starts[edge])[jnp.maximum(group, 0)]
            source, target = self._stages[edge.source], self._stages[edge.target]
            rounds = self._replicas.rounds(source, target) if source != target else self._local_rounds(source)
            for messages in rounds:
                inbox = self._send_round(inbox, outbox, edge, messages, place, group)
        return inbox

    def _local_rounds(self, stage: int) -> Iterator[list[tuple[int, int, int, int]]]:
        """Yields the messages of a group between two parts of one stage, which stay on their devices."""
        devices = [self._replicas.device(stage, replica) for replica in range(self._replicas.counts[stage])]
        for number in range(self._replicas.share(stage)):
            yield [(device, number, device, number) for device in devices]

    def _send_round(
        self,
        inbox: jax.Array,
        outbox: jax.Array,
        edge: Edge,
        messages: Sequence[tuple[int, int, int, int]],
        place: jax.Array,
        group: jax.Array,
    ) -> jax.Array:
        source_outbox, device = self._outboxes[edge.kind, edge.source], lax.axis_index("pipe")
        sends, arrives = self._message_numbers(messages, 0), self._message_numbers(messages, 2)
        # a stage of one device sends from an offset that is known at compile time, where XLA reads without a copy
        number = jnp.maximum(jnp.asarray(sends)[device], 0) if sends.max() else 0
        message = lax.dynamic_slice(outbox, (source_outbox.starts[edge] + source_outbox.size * number,), (edge.bytes,))
        if pairs := [(source, target) for source, _, target, _ in messages if source != target]:
            with jax.named_scope(MESSAGE):
                message = lax.ppermute(message, "pipe", pairs)
        number = jnp.asarray(arrives)[device]
        is_receiver = (number >= 0) & (group >= 0)
        start = jnp.where(is_receiver, place + number * edge.bytes, 0)
        current = lax.dynamic_slice(inbox, (start,), (edge.bytes,))
        return lax.dynamic_update_slice(inbox, jnp.where(is_receiver, message, current), (start,))

    def _message_numbers(self, messages: Sequence[tuple[int, int, int, int]], end: int) -> np.ndarray:
        """Returns the number of the message that each device sends (end 0) or receives (end 2) in a round, or -1."""
        numbers = np.full(sum(self._replicas.counts), -1, np.int32)
        for message in messages:
            numbers[message[end]] = message[end + 1]
        return numbers


def assign_places(spans: Iterable[tuple[int, int]]) -> tuple[int, np.ndarray]:
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


def tree_bytes(tree: Tree) -> int:
    """Returns the bytes of a tree of arrays or shapes, as a message."""
    return sum(data.size * data.dtype.itemsize for data in map(_data_shape, jax.tree.leaves(tree)))


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
        leaves.append(_wrap_keys(value, leaf))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _data_shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(_data, leaf)


def _wrap_keys(data: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Wraps the data as PRNG keys if the leaf has keys."""
    return jax.random.wrap_key_data(data, impl=leaf.dtype._impl) if _is_key(leaf) else data
