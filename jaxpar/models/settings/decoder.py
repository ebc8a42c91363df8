"""The settings of a decoder: GPT-2 or Llama, see the table in `jaxpar/models/decoder.py`."""

from dataclasses import dataclass
from typing import Literal

from jaxpar.errors import Keywords, check_ranges, refuse
from jaxpar.models.settings.heads import check_heads


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Keywords):
    """Shape and kind of a decoder.

    Attributes:
      vocab: Size of the vocabulary.
      seq: Longest sequence; the number of learned positions.
      layers: Number of blocks.
      dim: Width of the stream between blocks.
      heads: Attention heads; head_dim is dim / heads.
      kv_heads: Heads of keys and values; 0 means as many as heads.
      hidden: Width of the feed-forward; 0 means 4 dim, or 8/3 dim rounded up to 64 where gated.
      position: rotary or learned.
      norm: rms or layer.
      norm_eps: Epsilon that the norm adds to the mean square.
      gated: SwiGLU in the feed-forward.
      use_bias: Biases on every matrix.
      tied: The embedding is also the output matrix.
      rope_base: Base of the rotary frequencies.
      rope_stretch: [factor, low, high, seq] of Llama 3.1's frequency scaling, [8.0, 1.0, 4.0, 8192.0]; [] for none.
      dropout: Dropout rate, in training only.
      scan: Run one compiled block over stacked layers, instead of compiling one copy per layer.
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
        high = 2**31 - 1
        check_ranges(
            self,
            "model",
            {name: (1, high) for name in ("vocab", "seq", "layers", "dim", "heads")}
            | {"kv_heads": (0, high), "hidden": (0, high)}
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
                rule="rope_stretch is [factor >= 1, low, high, seq] with 0 < low < high < 1e9 and 0 < seq < 1e9, or []",
                fix="rope_stretch = [8.0, 1.0, 4.0, 8192.0]",
            )

    @property
    def width(self) -> int:
        """Width of the feed-forward."""
        gated = -(-8 * self.dim // 3 // 64) * 64 if self.dim >= 64 else 4 * self.dim
        return self.hidden or (gated if self.gated else 4 * self.dim)
