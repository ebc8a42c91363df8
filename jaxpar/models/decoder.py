"""A decoder that is GPT-2 or Llama, depending on its settings.

                 position  norm   gated  use_bias  tied
Llama (default)  rotary    rms    yes    no        no
GPT-2            learned   layer  no     yes       yes
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.blocks.lookup import COLUMNS, ROWS, look_up
from jaxpar.models.blocks.masks import Documents
from jaxpar.models.cache import KVCache
from jaxpar.models.custom_gradients import logits
from jaxpar.models.dim_names import constrain
from jaxpar.models.layers import Block, BlockConfig, Norm, Rope, dropout, weight
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.models.stack import run_cached, run_stack, stack


class Decoder(nnx.Module):
    """Tokens to logits of the next token.

    Args:
      settings: Shape and kind.
      rngs: Streams `params` and `dropout`.
    """

    def __init__(self, settings: DecoderConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        self.remat = "none"
        self.deterministic = False
        # an embedding that is also the head is sharded like the head, over the vocabulary; else by columns
        names = ("vocab", "embed") if s.tied else (ROWS, COLUMNS)
        self.embed = weight(rngs, (s.vocab, s.dim), names, 1.0 if not s.tied else s.dim**-0.5)
        self.positions = weight(rngs, (s.seq, s.dim), ("seq_table", "embed"), 0.02) if s.position == "learned" else None

        kind = BlockConfig(
            dim=s.dim,
            heads=s.heads,
            kv_heads=s.kv_heads or s.heads,
            hidden=s.width,
            norm=s.norm,
            norm_eps=s.norm_eps,
            gated=s.gated,
            use_bias=s.use_bias,
            rope=Rope(s.rope_base, tuple(s.rope_stretch)) if s.position == "rotary" else None,
            causal=True,
            dropout=s.dropout,
            out_scale=(2 * s.layers) ** -0.5,
        )
        self.blocks = stack(lambda rngs: Block(kind, rngs=rngs), s.layers, rngs)
        self.norm = Norm(s.dim, kind=s.norm, eps=s.norm_eps)
        self.head = None if s.tied else weight(rngs, (s.dim, s.vocab), ("embed", "vocab"), s.dim**-0.5)
        self.rngs = nnx.Rngs(dropout=rngs.dropout()) if s.dropout else None

    @property
    def head_name(self) -> str:
        """The parameter that maps hidden states to logits: see `jaxpar.step.head.model_protocol`."""
        return "embed" if self.head is None else "head"

    def __call__(
        self, tokens_bs: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Logits [batch, seq, vocab].

        Args:
          tokens_bs: Tokens. Shape [batch, seq], int32.
          segments: If several documents share a row, the index of each token's document, ascending. Shape [batch, seq].
          positions: Position of each token in its document. Shape [batch, seq].
        """
        table = self.embed[...]
        return self._read_out(self._hidden(tokens_bs, table, Documents(segments, positions)), table)

    def hidden(
        self, tokens_bs: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Hidden states before the head [batch, seq, dim], for a loss that never holds all logits."""
        return self._hidden(tokens_bs, self.embed[...], Documents(segments, positions))

    def _hidden(self, tokens_bs: jax.Array, table: jax.Array, documents: Documents) -> jax.Array:
        s = self.settings
        x = self._embed_tokens(table, tokens_bs, documents.positions)
        keys = None
        if self.rngs is not None and not self.deterministic:
            first, *_ = keys = jax.random.split(self.rngs.dropout(), s.layers + 1)
            x, keys = dropout(x, s.dropout, first), keys[1:]
        x = run_stack(self.blocks, x, keys, policy=self.remat, scan=s.scan, documents=documents)
        return self.norm(x, looped=s.scan)

    def cache(self, rows: int, positions: int, dtype=jnp.float32) -> KVCache:
        """An empty cache for `rows` sequences of at most `positions` tokens."""
        s = self.settings
        shape = (rows, positions, s.kv_heads or s.heads, s.dim // s.heads)
        return KVCache.empty(layers=s.layers, shape=shape, dtype=dtype)

    def decode(
        self, tokens_bs: jax.Array, cache: KVCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Logits [batch, vocab] of the token after each row's last, and the updated cache.

        Args:
          tokens_bs: Prompts, from position 0, for an empty cache; or one token per row, at its next position.
          cache: From `cache`, or from the previous call.
          lengths: Tokens in each prompt; the padding after them is never attended to. Shape [batch], int32.
        """
        rows, count = tokens_bs.shape
        positions = jnp.arange(count)[None] + (jnp.zeros((rows, 1), jnp.int32) if count > 1 else cache.length[:, None])
        table = self.embed[...]
        x, cache = run_cached(self.blocks, self._embed_tokens(table, tokens_bs, positions), cache, positions)
        ends = cache.length + 1 if lengths is None else lengths
        last = jnp.take_along_axis(x, (ends - 1)[:, None, None], axis=1) if count > 1 else x
        return self._read_out(self.norm(last), table)[:, 0], KVCache(cache.keys, cache.values, ends)

    def _embed_tokens(self, table: jax.Array, tokens_bs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = jnp.take(table, tokens_bs, axis=0) if self.head is None else look_up(table, tokens_bs)
        if self.positions is not None:
            rows = self.positions[...]
            x = x + (rows[: tokens_bs.shape[1]] if positions is None else jnp.take(rows, positions, axis=0))
        # a table sharded by rows is looked up on each device and summed; with seq sharded first, XLA would gather it
        return constrain(constrain(x, "batch", None, "embed"), "batch", "seq", "embed")

    def _read_out(self, x: jax.Array, table: jax.Array) -> jax.Array:
        values = (
            jnp.einsum("bsd,dv->bsv", x, table.T)
            if self.head is None
            else logits(x, self.head[...], looped=self.settings.scan)
        )
        # logits stay sharded over the vocabulary: the loss sums over it, and never needs all of a token's logits
        return constrain(values, "batch", "seq", "vocab")
