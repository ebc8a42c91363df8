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
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpar.parallel.techniques.exchanged.ways import Ways


class Meeting(Protocol):
    """How the queries of a device meet keys that have come. A form of it knows its own arrays of both."""

    def given(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries, and keys and values as one array, of pieces [b, s, heads, k]."""
        ...

    def queries(self, q: jax.Array) -> Any:
        """Returns queries with what is the same in all turns."""
        ...

    def own(self, queries: Any, kv: jax.Array) -> Any:
        """Returns the sums of queries that have met the keys of their own group."""
        ...

    def met(self, sums: Any, queries: Any, kv: jax.Array, other: jax.Array) -> Any:
        """Returns the sums after queries have met the keys of another group too."""
        ...

    def ended(self, sums: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the output [b, s, heads, k] and the logsumexp of queries that have met all keys."""
        ...

    def end(self, grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> Any:
        """Returns what the backward pass knows of queries, of what `ended` returned and the output's gradient."""
        ...

    def own_back(self, queries: Any, kv: jax.Array, end: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients, in float32, of queries and of the keys and values of their own group."""
        ...

    def met_back(
        self, of_q: jax.Array, queries: Any, kv: jax.Array, end: Any, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of queries with those of another group's keys added, and of these keys and values."""
        ...

    def gradients(self, of_q: jax.Array, of_kv: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of q, k and v as pieces."""
        ...


@dataclass(frozen=True)
class Ring:
    """A ring that a device has its part in.

    Attributes:
      ways: The devices.
      meeting: How queries meet keys.
    """

    ways: Ways
    meeting: Meeting

    def whose(self, turn: int | jax.Array) -> jax.Array:
        """Returns the group whose keys have come by a turn."""
        return (self.ways.group - turn) % self.ways.ring

    def forward(self, q: jax.Array, kv: jax.Array) -> Any:
        """Returns the sums of the group's queries over all keys."""
        queries, last = self.meeting.queries(q), self.ways.ring - 1

        def one(carry: tuple[Any, jax.Array], turn: jax.Array) -> tuple[tuple[Any, jax.Array], None]:
            sums, kv = carry
            coming = self.ways.send_on(kv)
            return (self.meeting.met(sums, queries, kv, self.whose(turn)), coming), None

        coming = self.ways.send_on(kv) if last else kv
        sums = self.meeting.own(queries, kv)
        if last > 1:
            (sums, coming), _ = jax.lax.scan(one, (sums, coming), jnp.arange(1, last))
        return self.meeting.met(sums, queries, coming, self.whose(last)) if last else sums

    def backward(self, q: jax.Array, kv: jax.Array, end: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of the group's queries, and of its keys and values."""
        queries, last = self.meeting.queries(q), self.ways.ring - 1

        def one(carry: tuple, turn: jax.Array) -> tuple[tuple, None]:
            of_q, kv, so_far = carry
            coming, arriving = self.ways.send_on(kv), self.ways.send_on(so_far)
            of_q, mine = self.meeting.met_back(of_q, queries, kv, end, self.whose(turn))
            return (of_q, coming, arriving + mine), None

        coming = self.ways.send_on(kv) if last else kv
        of_q, so_far = self.meeting.own_back(queries, kv, end)
        if not last:
            return of_q, so_far
        if last > 1:
            (of_q, coming, so_far), _ = jax.lax.scan(one, (of_q, coming, so_far), jnp.arange(1, last))
        arriving = self.ways.send_on(so_far)
        of_q, mine = self.meeting.met_back(of_q, queries, coming, end, self.whose(last))
        return of_q, self.ways.send_on((arriving + mine).astype(q.dtype))
