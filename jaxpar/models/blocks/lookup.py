"""A table that is looked up, cut by its columns: each device looks all of its tokens up in its own columns.

    forward     own columns of what was looked up, which are gathered where the stream is whole
    backward    rows of the gradient added up by each device for its own tokens and columns; then one sum over devices

By rows, what is looked up would be a sum over `tensor`: twice the bytes of a gather. Left to itself XLA sums the
gradient whole over all axes of the batch; as a sum over a dim that these cut, it is a reduce-scatter over `fsdp` and an
all-reduce of the shard over the rest, as for any matrix.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxpar.models.named import axes_of, constrain_to, spec_of

ROWS, COLUMNS = "vocab_table", "embed_table"  # names of the dims of such a table


def looked_up(table_vd: jax.Array, tokens_bs: jax.Array) -> jax.Array:
    """Returns the rows of a table for tokens, as `jnp.take` does. Shape [batch, seq, dim].

    Args:
      table_vd: Shape [vocab, dim], its dims named `ROWS` and `COLUMNS`.
      tokens_bs: Shape [batch, seq], integers.
    """
    cut = _cut(table_vd, tokens_bs)
    return jnp.take(table_vd, tokens_bs, axis=0) if cut is None else _by_columns(table_vd, tokens_bs, cut)


def _cut(table_vd: jax.Array, tokens_bs: jax.Array) -> PartitionSpec | None:
    """Returns how the step cuts what is looked up; None where XLA is to find its own way.

    So outside of a step, for pieces that are not equal, and in a pipeline, where it is cut by its rows.
    """
    spec, mesh = spec_of(("batch", "seq", COLUMNS)), jax.sharding.get_abstract_mesh()
    if spec is None or mesh.shape.get("pipe", 1) > 1 or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    shape = (*tokens_bs.shape, table_vd.shape[1])
    ways = [math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in spec]
    if math.prod(ways) == 1 or any(size % n for size, n in zip(shape, ways, strict=True)):
        return None
    return spec


def _by_columns(table_vd: jax.Array, tokens_bs: jax.Array, cut: PartitionSpec) -> jax.Array:
    batch, seq, columns = cut
    tokens, shards = PartitionSpec(batch, seq), PartitionSpec(None, columns)
    examples = (*axes_of(batch), *axes_of(seq))

    @jax.custom_vjp
    def look(table_vd: jax.Array, tokens_bs: jax.Array) -> jax.Array:
        take = lambda own, tokens: jnp.take(own, tokens, axis=0)  # noqa: E731
        return jax.shard_map(take, in_specs=(shards, tokens), out_specs=cut, check_vma=False)(table_vd, tokens_bs)

    def backward(kept: tuple[jax.Array, jax.Array], grad_bsd: jax.Array) -> tuple[jax.Array, None]:
        like, tokens_bs = kept

        def added(tokens: jax.Array, grad: jax.Array) -> jax.Array:
            zeros = jnp.zeros((like.shape[0], grad.shape[-1]), grad.dtype)
            return zeros.at[tokens.reshape(-1)].add(grad.reshape(-1, grad.shape[-1]), mode="drop")[None]

        own = PartitionSpec(examples or None, None, columns)
        each = jax.shard_map(added, in_specs=(tokens, cut), out_specs=own, check_vma=False)(tokens_bs, grad_bsd)
        return jnp.einsum("e,evd->vd", jnp.ones(each.shape[0], each.dtype), each), None

    look.defvjp(lambda table, tokens: (look(table, tokens), (table[:, :0], tokens)), backward)
    return _gathered(look(table_vd, tokens_bs), cut)


def _gathered(x_bsd: jax.Array, cut: PartitionSpec) -> jax.Array:
    # over a dim of its own, the outermost one: gathered along the columns, XLA would keep the stream of the whole model
    # with its columns outermost
    batch, seq, columns = cut
    stream = spec_of(("batch", "seq", "embed"))
    if columns is None or stream is None:
        return x_bsd
    ways = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes_of(columns))
    apart = jnp.moveaxis(x_bsd.reshape(*x_bsd.shape[:2], ways, -1), 2, 0)
    apart = constrain_to(apart, PartitionSpec(columns, batch, seq, None))
    apart = constrain_to(apart, PartitionSpec(None, *stream))
    return jnp.moveaxis(apart, 0, 2).reshape(x_bsd.shape)
