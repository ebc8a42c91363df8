"""A decoder that is GPT-2 or Llama by settings.

                 position  norm   gated  use_bias  tied
Llama (default)  rotary    rms    yes    no        no
GPT-2            learned   layer  no     yes       yes
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import Keywords, check_ranges, refuse
from jaxpar.models.heads import check_heads
from jaxpar.models.layers import Block, BlockSettings, Norm, dropout, weight
from jaxpar.models.named import constrain
from jaxpar.models.rotary import Rope
from jaxpar.models.stack import run_stack, stack


@dataclass(frozen=True, kw_only=True)
class DecoderSettings(Keywords):
    """Shape and kind of a decoder.

    Attributes:
      vocab: Tokens there are.
      seq: Longest sequence; the number of learned positions.
      layers: Blocks.
      dim: Width of the stream between blocks.
      heads: Attention heads; head_dim is dim / heads.
      kv_heads: Heads of keys and values; 0 means as many as heads.
      hidden: Width of the feed-forward; 0 means 4 dim, or 8/3 dim rounded up to 64 where gated.
      position: rotary or learned.
      norm: rms or layer.
      norm_eps: What the norm adds to the mean square.
      gated: SwiGLU in the feed-forward.
      use_bias: Biases on every matrix.
      tied: The embedding is also the output matrix.
      rope_base: Base of the rotary frequencies.
      rope_stretch: [factor, low, high, seq] as Llama 3.1 stretches them, [8.0, 1.0, 4.0, 8192.0]; [] does not.
      dropout: Rate, in training only.
      scan: One compiled block run over stacked layers, instead of one copy per layer.
    """

    vocab: int = 256
    seq: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 0
    hidden: int = 0
    position: Literal["rotary", "learned"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    gated: bool = True
    use_bias: bool = False
    tied: bool = False
    rope_base: float = 10_000.0
    rope_stretch: tuple[float, ...] = ()
    dropout: float = 0.0
    scan: bool = True

    def __post_init__(self):
        most = 2**31 - 1
        check_ranges(
            self,
            "model",
            {name: (1, most) for name in ("vocab", "seq", "layers", "dim", "heads")}
            | {"kv_heads": (0, most), "hidden": (0, most)}
            | {"norm_eps": (0, 1), "rope_base": (1, 1e30), "dropout": (0, 1)},
            below=["dropout"],
        )
        check_heads(self.dim, self.heads, kv_heads=self.kv_heads, even=self.position == "rotary")
        stretch = tuple(self.rope_stretch)
        if stretch and not (
            len(stretch) == 4 and stretch[0] >= 1 and 0 < stretch[1] < stretch[2] < 1e9 > stretch[3] > 0
        ):
            raise refuse(
                f"rope_stretch = {list(stretch)!r:.80}",
                rule="a factor of at least 1, two numbers of turns, the smaller first, a sequence length; or nothing",
                fix="rope_stretch = [8.0, 1.0, 4.0, 8192.0]",
            )

    @property
    def width(self) -> int:
        """Width of the feed-forward."""
        gated = -(-8 * self.dim // 3 // 64) * 64 if self.dim >= 64 else 4 * self.dim
        return self.hidden or (gated if self.gated else 4 * self.dim)


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
        head = table.T if self.head is None else self.head[...]
        # logits stay split over the vocabulary: the loss sums over it, and never needs all of a token's
        return constrain(jnp.einsum("bsd,dv->bsv", x, head), "batch", "seq", "vocab")
