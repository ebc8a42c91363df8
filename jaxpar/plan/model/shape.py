"""The shape of a transformer, with its parameters, its FLOP, and the arrays that it stores.

FLOP are 2 per multiplication of its matmuls; backward is twice forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from jaxpar.errors import check_ranges, nearest_divisor, refuse
from jaxpar.parallel.declaration import Parallel
from jaxpar.plan.candidate import Candidate

STORED_BYTES = 4  # of a parameter between steps
REPLICATED = Parallel().replicate_above  # largest bytes of a parameter that is replicated if shards do not divide it


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder: an embedding, equal blocks of attention and feed-forward, and an output matrix.

    Attributes:
      layers: Number of blocks.
      dim: Width of the residual stream.
      heads: Attention heads.
      kv_heads: Heads of keys and values; 0 means `heads`.
      head_dim: Width of a head; 0 means dim / heads.
      hidden: Width of the feed-forward; 0 means 4 dim.
      vocab: Size of the vocabulary.
      seq: Tokens of a row.
      gated: Whether the feed-forward has a third matrix.
      learned: Whether positions are parameters, one vector per position of a row.
      biases: Whether matrices and norms have biases.
      vectors: Parameters of a block's norms and biases; -1 means two norms, and biases as `biases` says.
      head_vectors: Parameters of the last norm and of the head's bias; -1 means a norm, with a bias as `biases` says.
      tied: Whether the embedding is also the output matrix.
      chunked_head: Whether the loss may compute large logits in chunks: not with a bias of the head or a softcap.
      causal: Whether a kernel may skip the half of attention above the diagonal.
      trained: Share of the weights that are trained; frozen weights have no gradients and no update.
    """

    layers: int
    dim: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    gated: bool = False
    learned: bool = False
    biases: bool = False
    vectors: int = -1
    head_vectors: int = -1
    tied: bool = False
    chunked_head: bool = True
    causal: bool = True
    trained: float = 1.0

    def __post_init__(self):
        largest = 2**31 - 1
        check_ranges(
            self,
            "shape",
            {key: (1, largest) for key in ("layers", "dim", "heads", "vocab", "seq")}
            | {key: (0, largest) for key in ("kv_heads", "head_dim", "hidden")}
            | {key: (-1, largest) for key in ("vectors", "head_vectors")}
            | {"trained": (0.0, 1.0)},
        )
        if (not self.head_dim and self.dim % self.heads) or self.heads % (self.kv_heads or self.heads):
            raise refuse(
                f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}",
                rule="heads divide dim, and kv_heads divide heads",
                fix=f"heads={nearest_divisor(self.dim, self.heads) or 1}, kv_heads=0",
            )

    @classmethod
    def from_settings(cls, settings: Any) -> "Shape":
        """Makes a shape from any object with the attributes of `jaxpar.DecoderConfig`."""
        names = ("layers", "dim", "heads", "seq", "kv_heads", "head_dim", "gated", "tied")
        return cls(
            **{key: getattr(settings, key) for key in names},
            hidden=settings.width,
            vocab=settings.vocab_rows,
            learned=settings.position == "learned",
            biases=settings.norm == "layer" and "mlp" in settings.biased_parts,
            vectors=_vectors(settings),
            chunked_head=not (settings.head_bias or settings.logits_softcap),
            head_vectors=_norm_vectors(settings) + settings.head_bias * settings.vocab_rows,
        )

    @property
    def width(self) -> int:
        """Width of the feed-forward."""
        return self.hidden or 4 * self.dim

    @property
    def kv_dim(self) -> int:
        """Width of the keys, and of the values."""
        return self.head_width * (self.kv_heads or self.heads)

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.heads

    @property
    def q_dim(self) -> int:
        """Width of the queries of all heads."""
        return self.head_width * self.heads

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's weights: q with k and v, out, up with gate, down.

        The tensor axis splits the outputs of the first and third and the inputs of the second and fourth.
        """
        return (
            (self.dim, self.q_dim + 2 * self.kv_dim),
            (self.q_dim, self.dim),
            (self.dim, self.width * (1 + self.gated)),
            (self.width, self.dim),
        )

    @property
    def dims(self) -> dict[str, int]:
        """Names of dims, as in `jaxpar.mesh.axes`, to their sizes."""
        sizes = {"layers": self.layers, "embed": self.dim, "heads": self.heads, "mlp": self.width}
        return sizes | {"kv_heads": self.kv_heads or self.heads, "vocab": self.vocab, "seq": self.seq}

    @property
    def parameters_by_dim(self) -> dict[str, int]:
        """Names of dims that a technique may split, to the weights in all matrices that have such a dim."""
        widths = {"heads": 2 * self.q_dim, "kv_heads": 2 * self.kv_dim, "mlp": self.width * (2 + self.gated)}
        inner = {name: self.layers * self.dim * width for name, width in widths.items()}
        stack, vocab_parameters = self.layers * count_parameters(self).layer, (2 - self.tied) * self.vocab * self.dim
        return inner | {"layers": stack, "vocab": vocab_parameters, "embed": sum(inner.values()) + vocab_parameters}

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        count = count_parameters(self)
        return self.layers * count.layer + count.embedding + count.head


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameters of a decoder.

    Attributes:
      layer: Of a block.
      embedding: Of the token and position embeddings.
      head: Of the last norm and of an untied output matrix.
    """

    layer: int
    embedding: int
    head: int


