"""Attention over sequence shards, with one backward pass around all communication.

    forward     all_to_all (ulysses) ─► zigzag in ─► ring ─► zigzag out ─► all_to_all back
    residuals   q, k, v in the layout of the ring, the output, and a logsumexp per query
    backward    the same for gradients, with the final logsumexp and output

If JAX differentiated the merge of partial results, the gradients of q and k would be silently wrong: the logsumexp that
`jax.nn.dot_product_attention` returns has no gradient. The function runs in a `shard_map` over `context` and, if they
divide evenly, over the axes of examples and heads; otherwise XLA would gather heads that `tensor` splits before their
all_to_all.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.fused import FusedKernel
from jaxpar.models.blocks.kernel import Blocks, max_block_sizes
from jaxpar.models.dim_names import get_spec
from jaxpar.models.islands import QUERIES, note
from jaxpar.parallel.techniques.ring_attention import ring as zigzag
from jaxpar.parallel.techniques.ring_attention.block_attention import BlockTables, KernelAttention, PlainBlockAttention
from jaxpar.parallel.techniques.ring_attention.choice import AttentionSharding, check, choose
from jaxpar.parallel.techniques.ring_attention.ring import (
    AXIS,
    BlockAttention,
    Ring,
    RingDevices,
    repeated_kv_heads,
    to_heads,
    to_tokens,
)


@dataclass(frozen=True)
class RingPlan:
    """The devices, tables and sharding of one call of attention.

    Attributes:
      ways: The devices of the ring.
      tables: The block tables of the ring.
      groups: Number of heads of keys on a device; if XLA splits heads over `tensor`, on all its devices together.
      copies: Number of copies of each head of keys, above 1 if there are fewer heads than devices.
      sharding: The axes that split arrays in the manual part; XLA splits over the others.
      kernel: The fused kernel that runs a device's part; None is blocks of plain JAX.
    """

    ways: RingDevices
    tables: BlockTables
    groups: int
    copies: int
    sharding: AttentionSharding
    kernel: FusedKernel | None

    def ring(self, segments: jax.Array | None) -> tuple[Ring, BlockAttention]:
        """Returns the ring, inside of `jax.shard_map`, and the implementation of its block attention."""
        meeting = (
            PlainBlockAttention(self.ways, self.tables, self.groups, segments)
            if self.kernel is None
            else KernelAttention(self.ways, self.tables.rule, self.kernel)
        )
        return Ring(self.ways, meeting), meeting

    @property
    def statistics(self) -> P:
        """Spec of the saved logsumexp."""
        examples, heads, tokens = self.sharding.statistics
        return P(tokens, examples, heads) if self.kernel is None else self.sharding.statistics


def distributed_attention(
    q, k, v, *, causal: bool, window: int | None = None, segments=None, softcap: float | None = None,
    ulysses: int = 1, kernel: str = "auto",
) -> jax.Array:  # fmt: skip
    """Attention of q, k and v whose sequences the context axis splits, with the arguments of `jp.attention`.

    Args:
      q: Queries. Shape [batch, seq, heads, head_dim].
      k: Keys. Shape [batch, keys, kv_heads, head_dim].
      v: Values.
      causal: As in `jp.attention`, as are window and segments.
      window: In tokens.
      segments: Shape [batch, seq].
      softcap: As in `jp.attention`.
      ulysses: Devices of the axis that exchange heads; groups of them rotate keys. 0 is all devices.
      kernel: Implementation of a device's part: "cudnn", "plain" JAX, or "auto"; see `choice.py`.

    Raises:
      JaxparError: If the axis does not divide the tokens or heads; if the requested kernel does not run.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    devices = sizes[AXIS]
    ulysses = ulysses or devices
    ways = RingDevices(devices // ulysses, ulysses, _head_shards(sizes))
    check(q, k, ways, causal=causal)
    kv_heads = repeated_kv_heads(k.shape[2], ways)
    copies = kv_heads // k.shape[2]
    if copies > 1:
        heads = "1 head of keys is" if k.shape[2] == 1 else f"{k.shape[2]} heads of keys are"
        note(f"ulysses: {heads} repeated {copies} times, {kv_heads} are exchanged")
    chunks = (2 if causal and ways.ring > 1 else 1) * ways.ring
    block_sizes = max_block_sizes(q.shape[1] // ways.ring, q.shape[3])
    blocks = [Blocks.split(x.shape[1] // chunks, n) for x, n in zip((q, k), block_sizes, strict=True)]
    walks = BlockTables(AttentionMask(causal, window, softcap), ways.ring, *blocks)
    fused, cut = choose(q, k, rule=walks.rule, segments=segments, ways=ways, requested=kernel)
    manual_ways = ways.tensor if cut.heads else 1  # 1: XLA splits the heads over `tensor`
    ways = replace(ways, tensor=ways.tensor // manual_ways)
    plan = RingPlan(ways, walks, kv_heads // ulysses // manual_ways, copies, cut, fused)
    return _attention(q, k, v, segments, plan)


def _head_shards(sizes: dict[str, int]) -> int:
    """Returns the number of shards of the heads over axes other than context."""
    spec = get_spec(QUERIES)
    entry = None if spec is None else spec[2]
    ways = 1
    for axis in (entry,) if isinstance(entry, str) else entry or ():
        ways *= sizes.get(axis, 1)
    return ways


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, segments, plan: RingPlan) -> jax.Array:
    return _forward(q, k, v, segments, plan)[0]


def _forward(q, k, v, segments, plan: RingPlan) -> tuple[jax.Array, tuple]:
    spec = plan.sharding.pieces
    run = _manual(plan, _local_forward, (spec,) * 3, (spec, (spec,) * 3, spec, plan.statistics))
    out, *residuals = run(q, k, v, segments)
    return out, (residuals, segments)


def _backward(plan: RingPlan, residuals: tuple, grad: jax.Array) -> tuple:
    (qkv, out, logsumexp), segments = residuals
    spec = plan.sharding.pieces
    run = _manual(plan, _local_backward, ((spec,) * 3, spec, plan.statistics, spec), (spec,) * 3)
    return *run(qkv, out, logsumexp, grad, segments), None


_attention.defvjp(_forward, _backward)


def _manual(plan: RingPlan, local, in_specs, out_specs):
    """Maps a function of each device's shards to whole arrays; its last argument is the segments of all tokens."""
    in_specs = (*in_specs, P(plan.sharding.pieces[0]))
    axes = plan.sharding.axes
    return jax.shard_map(partial(local, plan), axis_names=axes, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _local_forward(plan: RingPlan, q, k, v, segments) -> tuple:
    ring, meeting = plan.ring(segments)
    q, k, v = _enter(plan, q), _enter(plan, k, plan.copies), _enter(plan, v, plan.copies)
    sums = ring.forward(*meeting.prepare(q, k, v))
    out, logsumexp = meeting.finish(sums, q.dtype)
    return _leave(plan, out), (q, k, v), out, logsumexp


def _local_backward(plan: RingPlan, qkv, out, logsumexp, grad, segments) -> tuple:
    ring, meeting = plan.ring(segments)
    end = meeting.backward_state(_enter(plan, grad), out, logsumexp)
    of_q, of_kv = ring.backward(*meeting.prepare(*qkv), end)
    of_q, of_k, of_v = meeting.gradients(of_q, of_kv, out.dtype)
    return _leave(plan, of_q), _leave(plan, of_k, plan.copies), _leave(plan, of_v, plan.copies)


def _enter(plan: RingPlan, x: jax.Array, copies: int = 1) -> jax.Array:
    """Converts a shard to the layout of the ring."""
    x = to_tokens(x, plan.ways, copies)
    return zigzag.enter(x, plan.ways) if plan.tables.zigzag else x


def _leave(plan: RingPlan, x: jax.Array, copies: int = 1) -> jax.Array:
    """Converts a shard of the ring back to the layout of the batch; sums over copies of heads."""
    return to_heads(zigzag.leave(x, plan.ways) if plan.tables.zigzag else x, plan.ways, copies)
