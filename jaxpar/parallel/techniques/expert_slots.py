"""Mixtures of experts with a capacity: slots travel to the devices of their experts, and back.

    tokens [batch, seq, dim] ─► slots [batch, experts, capacity, dim] ─all-to-all─► [experts, batch x capacity, dim]
                                                                                         │ the experts of each device
    sums [batch, seq, dim] ◄─ slots [batch, experts, capacity, dim] ◄──all-to-all────────┘

Where experts share buffers (`imbalance`), a buffer takes the place of an expert, and a third all-to-all, forward only,
sends the number of each slot's expert: 4 bytes a slot.

Only the all-to-alls are manual, over all axes that split slots: XLA gathers over an axis that is left to it before an
all-to-all. Everything else XLA partitions as it does around the mixture, so that gradients of experts are summed over
their replicas, to the shards of ZeRO.

One all-to-all crosses nodes too. With two levels, inside the node first and then between nodes, fewer and larger
messages cross the network. NCCL sends them so by itself since 2.12 (PXN: over NVLink to the GPU at the rail of the
destination, which sends those of its node in one), and two levels in the program wait for each other.
Source: https://developer.nvidia.com/blog/doubling-all2all-performance-with-nvidia-collective-communication-library-2-12
Slots have static shapes: `jax.lax.ragged_all_to_all` does not exist on CPUs, and XLA's kernel of it within one host has
one block, which reaches a fraction of NVLink's bandwidth. Blocks bound the imbalance instead.

Experts that share a buffer compute blocks of their sorted tokens, as in MegaBlocks (arXiv:2211.15841).

    slots of a buffer     b a . a b a a .          (. is empty)
    sorted, in blocks     a a a | a . . | b b . | . . .
    weights of blocks     a       a       b       b

A block has tokens of one expert. A buffer of n slots and s experts has blocks of B = ceil(n / 4s) tokens, of which
floor((n + s (B - 1)) / B) hold any load: 5 s or fewer. So the matmuls have 5/4 or less of the FLOP of n tokens. With a
bound `imbalance` that is at most 5/4 x imbalance x the FLOP of the choices; by a capacity of the same factor it is
imbalance x the same. `jax.lax.ragged_dot` takes no function of one expert, and as XLA compiles it for CPUs and for an
H100 (jax 0.12.0) every token has the FLOP of all s experts: s instead of 5/4.

The weights are copied for blocks, five times the size of a device's experts, and made again in the backward pass.

Both sorting and its inverse are gathers, see `dispatch`; gradients of weights are summed over blocks by a matmul.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, get_abstract_mesh

from jaxpar.errors import refuse
from jaxpar.models.blocks.dispatch import Load, combine, dispatch
from jaxpar.models.dim_names import constrain, constrain_to, get_spec, partial_spec, spec_axes
from jaxpar.models.experts import Expert, Routing, Tree
from jaxpar.sharding.names import DISPATCH, TOKENS

FINENESS = 4  # blocks of a mean load: more of them have fewer empty entries, and more copies of weights
WEIGHTS = "weights of blocks"
AXIS = "expert"


def in_blocks(expert: Expert, params: Tree, tokens: jax.Array, place: jax.Array) -> jax.Array:
    """Computes each token by its expert.

    Args:
      expert: See `jp.mixture`.
      params: Parameters of all experts. Shape [experts, ...]; the experts of a buffer are consecutive.
      tokens: Shape [buffers, shards..., rows, slots, dim].
      place: Place of each token's expert among those of its buffer; their number for none. Shape
        [buffers, shards..., rows, slots, 1], int32.

    Returns:
      What the experts return, 0 where there is no token. Shape [buffers, shards..., rows, slots, dim].
    """
    buffers, *shards, rows, slots, width = tokens.shape
    params = jax.tree.map(lambda leaf: leaf.reshape(buffers, -1, *leaf.shape[1:]), params)
    run = partial(_one_buffer, expert)
    for _ in shards:
        run = jax.vmap(run, in_axes=(None, 0, 0))
    leading = (buffers, *shards, rows * slots)
    y = jax.vmap(run)(params, tokens.reshape(*leading, width), place.reshape(leading))
    return y.reshape(*tokens.shape[:-1], -1)


def _one_buffer(expert: Expert, params: Tree, x_nd: jax.Array, place_n: jax.Array) -> jax.Array:
    count, sharing = len(x_nd), jax.tree.leaves(params)[0].shape[0]
    size = math.ceil(count / (FINENESS * sharing))
    blocks = (count + sharing * (size - 1)) // size
    entry, token, of_block = _sort(place_n, sharing, size, blocks)
    sorted_tokens = dispatch(x_nd, entry[:, None], token).reshape(blocks, size, -1)
    y = _expert_of_blocks(expert, params, of_block, sorted_tokens)
    return dispatch(y.reshape(blocks * size, -1), token[:, None], entry)


def _sort(place_n: jax.Array, sharing: int, size: int, blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the entry of each token in blocks [n], the token of each entry [blocks x size], and experts of blocks."""
    matches = place_n[:, None] == jnp.arange(sharing)
    counts = jnp.sum(matches, axis=0, dtype=jnp.int32)
    last_block = jnp.cumsum(-(-counts // size))
    first_entry = (last_block + counts // -size) * size
    rank = jnp.argsort(jnp.argsort(place_n, stable=True)).astype(jnp.int32)
    shift = jnp.sum(jnp.where(matches, first_entry - (jnp.cumsum(counts) - counts), 0), axis=1)
    entry = jnp.where(place_n < sharing, rank + shift, blocks * size)
    numbers = jnp.arange(len(place_n), dtype=jnp.int32)
    token = jnp.full((blocks * size,), len(place_n), jnp.int32).at[entry].set(numbers, mode="drop")
    of_block = jnp.sum(jnp.arange(blocks)[:, None] >= last_block, axis=1)
    return entry, token, jnp.minimum(of_block, sharing - 1)


@partial(jax.checkpoint, static_argnums=0, policy=jax.checkpoint_policies.save_anything_except_these_names(WEIGHTS))
def _expert_of_blocks(expert: Expert, params: Tree, of_block: jax.Array, tokens: jax.Array) -> jax.Array:
    weights = jax.tree.map(lambda leaf: checkpoint_name(_weights_of_blocks(leaf, of_block), WEIGHTS), params)
    return jax.vmap(expert)(weights, tokens)


@jax.custom_vjp
def _weights_of_blocks(leaf: jax.Array, of_block: jax.Array) -> jax.Array:
    return jnp.take(leaf, of_block, axis=0, mode="clip")


def _weights_of_blocks_backward(belongs: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tensordot(belongs.astype(g.dtype), g, 1), None


_weights_of_blocks.defvjp(
    lambda leaf, of_block: (_weights_of_blocks(leaf, of_block), of_block == jnp.arange(len(leaf))[:, None]),
    _weights_of_blocks_backward,
)


def mixture(expert: Expert, params: Tree, x: jax.Array, routing: Routing) -> tuple[jax.Array, Load]:
    """Sends the slots of each expert to the device that has it, and back: static shapes, two all-to-alls."""
    slots, split = routing.slots(), _split(x.shape[0])
    if routing.buffers % split.ways:
        raise refuse(
            f"expert={split.ways} for experts that share {routing.buffers} buffers",
            rule="the devices of `expert` have the same number of buffers",
            fix=f"buffers={math.lcm(routing.buffers, split.ways)}, which changes what overflows, or "
            f"expert={math.gcd(routing.buffers, split.ways)}",
        )

    # whole but for rows: of lookups in what other axes split, XLA ends the process in some pipelines
    def by_rows(x: jax.Array) -> jax.Array:
        return constrain(x, "batch", *(None,) * (x.ndim - 1))

    rows, width, of_buffer = x.shape[0], x.shape[-1], (routing.buffers, routing.capacity)
    slot, choice = by_rows(slots.slot), by_rows(slots.choice)
    with jax.named_scope(DISPATCH):
        sent = by_rows(jax.vmap(dispatch)(by_rows(x), slot, choice)).reshape(rows, *of_buffer, width)
    empty = [(0, 0), (0, 0), (0, -routing.capacity % split.pieces), (0, 0)]  # slots, for pieces of one size
    tokens = split.to_experts(jnp.pad(sent, empty))
    if routing.sharing == 1:
        y = jax.vmap(expert)(params, tokens.reshape(routing.experts, -1, width))
    else:
        place = by_rows(slots.place).reshape(rows, *of_buffer, 1)
        y = in_blocks(expert, params, tokens, split.to_experts(jnp.pad(place, empty, constant_values=routing.sharing)))
    returned = split.to_rows(y.reshape(*tokens.shape[:-1], -1))[:, :, : routing.capacity]
    returned = by_rows(returned.reshape(rows, math.prod(of_buffer), -1))
    sums = by_rows(jax.vmap(combine)(returned, by_rows(routing.weights), slot, choice))
    return constrain(sums, "batch", "seq", None), slots.load


@dataclass(frozen=True)
class Split:
    """The axes that split the slots [batch, experts, capacity, dim] of a mixture.

    Attributes:
      ways: Number of devices of `expert`; 1 where it splits no rows here.
      others: The other axes that split rows.
      outer: The product of their sizes.
      context: The axis that splits the slots of an expert, or ().
      pieces: Its size.
    """

    ways: int
    others: tuple[str, ...]
    outer: int
    context: tuple[str, ...]
    pieces: int

    def to_experts(self, x: jax.Array) -> jax.Array:
        """Moves slots to the devices of their experts.

        Returns shape [experts, pieces, outer, ways x rows, slots of a piece, dim].

        Dims that axes split come first: if XLA merges dims, it keeps only a split of the first of them.
        """
        if self.ways == 1:
            if axes := {dim: on for dim, on in ((0, self.others), (2, self.context)) if on}:
                x = constrain_to(x, partial_spec(4, axes))
            rows, experts, capacity, width = x.shape
            x = x.reshape(self.outer, rows // self.outer, experts, self.pieces, capacity // self.pieces, width)
            return x.transpose(2, 3, 0, 1, 4, 5)

        def local(x: jax.Array) -> jax.Array:
            _, _, rows, experts, *slots = x.shape
            x = x.reshape(rows, self.ways, experts // self.ways, *slots)
            x = jax.lax.all_to_all(x, AXIS, split_axis=1, concat_axis=1).transpose(2, 1, 0, 3, 4)
            return x.reshape(x.shape[0], 1, 1, -1, *slots)

        # rows lie over (others, expert): dim 0 is cut by the others and dim 1 by `expert`
        x = x.reshape(self.outer, self.ways, -1, *x.shape[1:])
        return self._manual(local, self._by_rows, self._by_expert)(x)

    def to_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_experts`: [batch, experts, capacity, dim]."""
        if self.ways == 1:
            x = x.transpose(2, 3, 0, 1, 4, 5)
            return x.reshape(-1, x.shape[2], x.shape[3] * x.shape[4], x.shape[5])

        def local(x: jax.Array) -> jax.Array:
            here, _, _, rows, *slots = x.shape
            x = x.reshape(here, self.ways, rows // self.ways, *slots).transpose(2, 1, 0, 3, 4)
            x = jax.lax.all_to_all(x, AXIS, split_axis=1, concat_axis=1)
            return x.reshape(1, 1, x.shape[0], -1, *slots)

        x = self._manual(local, self._by_expert, self._by_rows)(x)
        return x.reshape(-1, *x.shape[3:])

    @property
    def _by_rows(self) -> PartitionSpec:
        return PartitionSpec(self.others or None, AXIS, None, None, self.context or None)

    @property
    def _by_expert(self) -> PartitionSpec:
        return PartitionSpec(AXIS, self.context or None, self.others or None)

    def _manual(self, local: Callable, before: PartitionSpec, after: PartitionSpec) -> Callable:
        axes = {AXIS, *self.others, *self.context}
        return jax.named_scope(TOKENS)(jax.shard_map(local, axis_names=axes, in_specs=before, out_specs=after))


def _split(rows: int) -> Split:
    """Returns the axes that split this many rows, and slots, here; none outside of a step."""
    mesh, spec = get_abstract_mesh(), get_spec(("batch", "seq"))
    if spec is None:
        return Split(1, (), 1, (), 1)
    free = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes}
    by_rows = tuple(axis for axis in spec_axes(spec[0]) if axis in free)
    if rows % math.prod(free[axis] for axis in by_rows):
        return Split(1, (), 1, (), 1)
    context = tuple(axis for axis in spec_axes(spec[1]) if axis == "context" and axis in free)
    others = tuple(axis for axis in by_rows if axis != AXIS)
    return Split(
        ways=free.get(AXIS, 1) if AXIS in by_rows else 1,
        others=others,
        outer=math.prod(free[axis] for axis in others),
        context=context,
        pieces=math.prod(free[axis] for axis in context),
    )
