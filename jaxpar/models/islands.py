"""Islands: functions that any Flax model calls, and that the traced step implements.

    model ──► jp.attention(q, k, v) ──► outside of a step: softmax(q k) v, of whole rows
                                    └─► in a step: as a technique of its layout runs it (gather, ring, ...)

As with `jp.constrain`, the model knows no mesh, and outside of a step an island is a plain function. An implementation
has the island's own arguments, as arrays of global shape that are cut as the model named their dims: it may constrain
them whole, or enter `jax.shard_map` over the axes that cut them. Masks besides `causal`, and a softcap, it is given
only where the model has them.

To add an island: a function here that checks what it is given and calls what runs under its name. To add an
implementation: a row of the table `how` of a technique (`jaxpar.parallel.techniques`). A model's or a user's own needs
no technique: `with implemented({"attention": mine}):` around the call of the model.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, k head_dim.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.chosen import LONG, fits_cudnn, head_fits, in_blocks, wants_cudnn
from jaxpar.models.blocks.masks import check_masks, check_softcap
from jaxpar.models.blocks.pairs import BLOCK
from jaxpar.models.blocks.rule import Rule
from jaxpar.models.blocks.whole_scores import attend
from jaxpar.models.own_backward import attended

Attention = Callable[..., jax.Array]  # (q_bshk, k_btgk, v_btgk, *, causal, window, segments, softcap) -> bshk
BY_BLOCKS = f"attention runs in blocks of at most {BLOCK} keys and keeps no scores: rows of more than {LONG} keys"
# the names of dims of what attention is given, for models that name them and implementations that ask how they are cut
QUERIES = ("batch", "seq", "heads", "head_dim")
KEYS = ("batch", "seq", "kv_heads", "head_dim")

# pairs of an island's name and what runs it. A context of JAX's, so that a function that was jitted before is traced
# again where another implementation runs; hence a tuple, which can be compared
_running = jax.make_user_context(())
_called: ContextVar[set[str] | None] = ContextVar("called", default=None)
_kernel: ContextVar[Attention | None] = ContextVar("kernel", default=None)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    segments: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Returns softmax(q k / sqrt(head_dim)) v, as the step that is traced runs it.

    Name the dims of the model's stream, `jp.constrain(x, "batch", "seq", "embed")`, and context parallelism cuts the
    sequence: where one query meets all keys is then this function's business. Masks are functions of positions and
    segments, never arrays of a row of keys for each query. Of more than 8,192 keys it runs block by block where cuDNN's
    kernel does not run (`models/blocks/chosen.py`), and `jp.inspect` says so: no scores are kept then.

    Args:
      q: Queries. Shape [batch, queries, heads, head_dim].
      k: Keys. Shape [batch, keys, kv_heads, head_dim]; kv_heads divides heads (grouped-query attention).
      v: Values. Shape of `k`.
      causal: Whether query i sees only the keys 0..i; there are as many of both then.
      window: Whether query i sees only keys less than so many tokens away: i - window + 1 to i where causal.
      segments: Numbers of the documents in a row: a query sees only keys of its own. Shape [batch, seq], ascending.
      softcap: Scores x become softcap * tanh(x / softcap) before the mask, as in Gemma 2. A Python number above 0, the
        same for all heads. cuDNN's kernel has none: plain JAX runs such attention.

    Returns:
      Shape and dtype of `q`.

    Raises:
      JaxparError: If the shapes or dtypes do not belong together; if what runs it here takes no window, segments or
        softcap.
    """
    _check(q, k, v, causal)
    check_masks(q, k, window, segments)
    given = {"window": window, "segments": segments, "softcap": check_softcap(softcap)}
    masks = {name: value for name, value in given.items() if value is not None}
    run = _run("attention", on_one_device)
    if taken := set(masks) - _keywords(run):
        raise refuse(
            f"jp.attention({', '.join(sorted(taken))}=...), run by {getattr(run, '__name__', run)!s:.60}",
            rule="an implementation of the island takes the masks and the softcap that the model gives it",
            fix="a parameter of each of those names in it, or attention without them",
        )
    return run(q, k, v, causal=causal, **masks)


