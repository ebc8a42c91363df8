"""A decoder that is GPT-2 or Llama by settings.

                 position  norm   gated  use_bias  tied
Llama (default)  rotary    rms    yes    no        no
GPT-2            learned   layer  no     yes       yes
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.layers import Block, BlockSettings, Norm, dropout, weight
from jaxpar.models.named import constrain
from jaxpar.models.own_backward import logits
from jaxpar.models.rotary import Rope
from jaxpar.models.settings.decoder import DecoderSettings
from jaxpar.models.stack import run_stack, stack


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
        self.embed = weight(rngs, (s.vocab, s.dim), ("vocab", "embed"), 1.0 if not s.tied else s.dim**-0.5)
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

    def __call__(self, tokens_bs: jax.Array) -> jax.Array:
        """Returns logits [batch, seq, vocab] for tokens [batch, seq], int32."""
        s = self.settings
        table = self.embed[...]
        x = jnp.take(table, tokens_bs, axis=0)
        if self.positions is not None:
            x = x + self.positions[...][: tokens_bs.shape[1]]
        # a table split by rows is looked up by each device and summed; were seq split first, XLA would gather the table
        x = constrain(constrain(x, "batch", None, "embed"), "batch", "seq", "embed")
        keys = None
        if self.rngs is not None and not self.deterministic:
            first, *_ = keys = jax.random.split(self.rngs.dropout(), s.layers + 1)
            x, keys = dropout(x, s.dropout, first), keys[1:]
        x = run_stack(self.blocks, x, keys, policy=self.remat, scan=s.scan)
        x = self.norm(x)
        made = jnp.einsum("bsd,dv->bsv", x, table.T) if self.head is None else logits(x, self.head[...])
        # logits stay split over the vocabulary: the loss sums over it, and never needs all of a token's
        return constrain(made, "batch", "seq", "vocab")
