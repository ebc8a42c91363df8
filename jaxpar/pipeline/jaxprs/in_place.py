"""Scans over layers that read and write buffers where they are, one layer at a time.

    a scan                   slot ──copy──► stack ──► layers ──► stack of gradients ──► sum + stack
    the same, in place       buffer[slot, layer] ──► layer ──► sum[chunk, layer] += gradient

A stack of a stage's gradients is as large as its parameters, and a copied slot as all that a microbatch keeps: neither
is made. A buffer has two leading dims, and the scan runs along the second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpar.pipeline.jaxprs.dataflow import Env, Scan, variables

MANY = 4  # dims of a layer's array up to which XLA has been seen to keep one order, as of plain queries' heads


@dataclass(frozen=True)
class Place:
    """One entry of a buffer's leading dim.

    Attributes:
      buffer: Shape [entries, layers, ...].
      entry: Which, an int32 scalar; -1 stands for 0, for a result that is dropped.
      take: Whether what is written counts, a bool scalar.
      join: (old, new) to what is written, of one layer.
    """

    buffer: jax.Array
    entry: Any
    take: Any = True
    join: Callable = lambda old, new: new

    @property
    def stack(self) -> jax.Array:
        """The entry. Shape [layers, ...]."""
        return jax.lax.dynamic_index_in_dim(self.buffer, jnp.maximum(self.entry, 0), 0, keepdims=False)

    def written(self, stack: jax.Array) -> jax.Array:
        """Returns the buffer with a whole stack written."""
        old = self.stack
        new = jnp.where(self.take, self.join(old, stack), old)
        return jax.lax.dynamic_update_index_in_dim(self.buffer, new, jnp.maximum(self.entry, 0), 0)

    def layer(self, buffer: jax.Array, number: Any) -> jax.Array:
        """Returns one layer of the entry, of the buffer as it is by now."""
        one = jax.lax.dynamic_slice(buffer, self._at(number), (1, 1, *buffer.shape[2:])).reshape(buffer.shape[2:])
        return _row_major(one)

    def with_layer(self, buffer: jax.Array, number: Any, new: jax.Array) -> jax.Array:
        """Returns the buffer with one layer of the entry written."""
        old = self.layer(buffer, number)
        # the choice is made on one layer: a `where` over the whole buffer would rewrite it in every turn
        joined = _row_major(jnp.where(self.take, self.join(old, new), old))
        return jax.lax.dynamic_update_slice(buffer, joined[None, None], self._at(number))

    def _at(self, number: Any) -> tuple:
        zero = jnp.zeros((), jnp.int32)
        return (jnp.maximum(jnp.asarray(self.entry, jnp.int32), 0), number, *(zero,) * (self.buffer.ndim - 2))


def _row_major(one: jax.Array) -> jax.Array:
    """Returns the same, in memory in the order of its dims, so that all who read and write the buffer agree on one.

    Left to itself XLA lays scores of grouped queries, [batch, kv_heads, group, queries, keys], in one order where a
    forward writes them and in another where ticks that only go backward read them, and copies all slots in between.
    """
    if one.ndim <= MANY:
        return one
    return with_layout_constraint(one, Layout(major_to_minor=tuple(range(one.ndim))))


def run_in_place(
    env: Env, eqns: Sequence[JaxprEqn], read: Mapping[Var, Place], write: Mapping[Var, Place], outs: Sequence
) -> dict[Var, jax.Array]:
    """Computes equations whose inputs or results are entries of buffers; returns the buffers that are written.

    Args:
      env: Has the other inputs, and afterwards all results that are in no buffer.
      eqns: In order. Scans read and write their buffers one layer at a time, all other equations a whole entry.
      read: Variables that are not in `env`, to where they are.
      write: Variables to where they go.
      outs: Variables that are asked of `env` afterwards.
    """
    readers: dict[Var, int] = {}
    for eqn in eqns:
        for var in variables(eqn.invars):
            readers[var] = readers.get(var, 0) + 1
    written: dict[Var, jax.Array] = {}
    for eqn in eqns:
        scan = Scan(eqn) if eqn.primitive.name == "scan" else None
        stacked_in = variables(eqn.invars[len(eqn.invars) - scan.xs :]) if scan else set()
        for var in variables(eqn.invars):
            if var in read and var not in env and var not in stacked_in:
                env[var] = read[var].stack
        if scan is None:
            env.run(eqn)
            continue
        into = {
            var: write[var]
            for var in eqn.outvars[scan.carry :]
            if var in write and var not in readers and var not in variables(outs)
        }
        written |= _scan(env, scan, {var: read[var] for var in stacked_in if var in read and var not in env}, into)
    return written | {var: place.written(env[var]) for var, place in write.items() if var not in written}


def _scan(env: Env, scan: Scan, read: Mapping[Var, Place], into: Mapping[Var, Place]) -> dict[Var, jax.Array]:
    """Runs one scan; returns the buffers that it writes."""
    eqn, body = scan.eqn, scan.body
    inputs = list(zip(eqn.invars, body.invars, strict=True))
    first = scan.consts + scan.carry
    placed = [(place, inner) for outer, inner in inputs[first:] if (place := _of(outer, read))]
    others = [(outer, inner) for outer, inner in inputs[first:] if not _of(outer, read)]
    outs = list(zip(eqn.outvars, body.outvars, strict=True))[scan.carry :]
    kept = [(outer, inner) for outer, inner in outs if outer not in into]
    added = [(into[outer], inner, outer) for outer, inner in outs if outer in into]

    def step(state, each):
        carry, buffers = state
        number, xs = each
        inside = Env(body, scan.body_consts, [(inner, env[outer]) for outer, inner in inputs[: scan.consts]])
        inside.update(zip([inner for _, inner in inputs[scan.consts : first]], carry, strict=True))
        inside.update(zip([inner for _, inner in others], xs, strict=True))
        inside.update({inner: place.layer(place.buffer, number) for place, inner in placed})
        for each_eqn in body.eqns:
            inside.run(each_eqn)
        buffers = [
            place.with_layer(buffer, number, inside[inner])
            for buffer, (place, inner, _) in zip(buffers, added, strict=True)
        ]
        carried = [inside[var] for var in body.outvars[: scan.carry]]
        return (carried, buffers), [inside[inner] for _, inner in kept]

    start = [env[outer] for outer, _ in inputs[scan.consts : first]], [place.buffer for place, _, _ in added]
    xs = jnp.arange(scan.length, dtype=jnp.int32), [env[outer] for outer, _ in others]
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else jax.named_scope("layers"):
        (last, buffers), ys = jax.lax.scan(step, start, xs, length=scan.length, reverse=scan.reverse)
    env.update(zip(eqn.outvars, last, strict=False))
    env.update(zip([outer for outer, _ in kept], ys, strict=True))
    return dict(zip([outer for _, _, outer in added], buffers, strict=True))


def _of(item: Any, places: Mapping[Var, Place]) -> Place | None:
    """Returns where a variable is; None of a literal, which is in no buffer."""
    return None if isinstance(item, Literal) else places.get(item)
