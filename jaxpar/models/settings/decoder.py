"""The settings of a decoder: GPT-2 or Llama, see the table in `jaxpar/models/decoder.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.errors import Keywords, check_ranges, nearest_divisor, refuse
from jaxpar.models.settings.experts import ExpertsConfig

# Checks that heads divide a width, and suggests the nearest numbers that do.


def check_heads(dim: int, heads: int, *, kv_heads: int = 0, even: bool = False) -> None:
    """Checks that heads divide a width.

    The suggested fix is the nearest number of heads that divides it: that leaves the number of parameters, and every
    other matrix, as they are. If no such number is near, or only a head's width is wrong, it is the nearest width.

    Args:
      dim: Width of the stream between blocks.
      heads: Number of attention heads, each dim / heads wide.
      kv_heads: Number of heads of keys and values, which divides heads; 0 means as many as heads.
      even: Whether the width of a head must be even, because rotary positions rotate pairs.

    Raises:
      JaxparError: If they do not, with a number that does.
    """
    pair = 1 + even
    width_fix = f"dim = {max(1, (dim + pair * heads // 2) // (pair * heads)) * pair * heads}"
    if dim % heads:
        divides = lambda n: dim // n % pair == 0 and n % (kv_heads or 1) == 0  # noqa: E731
        candidate = nearest_divisor(dim, heads, good=divides)
        fix = f"heads = {candidate}" if candidate else width_fix
        raise refuse(f"dim = {dim}, heads = {heads}", rule="heads divide dim", fix=fix)
    if kv_heads and heads % kv_heads:
        raise refuse(
            f"heads = {heads}, kv_heads = {kv_heads}",
            rule="each head of keys and values serves a whole number of query heads",
            fix=f"kv_heads = {nearest_divisor(heads, kv_heads) or heads}",
        )
    if dim // heads % pair:
        raise refuse(
            f"head_dim = {dim // heads} with rotary positions",
            rule="rotary positions turn pairs, so head_dim is even",
            fix=f"{width_fix}, or position = 'learned'",
        )


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
      experts: A mixture of experts in place of each feed-forward layer: settings of `ExpertsConfig`, or a dict of them.
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
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    scan: bool = True

    def __post_init__(self):
        if isinstance(self.experts, Mapping):
            object.__setattr__(self, "experts", ExpertsConfig(**self.experts))
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
        if self.experts.count and self.use_bias:
            raise refuse(
                f"use_bias = True with experts.count = {self.experts.count}",
                rule="the matrices of experts have no biases",
                fix="use_bias = False, or experts.count = 0",
            )
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
