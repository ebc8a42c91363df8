"""Attention alone: cuDNN's kernel, XLA's own, and XLA's own block by block, by the length of the sequence.

    forward   y = attention(q, k, v)
    both      the gradients of sum(y * w) by q, k and v too

Tokens are as many at every length, so that times differ by attention's own square. The error is against float64 on the
processor, on the shortest sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.mesh.devices import visible_devices
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import JAXPAR, JAXPAR_FUSED
from jaxpar.plan.model import layer_time
from jaxpar.plan.model.shape import Shape

from ...gpu.predicted import Numbers
from ...gpu.stage import Stage
from ...gpu.work import Work

WAYS = ("cudnn", "xla", "blockwise")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stage.

    Attributes:
      seqs: Lengths of sequences.
      tokens: Of all sequences together.
      heads: Attention heads.
      head_dim: Their width.
      block: Queries that the blockwise way takes at once.
      whole: The longest sequence whose scores XLA's own keeps in memory.
    """

    seqs: tuple[int, ...]
    tokens: int
    heads: int
    head_dim: int
    block: int
    whole: int

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        for seq in self.seqs:
            for way in WAYS:
                if way != "xla" or seq <= self.whole:
                    yield from ((way, direction, seq) for direction in ("forward", "both"))

    def shape(self, seq: int) -> tuple[int, int, int, int]:
        """Returns [batch, seq, heads, head_dim]."""
        return max(1, self.tokens // seq), seq, self.heads, self.head_dim


def run(work: Work) -> None:
    """Measures."""
    visible_devices()
    expected = dict(predict(work.sizes, work.hardware))
    for way, direction, seq in work.sizes:
        what = f"{way} {direction} {seq}"
        pretended = expected.get(what, {"planner_seconds": 1e-3})["planner_seconds"]
        work.measure(what, partial(_time, work, way, direction, seq, pretended))
    for way in WAYS:
        work.measure(f"{way} error", lambda way=way: _error(work, way))


def predict(sizes: Sizes, hardware: Hardware) -> Iterator[tuple[str, Numbers]]:
    """Yields the seconds of the planner, which knows cuDNN's kernel and XLA's own."""
    for way, direction, seq in sizes:
        if way == "blockwise":
            continue
        batch, _, heads, head_dim = sizes.shape(seq)
        shape = Shape(layers=1, dim=heads * head_dim, heads=heads, vocab=1, seq=seq)
        software, one = JAXPAR_FUSED if way == "cudnn" else JAXPAR, Candidate(microbatch=batch)
        core = layer_time.attention(shape, one, hardware, software)
        scores = layer_time.scores(shape, one, hardware, software)
        ways = [float(core[i] + scores[i]) for i in (0, 1)]
        yield f"{way} {direction} {seq}", {"planner_seconds": ways[0] if direction == "forward" else sum(ways)}


def attend(way: str, block: int) -> Callable[..., jax.Array]:
    """Returns causal attention by one of `WAYS`: (q, k, v), each [batch, seq, heads, head_dim], to the same."""
    if way != "blockwise":
        chosen = "cudnn" if way == "cudnn" and jax.default_backend() == "gpu" else "xla"
        return partial(jax.nn.dot_product_attention, is_causal=True, implementation=chosen)
    return partial(_blockwise, block=block)


def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int) -> jax.Array:
    """Causal attention of some queries after others: scores of one block are in memory, and made again backward."""
    batch, seq, heads, width = q.shape
    count = max(1, seq // block)
    blocks = jnp.moveaxis(q.reshape(batch, count, seq // count, heads, width), 1, 0)

    @jax.checkpoint
    def one(number, q):
        at = number * (seq // count) + jnp.arange(seq // count)
        seen = (jnp.arange(seq) <= at[:, None])[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=seen, implementation="xla")

    _, y = jax.lax.scan(lambda number, q: (number + 1, one(number, q)), jnp.int32(0), blocks)
    return jnp.moveaxis(y, 0, 1).reshape(q.shape)


def _both(attention: Callable, q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(attention, q, k, v)
    return (y, *pull(w))


def _arrays(shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(4)]


def _time(work: Work, way: str, direction: str, seq: int, pretended: float) -> dict[str, Any]:
    attention = attend(way, work.sizes.block)
    q, *rest = _arrays(work.sizes.shape(seq), jnp.bfloat16)
    forward = direction == "forward"

    def build(repeats: int) -> Callable[[Any], Any]:
        def body(q, k, v, w):
            def again(_, q):
                if forward:
                    return attention(q, k, v)
                y, by_q, by_k, by_v = _both(attention, q, k, v, w)
                return y + by_q + by_k + by_v  # so that XLA leaves none of them out

            return jax.lax.fori_loop(0, repeats, again, q)

        return partial(jax.jit(body, donate_argnums=0), **dict(zip("kvw", rest, strict=True)))

    temporary = {}
    try:
        if not forward:
            stats = jax.jit(partial(_both, attention)).lower(q, *rest).compile().memory_analysis()
            temporary = {"temporary_bytes": stats.temp_size_in_bytes if stats else None}
        seconds = work.once(build, q, rounds=5, pretended=pretended)
    except jax.errors.JaxRuntimeError as error:
        return {"absent": str(error).splitlines()[0][:300]}
    batch, _, heads, width = q.shape
    flop = (1 if forward else 3.5) * 2 * batch * heads * seq * seq * width
    return {"seconds": seconds, "flop_per_second": flop / seconds if seconds > 0 else None, **temporary}


def _error(work: Work, way: str) -> dict[str, Any]:
    """Returns how far results and gradients are from those in float64, relative to their norms."""
    _, seq, heads, width = work.sizes.shape(work.sizes.seqs[0])
    arrays = _arrays((1, seq, heads, width), jnp.bfloat16)
    found = jax.jit(partial(_both, attend(way, work.sizes.block)))(*arrays)
    exact = reference(*(np.asarray(x, np.float64) for x in arrays))
    pairs = zip(("y", "q", "k", "v"), found, exact, strict=True)
    off = {name: float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)) for name, x, y in pairs}
    return {"off": off, "holds": max(off.values()) < 2e-2}


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns causal attention and its gradients in float64, written out. Shapes [batch, seq, heads, head_dim]."""
    scale, seq = q.shape[-1] ** -0.5, q.shape[1]
    scores = np.einsum("bshk,bthk->bhst", q, k) * scale
    scores = np.where(np.tril(np.ones((seq, seq), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    y = np.einsum("bhst,bthk->bshk", shares, v)
    by_shares = np.einsum("bshk,bthk->bhst", w, v)
    by_scores = shares * (by_shares - (by_shares * shares).sum(-1, keepdims=True)) * scale
    return (y, np.einsum("bhst,bthk->bshk", by_scores, k), np.einsum("bhst,bshk->bthk", by_scores, q),
            np.einsum("bhst,bshk->bthk", shares, w))  # fmt: skip


STAGE = Stage(
    name="attention", seconds=60, limit=180,
    measures="cuDNN's kernel, XLA's own and blockwise, 1k to 32k, both directions, memory, error against float64",
    beside="planner",
    real=Sizes(seqs=tuple(1024 << i for i in range(6)), tokens=32768, heads=16, head_dim=128, block=512, whole=8192),
    tiny=Sizes(seqs=(16,), tokens=32, heads=2, head_dim=8, block=8, whole=16),
    run=run, predict=predict,
)  # fmt: skip
