"""Looks tokens up in an embedding table that is sharded by columns: each device uses its columns for all its tokens.

    forward     each device computes its columns of the result; they are gathered if the stream is unsharded over embed
    backward    each device adds up the gradient rows of its tokens in its columns; then one sum over devices

With a table sharded by rows, the result would be a sum over `tensor`, with twice the bytes of a gather. For a plain
lookup, XLA all-reduces the whole gradient over all axes of the batch. Here the gradient is a sum over a dim that is
sharded over these axes, which XLA turns into a reduce-scatter over `fsdp` and an all-reduce of the shard over the rest.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxpar.models.dim_names import constrain_to, get_spec, spec_axes

ROWS, COLUMNS = "vocab_table", "embed_table"  # dim names of such a table


def look_up(table_vd: jax.Array, tokens_bs: jax.Array) -> jax.Array:
    """Looks tokens up in a table, like `jnp.take`. Shape [batch, seq, dim].

    Args:
      table_vd: Shape [vocab, dim], with dim names `ROWS` and `COLUMNS`.
      tokens_bs: Shape [batch, seq], integers.
    """
    spec = _result_spec(table_vd, tokens_bs)
    return jnp.take(table_vd, tokens_bs, axis=0) if spec is None else _look_up_columns(table_vd, tokens_bs, spec)


def _result_spec(table_vd: jax.Array, tokens_bs: jax.Array) -> PartitionSpec | None:
    """The step's spec of the result; None leaves it to XLA: outside of a step, if shards are not equal, and in a
    pipeline, which shards the table by rows.
    """
    spec, mesh = get_spec(("batch", "seq", COLUMNS)), jax.sharding.get_abstract_mesh()
    if spec is None or mesh.shape.get("pipe", 1) > 1 or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    shape = (*tokens_bs.shape, table_vd.shape[1])
    shard_counts = [math.prod(mesh.shape[axis] for axis in spec_axes(entry)) for entry in spec]
    if math.prod(shard_counts) == 1 or any(size % n for size, n in zip(shape, shard_counts, strict=True)):
        return None
    return spec


def _look_up_columns(table_vd: jax.Array, tokens_bs: jax.Array, spec: PartitionSpec) -> jax.Array:
    batch, seq, columns = spec
    tokens, shards = PartitionSpec(batch, seq), PartitionSpec(None, columns)
    examples = (*spec_axes(batch), *spec_axes(seq))

    @jax.custom_vjp
    def look(table_vd: jax.Array, tokens_bs: jax.Array) -> jax.Array:
        take = lambda shard, tokens: jnp.take(shard, tokens, axis=0)  # noqa: E731
        return jax.shard_map(take, in_specs=(shards, tokens), out_specs=spec, check_vma=False)(table_vd, tokens_bs)

    def backward(residuals: tuple[jax.Array, jax.Array], grad_bsd: jax.Array) -> tuple[jax.Array, None]:
        template, tokens_bs = residuals

        def add_gradients(tokens: jax.Array, grad: jax.Array) -> jax.Array:
            zeros = jnp.zeros((template.shape[0], grad.shape[-1]), grad.dtype)
            return zeros.at[tokens.reshape(-1)].add(grad.reshape(-1, grad.shape[-1]), mode="drop")[None]

        shard = PartitionSpec(examples or None, None, columns)
        local_sums = jax.shard_map(add_gradients, in_specs=(tokens, spec), out_specs=shard, check_vma=False)(
            tokens_bs, grad_bsd
        )
        return jnp.einsum("e,evd->vd", jnp.ones(local_sums.shape[0], local_sums.dtype), local_sums), None

    look.defvjp(lambda table, tokens: (look(table, tokens), (table[:, :0], tokens)), backward)
    return _gather_columns(look(table_vd, tokens_bs), spec)


def _gather_columns(x_bsd: jax.Array, spec: PartitionSpec) -> jax.Array:
    # over a new outermost dim: gathered along the columns, XLA would lay out the stream of the whole model with its
    # columns outermost
    batch, seq, columns = spec
    stream = get_spec(("batch", "seq", "embed"))
    if columns is None or stream is None:
        return x_bsd
    shards = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in spec_axes(columns))
    stacked = jnp.moveaxis(x_bsd.reshape(*x_bsd.shape[:2], shards, -1), 2, 0)
    stacked = constrain_to(stacked, PartitionSpec(columns, batch, seq, None))
    stacked = constrain_to(stacked, PartitionSpec(None, *stream))
    return jnp.moveaxis(stacked, 0, 2).reshape(x_bsd.shape)