def count_parameters(shape: Shape) -> ParameterCount:
    """Counts the parameters of the parts of a decoder."""
    weights = sum(inputs * outputs for inputs, outputs in shape.matrices)
    biases = sum(outputs for _, outputs in shape.matrices) + 2 * shape.dim
    return ParameterCount(
        layer=weights + (2 * shape.dim + shape.biases * biases if shape.vectors < 0 else shape.vectors),
        embedding=(shape.vocab + shape.learned * shape.seq) * shape.dim,
        head=((1 + shape.biases) * shape.dim if shape.head_vectors < 0 else shape.head_vectors)
        + (not shape.tied) * shape.vocab * shape.dim,
    )


def _norm_vectors(settings: Any) -> int:
    """Parameters of a norm of the residual stream."""
    return {"layer": 2, "nonparametric_layer": 0}.get(settings.norm, 1) * settings.dim


def _vectors(settings: Any) -> int:
    """Parameters of the norms and biases of a decoder's block, of these settings."""
    s, kv_heads = settings, settings.kv_heads or settings.heads
    q_dim, kv_dim = s.heads * s.head_width, kv_heads * s.head_width
    widths = {"qkv": q_dim + 2 * kv_dim, "out": s.dim, "mlp": s.width * (1 + s.gated) + s.dim}
    norms = (4 if s.norm_position == "both" else 2 - s.shared_norm) * _norm_vectors(s)
    qk_norms = {"none": 0, "head": 2 * s.head_width, "all_heads": q_dim + kv_dim}[s.qk_norm]
    return norms + qk_norms + sum(widths[part] for part in s.biased_parts)


# Protocols of a model's named dims, and of the parameters that have them, for techniques.


class NamedDims(Protocol):
    """A model with named dims, which follow from the shape of a decoder, or from the parameters of other models."""

    @property
    def dims(self) -> Mapping[str, int]:
        """Maps a dim name to a common divisor of all its dims. An axis that splits it must divide this number."""
        ...

    @property
    def parameters_by_dim(self) -> Mapping[str, int]:
        """Names of dims to the parameters in all arrays that have such a dim."""
        ...


class CountedModel(NamedDims, Protocol):
    """A model with named dims and a number of parameters."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        ...


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The dims of a model other than jaxpar's decoder.

    Attributes:
      dims: As in `NamedDims`.
      parameters_by_dim: As in `NamedDims`.
    """

    dims: Mapping[str, int]
    parameters_by_dim: Mapping[str, int]


def layer_flop(shape: Shape) -> int:
    """Returns the forward FLOP per token of a block's matmuls with weights: 2 per weight."""
    return 2 * sum(inputs * outputs for inputs, outputs in shape.matrices)


def attention_flop(shape: Shape) -> int:
    """Returns the forward FLOP per token of a block's two attention matmuls over a whole row: 4 seq heads head_dim."""
    return 4 * shape.seq * shape.q_dim


def step_flop(shape: Shape, rows: int) -> int:
    """Returns the FLOP of a step over this many rows, without recomputation: backward is twice forward.

    For a frozen weight backward equals forward: 4 FLOP per parameter and token, not 6.

    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix. Masked scores count.
    """
    weights = shape.layers * layer_flop(shape) + 2 * shape.dim * shape.vocab
    return round(rows * shape.seq * ((2 + shape.trained) * weights + 3 * shape.layers * attention_flop(shape)))


def masked_flop(shape: Shape, rows: int) -> int:
    """Returns the FLOP of a step that a causal mask drops: half of attention's matmuls."""
    return round(rows * shape.seq * 3 * shape.layers * attention_flop(shape) / 2) if shape.causal else 0


def divides_arrays(shape: Shape, candidate: Candidate) -> Any:
    """Whether stages and shards of the training state divide a dim of each large parameter.

    The number of stages must divide the number of layers or the model dim. The number of shards (times `tensor`, on
    dims that it splits) must divide a dim other than the layers: JAX stores no unequal shards, and `compose` refuses to
    replicate large parameters.
    """
    stages = np.equal(shape.layers % candidate.pipe, 0) | np.equal(shape.dim % candidate.pipe, 0)
    # all large arrays divide; and at least one array does, or the axis is refused
    large_divide, any_divides = True, False
    for size, dims in _stored_arrays(shape):
        fits = [np.equal(dim % (candidate.shards * (candidate.tensor if flag else 1)), 0) for dim, flag in dims]
        divides = np.any(np.broadcast_arrays(*fits), axis=0)
        any_divides = any_divides | divides
        large_divide = large_divide & (divides | (size * STORED_BYTES <= REPLICATED))
    return stages & ((large_divide & any_divides) | np.equal(candidate.shards, 1))


def _stored_arrays(shape: Shape) -> tuple[tuple[int, tuple[tuple[int, bool], ...]], ...]:
    """Returns (parameters, dims) of each array of matrices; an array stacks all layers.

    A dim is (size, whether the tensor axis splits it). The dim of the layers is not listed.
    """
    size, kv_heads = shape.head_width, shape.kv_heads or shape.heads
    inner = (
        ((shape.dim, False), (shape.heads, True), (size, False)),
        ((shape.dim, False), (kv_heads, True), (size, False)),
    )
    arrays = *inner, ((shape.dim, False), (shape.width, True))
    ends = ((shape.dim, False), (shape.vocab, True))
    return *((shape.layers * prod(n for n, _ in dims), dims) for dims in arrays), (shape.vocab * shape.dim, ends)
