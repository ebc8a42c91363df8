"""Attention over pieces of sequences, with one backward pass around the whole exchange.

    forward     all_to_all (ulysses) ─► zigzag door ─► ring ─► door back ─► all_to_all back
    kept        q, k, v as they are in the ring, the output, and a logsumexp for every query
    backward    the same, of gradients, with the final logsumexp and output

Merged from parts that JAX differentiates, the gradients of q and k would be wrong without a word: the logsumexp that
`jax.nn.dot_product_attention` returns has no gradient. Manual over `context` and, where they cut evenly, over the axes
that cut examples and heads: left to XLA, an all_to_all of heads that `tensor` cuts gathers them first.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from jaxpar.models.blocks.fused import Fused
from jaxpar.models.blocks.pairs import Blocks, most
from jaxpar.models.blocks.rule import Rule
from jaxpar.models.islands import QUERIES, note
from jaxpar.models.named import spec_of
from jaxpar.parallel.techniques.exchanged import zigzag
from jaxpar.parallel.techniques.exchanged.by_kernel import ByKernel
from jaxpar.parallel.techniques.exchanged.checks import check
from jaxpar.parallel.techniques.exchanged.choice import Cut, choose
from jaxpar.parallel.techniques.exchanged.heads import repeated, to_heads, to_tokens
from jaxpar.parallel.techniques.exchanged.in_blocks import InBlocks
from jaxpar.parallel.techniques.exchanged.ring import Meeting, Ring
from jaxpar.parallel.techniques.exchanged.walks import Walks
from jaxpar.parallel.techniques.exchanged.ways import AXIS, Ways


@dataclass(frozen=True)
class Exchange:
    """How one call of attention is exchanged.

    Attributes:
      ways: The devices.
      walks: The tables of the ring.
      groups: Heads of keys of the device that runs its part; of all that `tensor` cuts, where XLA splits over it.
      copies: Copies of each head of keys, made where there are fewer than devices.
      cut: The axes that cut arrays for the device that runs its part; XLA splits over the others.
      kernel: The fused kernel that runs a device's part; None is blocks of plain JAX.
    """

    ways: Ways
    walks: Walks
    groups: int
    copies: int
    cut: Cut
    kernel: Fused | None

    def ring(self, segments: jax.Array | None) -> tuple[Ring, Meeting]:
        """Returns the ring, inside of `jax.shard_map`, and how queries meet keys in it."""
        meeting = (
            InBlocks(self.ways, self.walks, self.groups, segments)
            if self.kernel is None
            else ByKernel(self.ways, self.walks.rule, self.kernel)
        )
        return Ring(self.ways, meeting), meeting

    @property
    def statistics(self) -> P:
        """How the logsumexp that is kept is cut."""
        examples, heads, tokens = self.cut.statistics
        return P(tokens, examples, heads) if self.kernel is None else self.cut.statistics


def exchange(
    q, k, v, *, causal: bool, window: int | None = None, segments=None, softcap: float | None = None,
    ulysses: int = 1, kernel: str = "auto",
) -> jax.Array:  # fmt: skip
    """Returns attention of q, k and v whose sequences the context axis cuts, as `jp.attention` is given them.

    Args:
      q: Queries. Shape [batch, seq, heads, head_dim].
      k: Keys. Shape [batch, keys, kv_heads, head_dim].
      v: Values.
      causal: As in `jp.attention`, as are window and segments.
      window: In tokens.
      segments: Shape [batch, seq].
      softcap: As in `jp.attention`.
      ulysses: Devices that exchange heads, of those of the axis; the rest rotate. 0 is all of them.
      kernel: What runs a device's part: "cudnn", "plain" JAX, or "auto"; see `choice.py`.

    Raises:
      JaxparError: If the axis does not divide the tokens or heads; if the kernel that is asked for does not run.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    devices = sizes[AXIS]
    ulysses = ulysses or devices
    ways = Ways(devices // ulysses, ulysses, _ways_of_heads(sizes))
    check(q, k, ways, causal=causal)
    many = repeated(k.shape[2], ways)
    copies = many // k.shape[2]
    if copies > 1:
        had = "1 head of keys is" if k.shape[2] == 1 else f"{k.shape[2]} heads of keys are"
        note(f"ulysses: {had} repeated {copies} times, {many} are exchanged")
    chunks = (2 if causal and ways.ring > 1 else 1) * ways.ring
    at_most = most(q.shape[1] // ways.ring, q.shape[3])
    blocks = [Blocks.of(x.shape[1] // chunks, n) for x, n in zip((q, k), at_most, strict=True)]
    walks = Walks(Rule(causal, window, softcap), ways.ring, *blocks)
    fused, cut = choose(q, k, rule=walks.rule, segments=segments, ways=ways, asked=kernel)
    own = ways.tensor if cut.heads else 1  # each device has its own heads then: none are left for XLA to cut
    ways = replace(ways, tensor=ways.tensor // own)
    how = Exchange(ways, walks, many // ulysses // own, copies, cut, fused)
    return _attention(q, k, v, segments, how)


def _ways_of_heads(sizes: dict[str, int]) -> int:
    """Returns the ways in which axes other than context cut the heads."""
    spec = spec_of(QUERIES)
    entry = None if spec is None else spec[2]
    ways = 1
    for axis in (entry,) if isinstance(entry, str) else entry or ():
        ways *= sizes.get(axis, 1)
    return ways


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, segments, how: Exchange) -> jax.Array:
    return _forward(q, k, v, segments, how)[0]


def _forward(q, k, v, segments, how: Exchange) -> tuple[jax.Array, tuple]:
    piece = how.cut.pieces
    run = _manual(how, _local_forward, (piece,) * 3, (piece, (piece,) * 3, piece, how.statistics))
    out, *kept = run(q, k, v, segments)
    return out, (kept, segments)


def _backward(how: Exchange, kept: tuple, grad: jax.Array) -> tuple:
    (qkv, out, logsumexp), segments = kept
    piece = how.cut.pieces
    run = _manual(how, _local_backward, ((piece,) * 3, piece, how.statistics, piece), (piece,) * 3)
    return *run(qkv, out, logsumexp, grad, segments), None


_attention.defvjp(_forward, _backward)


def _manual(how: Exchange, local, given, made):
    """Returns a function of each device's pieces as one of whole arrays; the last are segments of all tokens."""
    given = (*given, P(how.cut.pieces[0]))
    axes = how.cut.axes
    return jax.shard_map(partial(local, how), axis_names=axes, in_specs=given, out_specs=made, check_vma=False)


def _local_forward(how: Exchange, q, k, v, segments) -> tuple:
    ring, meeting = how.ring(segments)
    q, k, v = _enter(how, q), _enter(how, k, how.copies), _enter(how, v, how.copies)
    sums = ring.forward(*meeting.given(q, k, v))
    out, logsumexp = meeting.ended(sums, q.dtype)
    return _leave(how, out), (q, k, v), out, logsumexp


def _local_backward(how: Exchange, qkv, out, logsumexp, grad, segments) -> tuple:
    ring, meeting = how.ring(segments)
    end = meeting.end(_enter(how, grad), out, logsumexp)
    of_q, of_kv = ring.backward(*meeting.given(*qkv), end)
    of_q, of_k, of_v = meeting.gradients(of_q, of_kv, out.dtype)
    return _leave(how, of_q), _leave(how, of_k, how.copies), _leave(how, of_v, how.copies)


def _enter(how: Exchange, x: jax.Array, copies: int = 1) -> jax.Array:
    """Returns a piece as it is in the ring."""
    x = to_tokens(x, how.ways, copies)
    return zigzag.through(x, how.ways) if how.walks.zigzag else x


def _leave(how: Exchange, x: jax.Array, copies: int = 1) -> jax.Array:
    """Returns a piece of the ring as it came; of copies of heads the sum."""
    return to_heads(zigzag.back(x, how.ways) if how.walks.zigzag else x, how.ways, copies)
