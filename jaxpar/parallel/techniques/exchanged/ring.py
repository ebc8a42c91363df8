"""Keys and values go around; each group's queries meet those that have come (Ring Attention, arXiv:2310.01889).

    turn           0          1                 ...    P - 1
    sent on        K, V       K, V              ...
    met            own        of group r - 1    ...    of group r + 1
    backward too              dK, dV arrive and     dK, dV go home
                              are added to

What comes next is sent before the turn's keys are met, so that it travels meanwhile. The last turn sends no keys. The
gradients of keys and values go around with them, in float32; those of a turn are added when the sum so far has arrived.
Home they go in the dtype of keys: nothing is added there. Keys and values are one array, and so are their gradients:
what goes on in a turn is one permute of each, and the last one of gradients cannot be put off until they go home.
The turns are one loop, whose program is as long for 64 devices as for 4.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.kernel import (
    Ended,
    Keys,
    Queries,
    Sums,
    meet,
    meet_back,
    no_grads,
    nothing_met,
    tied,
    wide,
)
from jaxpar.parallel.techniques.exchanged.walks import Walks
from jaxpar.parallel.techniques.exchanged.ways import Ways


@dataclass(frozen=True)
class Ring:
    """A ring that a device has its part in.

    Attributes:
      ways: The devices.
      walks: The tables.
      segments: Segments of all tokens [b, s], or None.
    """

    ways: Ways
    walks: Walks
    segments: jax.Array | None

    def queries(self, q: jax.Array) -> Queries:
        """Returns the group's queries, where they stand."""
        return tied(Queries(q, *self.walks.stand(self.ways.group, self.segments, self.walks.queries)))

    def keys(self, kv: jax.Array, turn: int | jax.Array) -> Keys:
        """Returns keys and values, where those that have come by a turn stand."""
        return tied(Keys(kv, *self.walks.stand(self.whose(turn), self.segments, self.walks.keys)))

    def whose(self, turn: int | jax.Array) -> jax.Array:
        """Returns the group whose keys have come by a turn."""
        return (self.ways.group - turn) % self.ways.ring

    def forward(self, q: jax.Array, kv: jax.Array) -> Sums:
        """Returns the sums of the group's queries over all keys."""
        queries, last = self.queries(q), self.ways.ring - 1

        def met(sums: Sums, kv: jax.Array, turn: int | jax.Array) -> Sums:
            table = self.walks.met(self.ways.group, self.whose(turn))
            return meet(sums, queries, self.keys(kv, turn), table, self.walks.rule)

        def one(carry: tuple[Sums, jax.Array], turn: jax.Array) -> tuple[tuple[Sums, jax.Array], None]:
            sums, kv = carry
            coming = self.ways.send_on(kv)
            return (met(sums, kv, turn), coming), None

        coming = self.ways.send_on(kv) if last else kv
        sums = meet(nothing_met(q), queries, self.keys(kv, 0), self.walks.own(), self.walks.rule)
        if last > 1:
            (sums, coming), _ = jax.lax.scan(one, (sums, coming), jnp.arange(1, last))
        return met(sums, coming, last) if last else sums

    def backward(self, q: jax.Array, kv: jax.Array, end: Ended) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of the group's queries, and of its keys and values."""
        queries, last, rule = self.queries(q), self.ways.ring - 1, self.walks.rule

        def met(of_q: jax.Array, kv: jax.Array, turn: int | jax.Array) -> tuple[jax.Array, jax.Array]:
            keys, table = self.keys(kv, turn), self.walks.met(self.ways.group, self.whose(turn))
            return meet_back((of_q, no_grads(kv)), queries, keys, end, (table, rule))

        def one(carry: tuple, turn: jax.Array) -> tuple[tuple, None]:
            of_q, kv, so_far = carry
            coming, arriving = self.ways.send_on(kv), self.ways.send_on(so_far)
            of_q, mine = met(of_q, kv, turn)
            return (of_q, coming, arriving + mine), None

        coming = self.ways.send_on(kv) if last else kv
        zeros = jnp.zeros(q.shape, wide(q))
        keys = self.keys(kv, 0)
        of_q, so_far = meet_back((zeros, no_grads(kv)), queries, keys, end, (self.walks.own(), rule))
        if not last:
            return of_q, so_far
        if last > 1:
            (of_q, coming, so_far), _ = jax.lax.scan(one, (of_q, coming, so_far), jnp.arange(1, last))
        arriving = self.ways.send_on(so_far)
        of_q, mine = met(of_q, coming, last)
        return of_q, self.ways.send_on((arriving + mine).astype(q.dtype))
