"""A decoder that is GPT-2 or Llama by settings.

                 position  norm   gated  use_bias  tied
Llama (default)  rotary    rms    yes    no        no
GPT-2            learned   layer  no     yes       yes
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.blocks.documents import Documents
from jaxpar.models.blocks.lookup import COLUMNS, ROWS, looked_up
from jaxpar.models.cache import Cache
from jaxpar.models.layers import Block, BlockSettings, Norm, dropout, weight
from jaxpar.models.named import constrain
from jaxpar.models.own_backward import logits
from jaxpar.models.rotary import Rope
from jaxpar.models.settings.decoder import DecoderSettings
from jaxpar.models.stack import run_cached, run_stack, stack


class Decoder(nnx.Module):
    """Tokens to logits of the next token.

    Args:
      settings: Shape and kind.
      rngs: Streams `params` and `dropout`.
    """

    def __init__(self, settings: DecoderSettings, *, rngs: nnx.Rngs):
        s = self.settings = settings
        self.remat = "none"
        self.deterministic = False
        # a table that is the head too is cut as that is, over the vocabulary; else by its columns
        names = ("vocab", "embed") if s.tied else (ROWS, COLUMNS)
        self.embed = weight(rngs, (s.vocab, s.dim), names, 1.0 if not s.tied else s.dim**-0.5)
        self.positions = weight(rngs, (s.seq, s.dim), ("seq_table", "embed"), 0.02) if s.position == "learned" else None

        kind = BlockSettings(
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
        """The parameter that makes logits of the hidden state: see `jaxpar.step.head.offered`."""
        return "embed" if self.head is None else "head"

    def __call__(
        self, tokens_bs: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Returns logits [batch, seq, vocab].

        Args:
          tokens_bs: Tokens. Shape [batch, seq], int32.
          segments: Where several documents share a row, the number of each token's, ascending. Shape [batch, seq].
          positions: Position of each token in its document. Shape [batch, seq].
        """
        table = self.embed[...]
        return self._read_out(self._hidden(tokens_bs, table, Documents(segments, positions)), table)

    def hidden(
        self, tokens_bs: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Returns what the head makes logits of [batch, seq, dim], for a loss that never has all of them."""
        return self._hidden(tokens_bs, self.embed[...], Documents(segments, positions))

    def _hidden(self, tokens_bs: jax.Array, table: jax.Array, documents: Documents) -> jax.Array:
        s = self.settings
        x = self._looked_up(table, tokens_bs, documents.positions)
        keys = None
        if self.rngs is not None and not self.deterministic:
            first, *_ = keys = jax.random.split(self.rngs.dropout(), s.layers + 1)
            x, keys = dropout(x, s.dropout, first), keys[1:]
        x = run_stack(self.blocks, x, keys, policy=self.remat, scan=s.scan, documents=documents)
        return self.norm(x, looped=s.scan)

    def cache(self, rows: int, positions: int, dtype=jnp.float32) -> Cache:
        """Returns an empty cache for so many rows of at most so many tokens."""
        s = self.settings
        shape = (rows, positions, s.kv_heads or s.heads, s.dim // s.heads)
        return Cache.empty(layers=s.layers, shape=shape, dtype=dtype)

    def decode(self, tokens_bs: jax.Array, cache: Cache, lengths: jax.Array | None = None) -> tuple[jax.Array, Cache]:
        """Returns logits [batch, vocab] of the token after each row's last, and the cache that knows its tokens too.

        Args:
          tokens_bs: Prompts, from position 0, of an empty cache; or one token of each row, at its next position.
          cache: As `cache` makes it, or as it was returned.
          lengths: Tokens of each prompt; what comes after them is seen by nobody. Shape [batch], int32.
        """
        rows, count = tokens_bs.shape
        positions = jnp.arange(count)[None] + (jnp.zeros((rows, 1), jnp.int32) if count > 1 else cache.length[:, None])
        table = self.embed[...]
        x, cache = run_cached(self.blocks, self._looked_up(table, tokens_bs, positions), cache, positions)
        ends = cache.length + 1 if lengths is None else lengths
        last = jnp.take_along_axis(x, (ends - 1)[:, None, None], axis=1) if count > 1 else x
        return self._read_out(self.norm(last), table)[:, 0], Cache(cache.keys, cache.values, ends)

    def _looked_up(self, table: jax.Array, tokens_bs: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Returns the stream before the first layer."""
        x = jnp.take(table, tokens_bs, axis=0) if self.head is None else looked_up(table, tokens_bs)
        if self.positions is not None:
            held = self.positions[...]
            x = x + (held[: tokens_bs.shape[1]] if positions is None else jnp.take(held, positions, axis=0))
        # a table split by rows is looked up by each device and summed; were seq split first, XLA would gather the table
        return constrain(constrain(x, "batch", None, "embed"), "batch", "seq", "embed")

    def _read_out(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """Returns the logits of the hidden state."""
        made = (
            jnp.einsum("bsd,dv->bsv", x, table.T)
            if self.head is None
            else logits(x, self.head[...], looped=self.settings.scan)
        )
        # logits stay split over the vocabulary: the loss sums over it, and never needs all of a token's
        return constrain(made, "batch", "seq", "vocab")
