"""Attention over pieces of sequences, with one backward pass around the whole exchange.

    forward     all_to_all (ulysses) ─► zigzag door ─► ring ─► door back ─► all_to_all back
    kept        q, k, v as they are in the ring, the output, and a logsumexp for every query
    backward    the same, of gradients, with the final logsumexp and output

Merged from parts that JAX differentiates, the gradients of q and k would be wrong without a word: the logsumexp that
`jax.nn.dot_product_attention` returns has no gradient. Manual over `context` alone: XLA splits batch and heads.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from jaxpar.models.blocks.attention import end_of
from jaxpar.models.blocks.cutting import cut_heads, cut_keys, joined_heads, joined_keys
from jaxpar.models.blocks.kernel import ended
from jaxpar.models.blocks.pairs import Blocks, most
from jaxpar.models.blocks.rule import Rule
from jaxpar.models.islands import QUERIES, note
from jaxpar.models.named import spec_of
from jaxpar.parallel.techniques.exchanged import zigzag
from jaxpar.parallel.techniques.exchanged.checks import check
from jaxpar.parallel.techniques.exchanged.heads import repeated, to_heads, to_tokens
from jaxpar.parallel.techniques.exchanged.ring import Ring
from jaxpar.parallel.techniques.exchanged.walks import Walks
from jaxpar.parallel.techniques.exchanged.ways import AXIS, Ways

_CUT = P(None, AXIS)


@dataclass(frozen=True)
class Exchange:
    """How one call of attention is exchanged.

    Attributes:
      ways: The devices.
      walks: The tables of the ring.
      groups: Heads of keys in a group of devices.
      copies: Copies of each head of keys, made where there are fewer than devices.
    """

    ways: Ways
    walks: Walks
    groups: int
    copies: int


def exchange(q, k, v, *, causal: bool, window: int | None = None, segments=None, ulysses: int = 1) -> jax.Array:
    """Returns attention of q, k and v whose sequences the context axis cuts, as `jp.attention` is given them.

    Args:
      q: Queries. Shape [batch, seq, heads, head_dim].
      k: Keys. Shape [batch, keys, kv_heads, head_dim].
      v: Values.
      causal: As in `jp.attention`, as are window and segments.
      window: In tokens.
      segments: Shape [batch, seq].
      ulysses: Devices that exchange heads, of those of the axis; the rest rotate. 0 is all of them.

    Raises:
      JaxparError: If the axis does not divide the tokens or heads.
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
    how = Exchange(ways, Walks(Rule(causal, window), ways.ring, *blocks), many // ulysses, copies)
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
    out, *kept = _manual(partial(_local_forward, how), 3, (_CUT, (_CUT, _CUT, _CUT), _CUT, P(AXIS)))(q, k, v, segments)
    return out, (kept, segments)


def _backward(how: Exchange, kept: tuple, grad: jax.Array) -> tuple:
    (qkv, out, logsumexp), segments = kept
    run = _manual(partial(_local_backward, how), ((_CUT, _CUT, _CUT), _CUT, P(AXIS), _CUT), (_CUT, _CUT, _CUT))
    return *run(qkv, out, logsumexp, grad, segments), None


_attention.defvjp(_forward, _backward)


def _manual(local, inputs, outputs):
    """Returns a function of each device's pieces as one of whole arrays; the last, segments, every device has whole."""
    given = (_CUT,) * inputs if isinstance(inputs, int) else inputs
    return jax.shard_map(local, axis_names={AXIS}, in_specs=(*given, P()), out_specs=outputs, check_vma=False)


def _local_forward(how: Exchange, q, k, v, segments) -> tuple:
    ring = Ring(how.ways, how.walks, segments)
    q, k, v = _enter(how, q), _enter(how, k, how.copies), _enter(how, v, how.copies)
    sums = ring.forward(*_in_blocks(how, q, k, v))
    out, logsumexp = ended(sums, q.dtype)
    out = joined_heads(out, how.walks.queries)
    return _leave(how, out), (q, k, v), out, logsumexp


def _local_backward(how: Exchange, qkv, out, logsumexp, grad, segments) -> tuple:
    ring, walks, dtype = Ring(how.ways, how.walks, segments), how.walks, out.dtype
    grad, out = (cut_heads(x, walks.queries, how.groups) for x in (_enter(how, grad), out))
    end = end_of(grad, out, logsumexp)
    of_q, of_kv = ring.backward(*_in_blocks(how, *qkv), end)
    of_k, of_v = joined_keys(of_kv.astype(dtype), walks.keys)
    of_q = joined_heads(of_q, walks.queries).astype(dtype)
    return _leave(how, of_q), _leave(how, of_k, how.copies), _leave(how, of_v, how.copies)


def _enter(how: Exchange, x: jax.Array, copies: int = 1) -> jax.Array:
    """Returns a piece as it is in the ring."""
    x = to_tokens(x, how.ways, copies)
    return zigzag.through(x, how.ways) if how.walks.zigzag else x


def _leave(how: Exchange, x: jax.Array, copies: int = 1) -> jax.Array:
    """Returns a piece of the ring as it came; of copies of heads the sum."""
    return to_heads(zigzag.back(x, how.ways) if how.walks.zigzag else x, how.ways, copies)


def _in_blocks(how: Exchange, q, k, v) -> tuple[jax.Array, jax.Array]:
    return cut_heads(q, how.walks.queries, how.groups), cut_keys(k, v, how.walks.keys)
