"""Islands: functions that any Flax model calls, and that the traced step implements.

    model ──► jp.attention(q, k, v) ──► outside of a step: softmax(q k) v, on unsharded sequences
                                    └─► in a step: by a technique of the layout (gather, ring, ...)

As with `jp.constrain`, the model knows no mesh, and outside of a step an island is a plain function. An implementation
takes the island's own arguments, as arrays of global shape, sharded as the model named their dims: it may constrain
them to be unsharded, or enter `jax.shard_map` over all axes that shard them: over one axis of several that split the
batch, XLA gathers the others. `parallel.manual_axes.example_axes` names those of the batch, also inside of a pipeline.
It receives masks other than `causal`, and a softcap, only if the model passes them.

To add an island: a function, as `experts.mixture` in a file of its own, that checks its arguments and calls the
`implementation` registered under its name. To add an implementation: a row of the table `how` of a technique
(`jaxpar.parallel.techniques`). A model's or a user's own needs no technique: `with use_islands({"attention": mine}):`
around the call of the model.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, k head_dim.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.errors import refuse
from jaxpar.models.blocks.attention import attend, blockwise
from jaxpar.models.blocks.attention_mask import AttentionMask, check_masks, check_softcap
from jaxpar.models.blocks.fused import LONG, fits_cudnn, head_fits, runs_blockwise, wants_cudnn
from jaxpar.models.blocks.kernel import BLOCK
from jaxpar.models.custom_gradients import float32_attention

# the way out where a model's own dispatch computes more than the experts that tokens choose
MIXTURE = "jp.mixture(expert, params, x, choices, weights), which sends tokens to their experts alone"

Attention = Callable[..., jax.Array]  # (q_bshk, k_btgk, v_btgk, *, causal, window, segments, softcap) -> bshk
BLOCKS_NOTE = f"attention runs in blocks of at most {BLOCK} keys and keeps no scores: rows of more than {LONG} keys"
# dim names of attention's arguments, for models that name them and implementations that look up their sharding
QUERIES = ("batch", "seq", "heads", "head_dim")
KEYS = ("batch", "seq", "kv_heads", "head_dim")

# pairs of an island's name and its implementation. A JAX context, so that a function jitted before is traced again
# under another implementation; hence a tuple, which can be compared
_implementations = jax.make_user_context(())
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
    """Computes softmax(q k / sqrt(head_dim)) v, in a step by the implementation that its layout chooses.

    Name the dims of the model's stream, `jp.constrain(x, "batch", "seq", "embed")`, and context parallelism shards the
    sequence: this function then brings queries and keys together. Masks are functions of positions and segments, never
    arrays of queries x keys. For more than 8,192 keys it runs blockwise unless cuDNN's kernel runs it
    (`models/blocks/fused.py`): then no scores are stored, and `jp.inspect` reports it.

    Args:
      q: Queries. Shape [batch, queries, heads, head_dim].
      k: Keys. Shape [batch, keys, kv_heads, head_dim]; kv_heads divides heads (grouped-query attention).
      v: Values. Shape of `k`.
      causal: Whether query i attends only to the keys 0..i; needs as many keys as queries.
      window: If given, query i attends only to keys less than `window` tokens away, if causal to i - window + 1 ... i.
      segments: Index of each token's document; a query attends only to keys of its document. Shape [batch, seq],
        ascending.
      softcap: Scores x become softcap * tanh(x / softcap) before the mask, as in Gemma 2. A Python number above 0, the
        same for all heads. cuDNN's kernel does not support it: plain JAX runs such attention.

    Returns:
      Shape and dtype of `q`.

    Raises:
      JaxparError: If the shapes or dtypes do not fit together; if the implementation does not support window, segments
        or softcap.
    """
    _check(q, k, v, causal)
    check_masks(q, k, window, segments)
    options = {"window": window, "segments": segments, "softcap": check_softcap(softcap)}
    masks = {name: value for name, value in options.items() if value is not None}
    backend = implementation("attention", single_device_attention)
    if unsupported := set(masks) - _keywords(backend):
        raise refuse(
            f"jp.attention({', '.join(sorted(unsupported))}=...), run by {getattr(backend, '__name__', backend)!s:.60}",
            rule="an implementation of attention accepts each mask and softcap that the model passes",
            fix="add a parameter of each of these names to it, or call attention without them",
        )
    # named, so that an equation of the caller's line computes the result, whatever the implementation
    return checkpoint_name(backend(q, k, v, causal=causal, **masks), "jaxpar.attention")


def unsharded_attention(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, causal: bool) -> jax.Array:
    """Attention over unsharded sequences; with cuDNN's fused kernel on NVIDIA GPUs in 16 bits."""
    if q_bshk.dtype == jnp.float32:
        return float32_attention(q_bshk, k_btgk, v_btgk, causal=causal)
    low = q_bshk.dtype in (jnp.bfloat16, jnp.float16)
    if low and (kernel := _kernel.get()) is not None:
        return kernel(q_bshk, k_btgk, v_btgk, causal=causal)
    if wants_cudnn(q_bshk) and not head_fits(q_bshk.shape[-1]):
        note(f"attention runs as XLA's matmuls: cuDNN's kernel has no heads of {q_bshk.shape[-1]}")
    fused = "cudnn" if fits_cudnn(q_bshk, causal=causal) else None
    return jax.nn.dot_product_attention(q_bshk, k_btgk, v_btgk, is_causal=causal, implementation=fused)


