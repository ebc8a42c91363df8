"""Runs scans over layers that read and write buffers in place, one layer at a time.

    a scan                   slot ──copy──► stack ──► layers ──► stack of gradients ──► sum + stack
    the same, in place       buffer[slot, layer] ──► layer ──► sum[chunk, layer] += gradient

This avoids two copies: a stack of a stage's gradients, as large as its parameters, and a copy of a slot, as large as
the residuals of a microbatch. A buffer has the leading dims [entries, layers], and the scan runs along layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpar.jaxprs.dataflow import Env, Scan, variables

MATRIX = 2  # dims of a layer's array up to which XLA was observed to use one layout


@dataclass(frozen=True)
class BufferEntry:
    """A reference to one entry along dim 0 of a buffer.

    Attributes:
      buffer: Shape [entries, layers, ...].
      entry: Index of the entry, an int32 scalar; -1 is read as 0, for a result that is dropped.
      enabled: Whether writes have an effect, a bool scalar.
      join: Maps (old, new) value of a layer to the value to write.
      row_major: Whether layers are read and written in row-major layout. False for gradients, which only one op reads
        and writes, because XLA of jax 0.10 gathers an array that `tensor` splits if its layout is constrained.
    """

    buffer: jax.Array
    entry: Any
    enabled: Any = True
    join: Callable = lambda old, new: new
    row_major: bool = True

    @property
    def stack(self) -> jax.Array:
        """Reads the entry. Shape [layers, ...]."""
        return jax.lax.dynamic_index_in_dim(self.buffer, jnp.maximum(self.entry, 0), 0, keepdims=False)

    def write(self, stack: jax.Array) -> jax.Array:
        """Writes a stack of all layers to the entry; returns the buffer."""
        old = self.stack
        new = jnp.where(self.enabled, self.join(old, stack), old)
        return jax.lax.dynamic_update_index_in_dim(self.buffer, new, jnp.maximum(self.entry, 0), 0)

    def read_layer(self, buffer: jax.Array, number: jax.Array | int) -> jax.Array:
        """Reads one layer of the entry from the current `buffer`."""
        layer = jax.lax.dynamic_slice(buffer, self._start_indices(number), (1, 1, *buffer.shape[2:])).reshape(
            buffer.shape[2:]
        )
        return _row_major(layer) if self.row_major else layer

    def write_layer(self, buffer: jax.Array, number: jax.Array | int, new: jax.Array) -> jax.Array:
        """Writes one layer of the entry to the current `buffer`; returns the buffer."""
        old = self.read_layer(buffer, number)
        # selects on one layer: a `where` over the whole buffer would rewrite it in every iteration
        joined = jnp.where(self.enabled, self.join(old, new), old)
        joined = _row_major(joined) if self.row_major else joined
        return jax.lax.dynamic_update_slice(buffer, joined[None, None], self._start_indices(number))

    def _start_indices(self, number: jax.Array | int) -> tuple:
        zero = jnp.zeros((), jnp.int32)
        return (jnp.maximum(jnp.asarray(self.entry, jnp.int32), 0), number, *(zero,) * (self.buffer.ndim - 2))


def _row_major(one: jax.Array) -> jax.Array:
    """Constrains an array of several dims to row-major layout, so that all readers and writers use the same layout.

    Otherwise XLA chooses one layout for heads, [batch, tokens, heads, dim], or for scores of grouped queries where a
    forward writes them, another where backward ticks read them, and copies all slots in between, in every tick.
    """
    if one.ndim <= MATRIX:
        return one
    return with_layout_constraint(one, Layout(major_to_minor=tuple(range(one.ndim))))


def run_in_place(
    env: Env,
    eqns: Sequence[JaxprEqn],
    read: Mapping[Var, BufferEntry],
    write: Mapping[Var, BufferEntry],
    outs: Sequence,
) -> dict[Var, jax.Array]:
    """Runs equations whose inputs or results are entries of buffers; returns the written buffers.

    Args:
      env: Values of the variables that are not in buffers: inputs before the call, and also results after it.
      eqns: Equations in order. Scans read and write buffers one layer at a time, other equations a complete entry.
      read: Maps each input that is in a buffer instead of `env` to its entry.
      write: Maps each result that is written to a buffer to its entry.
      outs: Variables that the caller reads from `env` afterwards.
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
        targets = {
            var: write[var]
            for var in eqn.outvars[scan.carry :]
            if var in write and var not in readers and var not in variables(outs)
        }
        written |= _scan(env, scan, {var: read[var] for var in stacked_in if var in read and var not in env}, targets)
    return written | {var: place.write(env[var]) for var, place in write.items() if var not in written}


def _scan(
    env: Env, scan: Scan, read: Mapping[Var, BufferEntry], into: Mapping[Var, BufferEntry]
) -> dict[Var, jax.Array]:
    """Runs one scan; returns the written buffers."""
    eqn, body = scan.eqn, scan.body
    inputs = list(zip(eqn.invars, body.invars, strict=True))
    first = scan.consts + scan.carry
    placed = [(place, inner) for outer, inner in inputs[first:] if (place := _find_entry(outer, read))]
    plain_inputs = [(outer, inner) for outer, inner in inputs[first:] if not _find_entry(outer, read)]
    outs = list(zip(eqn.outvars, body.outvars, strict=True))[scan.carry :]
    stacked_outputs = [(outer, inner) for outer, inner in outs if outer not in into]
    targets = [(into[outer], inner, outer) for outer, inner in outs if outer in into]

    def step(state, item):
        carry, buffers = state
        number, xs = item
        layer_env = Env(body, scan.body_consts, [(inner, env[outer]) for outer, inner in inputs[: scan.consts]])
        layer_env.update(zip([inner for _, inner in inputs[scan.consts : first]], carry, strict=True))
        layer_env.update(zip([inner for _, inner in plain_inputs], xs, strict=True))
        layer_env.update({inner: place.read_layer(place.buffer, number) for place, inner in placed})
        for body_eqn in body.eqns:
            layer_env.run(body_eqn)
        buffers = [
            place.write_layer(buffer, number, layer_env[inner])
            for buffer, (place, inner, _) in zip(buffers, targets, strict=True)
        ]
        carried = [layer_env[var] for var in body.outvars[: scan.carry]]
        return (carried, buffers), [layer_env[inner] for _, inner in stacked_outputs]

    start = [env[outer] for outer, _ in inputs[scan.consts : first]], [place.buffer for place, _, _ in targets]
    xs = jnp.arange(scan.length, dtype=jnp.int32), [env[outer] for outer, _ in plain_inputs]
    name = str(eqn.source_info.name_stack)
    with jax.named_scope(name) if name else jax.named_scope("layers"):
        (last, buffers), ys = jax.lax.scan(step, start, xs, length=scan.length, reverse=scan.reverse)
    env.update(zip(eqn.outvars, last, strict=False))
    env.update(zip([outer for outer, _ in stacked_outputs], ys, strict=True))
    return dict(zip([outer for _, _, outer in targets], buffers, strict=True))


def _find_entry(item: Var | Literal, places: Mapping[Var, BufferEntry]) -> BufferEntry | None:
    """Returns the buffer entry of a variable; None for a literal."""
    return None if isinstance(item, Literal) else places.get(item)
