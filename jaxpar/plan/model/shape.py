"""The shape of a transformer, and what follows from it by arithmetic: parameters and FLOP."""

from dataclasses import dataclass
from math import prod
from typing import Any

from jaxpar.errors import check_ranges, nearest_divisor, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder as a plan sees it: alike blocks of attention and feed-forward between two embeddings.

    Attributes:
      layers: Blocks.
      dim: Width of the stream between blocks.
      heads: Attention heads of dim / heads each.
      kv_heads: Heads of keys and values; 0 means as many as heads.
      hidden: Width of the feed-forward; 0 means 4 dim.
      vocab: Tokens there are.
      seq: Tokens of a row.
      gated: Whether the feed-forward has a third matrix.
      learned: Whether positions are parameters, one for each place of a row.
      biases: Whether matrices and norms have them.
      tied: Whether the embedding is the output matrix too.
      causal: Whether a kernel may leave out the half of attention above the diagonal.
      trained: Share of the weights that are trained; those that are frozen have no gradients and no update.
    """

    layers: int
    dim: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    hidden: int = 0
    gated: bool = False
    learned: bool = False
    biases: bool = False
    tied: bool = False
    causal: bool = True
    trained: float = 1.0

    def __post_init__(self):
        most = 2**31 - 1
        check_ranges(
            self,
            "shape",
            {key: (1, most) for key in ("layers", "dim", "heads", "vocab", "seq")}
            | {key: (0, most) for key in ("kv_heads", "hidden")}
            | {"trained": (0.0, 1.0)},
        )
        if self.dim % self.heads or self.heads % (self.kv_heads or self.heads):
            raise refuse(
                f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}",
                rule="heads divide dim, and kv_heads divide heads",
                fix=f"heads={nearest_divisor(self.dim, self.heads) or 1}, kv_heads=0",
            )

    @classmethod
    def of(cls, settings: Any) -> "Shape":
        """Returns the shape of a model's settings: any object with the attributes of `jaxpar.DecoderSettings`."""
        same = ("layers", "dim", "heads", "vocab", "seq", "kv_heads", "gated", "tied")
        return cls(
            **{key: getattr(settings, key) for key in same},
            hidden=settings.width,
            learned=settings.position == "learned",
            biases=settings.use_bias,
        )

    @property
    def width(self) -> int:
        """Width of the feed-forward."""
        return self.hidden or 4 * self.dim

    @property
    def kv_dim(self) -> int:
        """Width of the keys, and of the values."""
        return self.dim * (self.kv_heads or self.heads) // self.heads

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's weights: q with k and v, out, up with gate, down.

        The tensor axis cuts the outputs of the first and third and the inputs of the second and fourth.
        """
        return (
            (self.dim, self.dim + 2 * self.kv_dim),
            (self.dim, self.dim),
            (self.dim, self.width * (1 + self.gated)),
            (self.width, self.dim),
        )

    @property
    def stored(self) -> tuple[tuple[int, tuple[tuple[int, bool], ...]], ...]:
        """(parameters, dims) of each array of matrices that a decoder stores, those of all layers in one.

        A dim is its size, and whether the tensor axis splits it; that of the layers is left out, as nothing else does.
        """
        size, kv_heads = self.dim // self.heads, self.kv_heads or self.heads
        inner = (
            ((self.dim, False), (self.heads, True), (size, False)),
            ((self.dim, False), (kv_heads, True), (size, False)),
        )
        each = *inner, ((self.dim, False), (self.width, True))
        ends = ((self.dim, False), (self.vocab, True))
        return *((self.layers * prod(n for n, _ in dims), dims) for dims in each), (self.vocab * self.dim, ends)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a block, with two norms."""
        weights = sum(inputs * outputs for inputs, outputs in self.matrices)
        biases = sum(outputs for _, outputs in self.matrices) + 2 * self.dim
        return weights + 2 * self.dim + self.biases * biases

    def cut_layer(self, tensor: Any) -> Any:
        """Returns the parameters of a block on one of `tensor` devices: norms and biases of the stream are on each."""
        whole = 2 * self.dim * (1 + 2 * self.biases)
        return (self.layer_parameters - whole) / tensor + whole

    @property
    def dims(self) -> dict[str, int]:
        """Names of dims to their sizes, as `jaxpar.mesh.axes` has them."""
        sizes = {"layers": self.layers, "embed": self.dim, "heads": self.heads, "mlp": self.width}
        return sizes | {"kv_heads": self.kv_heads or self.heads, "vocab": self.vocab, "seq": self.seq}

    @property
    def holding(self) -> dict[str, int]:
        """Names of dims that a technique may split to the weights in all matrices that have such a dim."""
        each = {"heads": 2 * self.dim, "kv_heads": 2 * self.kv_dim, "mlp": self.width * (2 + self.gated)}
        inner = {name: self.layers * self.dim * width for name, width in each.items()}
        stack, ends = self.layers * self.layer_parameters, (2 - self.tied) * self.vocab * self.dim
        return inner | {"layers": stack, "vocab": ends, "embed": sum(inner.values()) + ends}

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding of tokens and of places."""
        return (self.vocab + self.learned * self.seq) * self.dim

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm and of the output matrix, where that is not the embedding."""
        return (1 + self.biases) * self.dim + (not self.tied) * self.vocab * self.dim

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    @property
    def layer_flop(self) -> int:
        """FLOP per token of a block's matmuls with weights, going forward: 2 per weight."""
        return 2 * sum(inputs * outputs for inputs, outputs in self.matrices)

    @property
    def core_flop(self) -> int:
        """FLOP per token of a block's two matmuls of attention with all of the row, going forward: 4 seq dim."""
        return 4 * self.seq * self.dim

    @property
    def head_flop(self) -> int:
        """FLOP per token of the logits, going forward."""
        return 2 * self.dim * self.vocab

    def step_flop(self, rows: int) -> int:
        """Returns the FLOP of a step over so many rows, nothing computed twice: backward is twice forward.

        Backward is as much as forward for a frozen weight: 4 FLOP per parameter and token, not 6.

        Source: Narayanan et al. 2021, arXiv:2104.04473, appendix; all of attention counts, whatever is masked.
        """
        weights, core = self.layers * self.layer_flop + self.head_flop, self.layers * self.core_flop
        return round(rows * self.seq * ((2 + self.trained) * weights + 3 * core))

    def masked_flop(self, rows: int) -> int:
        """Returns the FLOP of a step in scores and values that a causal mask drops: half of attention's core."""
        return round(rows * self.seq * 3 * self.layers * self.core_flop / 2) if self.causal else 0