def single_device_attention(
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
    """Attention over unsharded sequences, under any mask, and blockwise over long ones if `blocks`."""
    plain = window is None and segments is None and softcap is None
    fused = softcap is None and fits_cudnn(q_bshk, causal=causal, window=window, segments=segments)
    kernel_overridden = _kernel.get() is not None and q_bshk.dtype != jnp.float32 and plain
    if blocks and runs_blockwise(k_btgk, fused=fused or kernel_overridden):
        note(BLOCKS_NOTE)
        return blockwise(q_bshk, k_btgk, v_btgk, rule=AttentionMask(causal, window, softcap), segments_bs=segments)
    if plain:
        return unsharded_attention(q_bshk, k_btgk, v_btgk, causal=causal)
    if softcap is not None:
        if wants_cudnn(q_bshk):
            note("attention runs as XLA's matmuls: cuDNN's kernel has no softcap")
        return attend(q_bshk, k_btgk, v_btgk, rule=AttentionMask(causal, window, softcap), segments_bs=segments)
    local_window = None if window is None else (window - 1, 0 if causal else window - 1)
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    kernel = "cudnn" if fused else None
    return jax.nn.dot_product_attention(
        q_bshk, k_btgk, v_btgk, mask=mask, is_causal=causal, local_window_size=local_window, implementation=kernel
    )


@contextmanager
def override_cudnn(kernel: Attention) -> Iterator[None]:
    """Context in which `kernel` replaces cuDNN's kernel on GPUs: for programs that are compiled for absent GPUs, and
    never run.
    """
    token = _kernel.set(kernel)
    try:
        yield
    finally:
        _kernel.reset(token)


@contextmanager
def use_islands(islands: Mapping[str, Callable]) -> Iterator[set[str]]:
    """Context in which calls of these islands, by name, run the given functions. The innermost context wins.

    Yields:
      The names of the islands that were called and the notes that they made, also within inner contexts; complete when
      the context ends.
    """
    outer = _called.get()
    record: set[str] = set() if outer is None else outer
    token = _called.set(record)
    try:
        with _implementations(tuple({**dict(_implementations.value), **islands}.items())):
            yield record
    finally:
        _called.reset(token)


def note(sentence: str) -> None:
    """Records a sentence for a report about the implementation of an island, without its full stop."""
    record = _called.get()
    if record is not None:
        record.add(sentence)


def _keywords(run: Callable) -> set[str]:
    """Returns the parameter names of a function; if it takes **kwargs, the names of masks too."""
    parameters = inspect.signature(run).parameters.values()
    masks = {"window", "segments", "softcap"} if any(param.kind is param.VAR_KEYWORD for param in parameters) else set()
    return {param.name for param in parameters} | masks


def implementation(island: str, plain: Callable) -> Callable:
    """The implementation of an island in this context; records the call."""
    record = _called.get()
    if record is not None:
        record.add(island)
    return dict(_implementations.value).get(island, plain)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> None:
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
        arguments = ", ".join(f"{name} {_describe(x)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise refuse(
            f"jp.attention({arguments}, causal={causal})",
            rule="q is [batch, queries, heads, head_dim], k and v are [batch, keys, kv_heads, head_dim] where kv_heads "
            "divides heads, all of one floating-point dtype; with causal=True there are as many queries as keys",
            fix='q = jnp.einsum("bsd,dhk->bshk", x, w), and likewise k and v',
        )


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype") else type(x).__name__
