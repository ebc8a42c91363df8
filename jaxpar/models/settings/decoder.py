"""The settings of a decoder: see `jaxpar/models/decoder.py`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from jaxpar.errors import Keywords, check_ranges, nearest_divisor, refuse
from jaxpar.models.settings.experts import ExpertsConfig
from jaxpar.models.settings.rope import LongRopeConfig, YarnConfig

NormKind = Literal["rms", "zero_centered_rms", "layer", "nonparametric_layer"]
NormPosition = Literal["pre", "post", "both"]
QueryKeyNorm = Literal["none", "head", "all_heads"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
BiasedPart = Literal["qkv", "out", "mlp"]

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


@dataclass(frozen=True, kw_only=True, repr=False)
class DecoderConfig(Keywords):
    """Shape and kind of a decoder.

    Attributes:
      vocab: Size of the vocabulary.
      padded_vocab: Rows of the embedding and columns of the head, at least vocab, so that tensor divides them; 0 means
        vocab. The surplus is zero and stays so: its logits are masked.
      seq: Longest sequence; the number of learned positions.
      layers: Number of blocks.
      dim: Width of the stream between blocks.
      heads: Attention heads.
      kv_heads: Heads of keys and values; 0 means as many as heads.
      head_dim: Width of a head; 0 means dim / heads.
      hidden: Width of the feed-forward; 0 means 4 dim, or 8/3 dim rounded up to 64 where gated.
      position: rotary or learned.
      norm: rms, zero_centered_rms (an RMSNorm that multiplies by 1 + its scale, as in Gemma), layer, or
        nonparametric_layer (a LayerNorm without scale and bias, as in OLMo).
      norm_eps: Epsilon that the norm adds to the mean square.
      norm_position: Norms before attention and feed-forward (pre), after them (post, OLMo 2), or both (Gemma 2).
      qk_norm: RMSNorm of queries and keys: none, of each head (Qwen3), or of all_heads together (OLMo 2).
      gated: Whether the feed-forward has a gate: SwiGLU, or GEGLU if the activation is a gelu.
      activation: silu, gelu (exact) or gelu_tanh; "" means silu where gated, else gelu_tanh.
      use_bias: Biases on every matrix.
      biases: Matrices with biases where not all have one: qkv (Qwen2), out, mlp.
      parallel_residual: Attention and feed-forward of a layer read the same stream (GPT-NeoX).
      shared_norm: With parallel_residual, they also share one norm before them (Phi-2).
      tied: The embedding is also the output matrix.
      head_bias: A bias of the output matrix (Phi-2).
      rope_base: Base of the rotary frequencies.
      rope_bases: Bases of layers, repeated: [10000, 1000000] alternates; 0 is a layer without positions (SmolLM3's
        every fourth); [] means rope_base in all.
      rope_factors: Numbers that positions of layers are divided by, repeated; [] for none.
      rope_share: Share of a head's dims that rotate; 0.25 in GPT-NeoX.
      rope_stretch: [factor, low, high, seq] of Llama 3.1's frequency scaling, [8.0, 1.0, 4.0, 8192.0]; [] for none.
      rope_yarn: YaRN's frequency scaling: settings of `YarnConfig`, or a dict of them.
      longrope: LongRoPE's frequency scaling (Phi-3): settings of `LongRopeConfig`, or a dict of them.
      windows: Attention windows of layers in tokens, repeated: [4096, 0] in Gemma 2; 0 is no window; [] for none.
      attention_scale: Factor of attention's scores; 0 means 1 / sqrt(head_dim).
      attention_softcap: Scores x become softcap * tanh(x / softcap); 0 for none. 50 in Gemma 2.
      logits_softcap: The same for logits; 0 for none. 30 in Gemma 2.
      embed_scale: Factor of the embeddings: sqrt(dim) in Gemma, embedding_multiplier in Granite.
      residual_scale: Factor of what attention and feed-forward add to the stream, residual_multiplier in Granite.
      logits_scale: Factor of the logits: 1 / logits_scaling of Granite.
      dropout: Dropout rate, in training only.
      experts: A mixture of experts in place of feed-forward layers: settings of `ExpertsConfig`, or a dict of them.
      scan: Run one compiled block over stacked layers, instead of compiling one copy per layer.
    """

    vocab: int = 256
    padded_vocab: int = 0
    seq: int = 256
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    position: Literal["rotary", "learned"] = "rotary"
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    norm_position: NormPosition = "pre"
    qk_norm: QueryKeyNorm = "none"
    gated: bool = True
    activation: Literal["", "silu", "gelu", "gelu_tanh"] = ""
    use_bias: bool = False
    biases: tuple[BiasedPart, ...] = ()
    parallel_residual: bool = False
    shared_norm: bool = False
    tied: bool = False
    head_bias: bool = False
    rope_base: float = 10_000.0
    rope_bases: tuple[float, ...] = ()
    rope_factors: tuple[float, ...] = ()
    rope_share: float = 1.0
    rope_stretch: tuple[float, ...] = ()
    rope_yarn: YarnConfig = field(default_factory=YarnConfig)
    longrope: LongRopeConfig = field(default_factory=LongRopeConfig)
    windows: tuple[int, ...] = ()
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    dropout: float = 0.0
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    scan: bool = True

    def __post_init__(self):
        for name, config in (("experts", ExpertsConfig), ("rope_yarn", YarnConfig), ("longrope", LongRopeConfig)):
            if isinstance(values := getattr(self, name), Mapping):
                object.__setattr__(self, name, config(**values))
            elif not isinstance(values, config):
                raise refuse(
                    f"{name} = {values!r:.60}",
                    rule=f"{name} is a dict of settings, or a {config.__name__}",
                    fix=f"{name} = {{}}, or its keys: {', '.join(key.name for key in fields(config))}",
                )
        high = 2**31 - 1
        check_ranges(
            self,
            "model",
            {name: (1, high) for name in ("vocab", "seq", "layers", "dim", "heads")}
            | {name: (0, high) for name in ("padded_vocab", "kv_heads", "head_dim", "hidden")}
            | {"norm_eps": (0, 1), "rope_base": (1, 1e30), "rope_share": (0, 1), "dropout": (0, 1)}
            | {name: (0, 1e6) for name in ("attention_scale", "attention_softcap", "logits_softcap")}
            | {name: (1e-6, 1e6) for name in ("embed_scale", "residual_scale", "logits_scale")},
            below=["dropout"],
        )
        if self.padded_vocab and self.padded_vocab < self.vocab:
            raise refuse(
                f"padded_vocab = {self.padded_vocab}, vocab = {self.vocab}",
                rule="a padded vocabulary has a row for every token, and more",
                fix=f"padded_vocab = {-(-self.vocab // 128) * 128}, or 0",
            )
        _check_attention(self)
        _check_frequencies(self)
        if self.shared_norm and not (self.parallel_residual and self.norm_position == "pre"):
            raise refuse(
                f"shared_norm, parallel_residual = {self.parallel_residual}, norm_position = {self.norm_position!r}",
                rule="attention and feed-forward share a norm if they read the same stream, after one norm before both",
                fix='parallel_residual = True, norm_position = "pre"',
            )
        _check_biases(self)
        _check_layer_lists(self)
        _check_layers_with_experts(self)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding."""
        return self.padded_vocab or self.vocab

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.heads

    @property
    def activation_name(self) -> Activation:
        """The activation of the feed-forward."""
        return self.activation or ("silu" if self.gated else "gelu_tanh")

    @property
    def biased_parts(self) -> tuple[BiasedPart, ...]:
        """Matrices with biases."""
        return get_args(BiasedPart) if self.use_bias else tuple(self.biases)

    @property
    def layer_attention(self) -> tuple[tuple[int, float, float], ...]:
        """(window, rope base, rope factor) of layers, which repeat; a window of 0 is none."""
        lists = self.windows or (0,), self.rope_bases or (self.rope_base,), self.rope_factors or (1.0,)
        period = min(math.lcm(*map(len, lists)), self.layers)
        windows, bases, factors = lists
        return tuple(
            (windows[i % len(windows)], bases[i % len(bases)], factors[i % len(factors)]) for i in range(period)
        )

    @property
    def layers_with_experts(self) -> range:
        """Numbers of the layers with experts."""
        return self.experts.layers_with_experts(self.layers)

    @property
    def has_dense_layers(self) -> bool:
        """Whether a decoder of experts has dense layers, too."""
        return bool(self.experts.count) and len(self.layers_with_experts) < self.layers

    @property
    def width(self) -> int:
        """Width of the feed-forward."""
        gated = -(-8 * self.dim // 3 // 64) * 64 if self.dim >= 64 else 4 * self.dim
        return self.hidden or (gated if self.gated else 4 * self.dim)


def _check_attention(config: DecoderConfig) -> None:
    even = config.position == "rotary"
    if not config.head_dim:
        check_heads(config.dim, config.heads, kv_heads=config.kv_heads, even=even)
    elif config.kv_heads and config.heads % config.kv_heads:
        check_heads(config.heads * config.head_dim, config.heads, kv_heads=config.kv_heads)
    rotary_dims = int(config.head_width * config.rope_share)
    if even and (rotary_dims < 2 or rotary_dims % 2):
        raise refuse(
            f"{rotary_dims} rotary dims: head_dim = {config.head_width}, rope_share = {config.rope_share}",
            rule="rotary positions turn pairs of a head's dims",
            fix="head_dim = 64, rope_share = 1.0, or position = 'learned'",
        )


def _check_frequencies(config: DecoderConfig) -> None:
    stretch = tuple(config.rope_stretch)
    if stretch and not (len(stretch) == 4 and stretch[0] >= 1 and 0 < stretch[1] < stretch[2] < 1e9 > stretch[3] > 0):
        raise refuse(
            f"rope_stretch = {list(stretch)!r:.80}",
            rule="rope_stretch is [factor >= 1, low, high, seq] with 0 < low < high < 1e9 and 0 < seq < 1e9, or []",
            fix="rope_stretch = [8.0, 1.0, 4.0, 8192.0]",
        )
    scalings = {"rope_stretch": stretch, "rope_yarn": config.rope_yarn.factor, "longrope": config.longrope.seq}
    if len(names := [name for name, value in scalings.items() if value]) > 1:
        raise refuse(" and ".join(names), rule="rotary frequencies are scaled in one way", fix=f"{names[0]} alone")
    if config.position == "learned" and (names := [name for name in ("rope_yarn", "longrope") if scalings[name]]):
        raise refuse(
            f'{names[0]} with position = "learned"',
            rule=f"{names[0]} scales the frequencies of rotary positions",
            fix=f'position = "rotary", or no {names[0]}',
        )
    if config.rope_yarn.factor and min(base for base in (config.rope_base, *config.rope_bases) if base) <= 1:
        raise refuse(
            "rope_yarn with a rope_base of 1",
            rule="YaRN divides by the logarithm of the base",
            fix="rope_base = 10000.0",
        )
    pairs = int(config.head_width * config.rope_share) // 2
    counts = len(config.longrope.short_factors), len(config.longrope.long_factors)
    if config.longrope.seq and counts != (pairs, pairs):
        raise refuse(
            f"longrope with {counts[0]} short and {counts[1]} long factors for {pairs} pairs of rotary dims",
            rule="LongRoPE has a factor for each pair of rotary dims",
            fix=f"{pairs} numbers each in longrope.short_factors and longrope.long_factors",
        )


def _check_biases(config: DecoderConfig) -> None:
    if unknown := [name for name in config.biases if name not in get_args(BiasedPart)]:
        raise refuse(
            f"biases = {list(config.biases)!r:.80}",
            rule="biases lists qkv, out or mlp",
            fix=f"biases without {unknown[0]!r:.40}",
        )
    if config.experts.count and "mlp" in config.biased_parts:
        key = "use_bias = True" if config.use_bias else f"biases = {list(config.biases)}"
        raise refuse(
            f"{key} with experts.count = {config.experts.count}",
            rule="the matrices of experts have no biases",
            fix="use_bias = False and no mlp in biases, or experts.count = 0",
        )


def _check_layers_with_experts(config: DecoderConfig) -> None:
    e = config.experts
    if e.count and not config.layers_with_experts:
        raise refuse(
            f"experts.dense_layers = {e.dense_layers}, every = {e.every} of {config.layers} layers",
            rule="a layer has experts: one of number i (from 0) with (i + 1) % every = 0 and i >= dense_layers",
            fix=f"layers = {e.layers_with_experts(2**62)[0] + 1} or more, or experts.count = 0",
        )


def _check_layer_lists(config: DecoderConfig) -> None:
    ranges = {"windows": (0, 2**31 - 1), "rope_bases": (0, 1e30), "rope_factors": (1e-6, 1e6)}
    for name, (low, high) in ranges.items():
        values = getattr(config, name)
        bad = [value for value in values if type(value) not in (int, float) or not low <= value <= high]
        if bad or len(values) > config.layers:
            got = f"{name} = {list(values)!r:.80}" + (f" of {config.layers} layers" if not bad else "")
            raise refuse(
                got,
                rule=f"{name} lists numbers of {low} to {high:g}, at most one for each layer",
                fix=f"{name} = []",
            )