def whole(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, causal: bool) -> jax.Array:
    """Returns attention over whole sequences; with cuDNN's fused kernel on NVIDIA GPUs in 16 bits."""
    if q_bshk.dtype == jnp.float32:
        return attended(q_bshk, k_btgk, v_btgk, causal=causal)
    low = q_bshk.dtype in (jnp.bfloat16, jnp.float16)
    if low and (kernel := _kernel.get()) is not None:
        return kernel(q_bshk, k_btgk, v_btgk, causal=causal)
    if wants_cudnn(q_bshk) and not head_fits(q_bshk.shape[-1]):
        note(f"attention runs as XLA's matmuls: cuDNN's kernel has no heads of {q_bshk.shape[-1]}")
    fused = "cudnn" if fits_cudnn(q_bshk, causal=causal) else None
    return jax.nn.dot_product_attention(q_bshk, k_btgk, v_btgk, is_causal=causal, implementation=fused)


def on_one_device(
    q_bshk: jax.Array,
    k_btgk: jax.Array,
    v_btgk: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    segments: jax.Array | None = None,
    softcap: float | None = None,
    blocks: bool = True,
) -> jax.Array:
    """Returns attention over whole sequences, under any mask, and block by block over long ones if `blocks`."""
    plain = window is None and segments is None and softcap is None
    fused = softcap is None and fits_cudnn(q_bshk, causal=causal, window=window, segments=segments)
    stands_in = _kernel.get() is not None and q_bshk.dtype != jnp.float32 and plain
    if blocks and in_blocks(k_btgk, fused=fused or stands_in):
        note(BY_BLOCKS)
        return blockwise(q_bshk, k_btgk, v_btgk, rule=Rule(causal, window, softcap), segments_bs=segments)
    if plain:
        return whole(q_bshk, k_btgk, v_btgk, causal=causal)
    if softcap is not None:
        if wants_cudnn(q_bshk):
            note("attention runs as XLA's matmuls: cuDNN's kernel has no softcap")
        return attend(q_bshk, k_btgk, v_btgk, rule=Rule(causal, window, softcap), segments_bs=segments)
    reach = None if window is None else (window - 1, 0 if causal else window - 1)
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    kernel = "cudnn" if fused else None
    return jax.nn.dot_product_attention(
        q_bshk, k_btgk, v_btgk, mask=mask, is_causal=causal, local_window_size=reach, implementation=kernel
    )


@contextmanager
def in_place_of_cudnn(kernel: Attention) -> Iterator[None]:
    """Runs `kernel` wherever a GPU would run cuDNN's, while the context lasts: for programs that are compiled for GPUs
    that are not there, and never run.
    """
    token = _kernel.set(kernel)
    try:
        yield
    finally:
        _kernel.reset(token)


@contextmanager
def implemented(islands: Mapping[str, Callable]) -> Iterator[set[str]]:
    """Runs these islands, by their names, as the given functions, while the context lasts. The innermost context wins.

    Yields:
      The names of the islands that were called, and the forms that were noted, complete when the context ends; also
      within contexts inside of it.
    """
    around = _called.get()
    called: set[str] = set() if around is None else around
    token = _called.set(called)
    try:
        with _running(tuple({**dict(_running.value), **islands}.items())):
            yield called
    finally:
        _called.reset(token)


def note(form: str) -> None:
    """Notes in which form an island runs, for the reader of a report: a sentence without its full stop."""
    called = _called.get()
    if called is not None:
        called.add(form)


def _keywords(run: Callable) -> set[str]:
    """Returns the names of what a function takes; those of masks too where it takes any."""
    parameters = inspect.signature(run).parameters.values()
    more = {"window", "segments", "softcap"} if any(each.kind is each.VAR_KEYWORD for each in parameters) else set()
    return {each.name for each in parameters} | more


def _run(island: str, plain: Callable) -> Callable:
    """Returns what runs an island here, and notes that it was called."""
    called = _called.get()
    if called is not None:
        called.add(island)
    return dict(_running.value).get(island, plain)


def _check(q: Any, k: Any, v: Any, causal: bool) -> None:
    shapes = [getattr(x, "shape", None) for x in (q, k, v)]
    dtypes = {str(getattr(x, "dtype", type(x).__name__)) for x in (q, k, v)}
    fits = (
        all(shape is not None and len(shape) == 4 and all(shape) for shape in shapes)
        and shapes[1] == shapes[2]
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and q.shape[2] % k.shape[2] == 0
        and (q.shape[1] == k.shape[1] or not causal)
    )
    if not fits or len(dtypes) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        given = ", ".join(f"{n} {_shown(x)}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise refuse(
            f"jp.attention({given}, causal={causal})",
            rule="q is [batch, queries, heads, head_dim], k and v are [batch, keys, kv_heads, head_dim] where kv_heads "
            "divides heads, all of one floating-point dtype; with causal=True there are as many queries as keys",
            fix='q = jnp.einsum("bsd,dhk->bshk", x, w), and likewise k and v',
        )


def _shown(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype") else type(x).__name__
