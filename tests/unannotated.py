"""Transformers that nobody annotated, shaped and named as their authors have them. None knows of jaxpar.

Qwen3    nnx     einsums [embed, heads, head_dim], norms of queries and keys, keys shared by groups of heads
Gemma    nnx     einsums [heads, embed, head_dim], keys and values in one [2, heads, embed, head_dim], a tied table
PaLI     linen   Gemma's layers as big_vision scans them, gates in one [2, embed, mlp]
Llama    linen   matrices only
GPT2     linen   kernels transposed, queries, keys and values in one of [3 x embed, embed], a tied table
Bert     linen   dense layers that are told apart by their place alone
ViT      nnx     Flax's own attention
T5       linen   a bias of positions for each head, encoder and decoder
Whisper  linen   convolutions, encoder and decoder, a tied table
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

NAMES = ("Qwen3", "Gemma", "PaLI", "Llama", "GPT2", "Bert", "ViT", "T5", "Whisper")


class Einsum(nnx.Module):
    def __init__(self, equation: str, shape: tuple[int, ...], *, rngs: nnx.Rngs):
        self.equation = equation
        self.w = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w)


class Scale(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.ones(rngs.params(), width))

    def __call__(self, x):
        return self.w * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x):
    """Rotates the halves of [batch, seq, heads, head_dim] by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def grouped(queries, keys, values):
    """Causal attention [batch, seq, heads, head_dim] of groups of heads that share keys."""
    batch, length, heads, width = queries.shape
    queries = queries.reshape(batch, length, keys.shape[2], -1, width)
    scores = jnp.einsum("bthgd,bshd->bhgts", queries, keys) / width**0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    return jnp.einsum("bhgts,bshd->bthgd", weights, values).reshape(batch, length, heads, width)


class GatedMLP(nnx.Module):
    def __init__(self, embed: int, mlp: int, *, rngs: nnx.Rngs):
        self.gate_proj = nnx.Linear(embed, mlp, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(embed, mlp, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(mlp, embed, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class QwenAttention(nnx.Module):
    def __init__(self, embed, heads, kv_heads, head_dim, *, rngs):
        self.q_proj = Einsum("BTD,DNH->BTNH", (embed, heads, head_dim), rngs=rngs)
        self.k_proj = Einsum("BSD,DKH->BSKH", (embed, kv_heads, head_dim), rngs=rngs)
        self.v_proj = Einsum("BSD,DKH->BSKH", (embed, kv_heads, head_dim), rngs=rngs)
        self.o_proj = Einsum("BTNH,NHD->BTD", (heads, head_dim, embed), rngs=rngs)
        self.q_norm, self.k_norm = Scale(head_dim, rngs=rngs), Scale(head_dim, rngs=rngs)

    def __call__(self, x):
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        return self.o_proj(grouped(rotate(q), rotate(k), v))


class GemmaAttention(nnx.Module):
    def __init__(self, embed, heads, kv_heads, head_dim, *, rngs):
        self.q_einsum = Einsum("BTD,NDH->BTNH", (heads, embed, head_dim), rngs=rngs)
        self.kv_einsum = Einsum("BSD,CKDH->CBSKH", (2, kv_heads, embed, head_dim), rngs=rngs)
        self.attn_vec_einsum = Einsum("BTNH,NHD->BTD", (heads, head_dim, embed), rngs=rngs)

    def __call__(self, x):
        k, v = self.kv_einsum(x)
        return self.attn_vec_einsum(grouped(rotate(self.q_einsum(x)), rotate(k), v))


class Block(nnx.Module):
    def __init__(self, attention, embed, mlp, *, rngs):
        self.input_layernorm, self.post_attention_layernorm = Scale(embed, rngs=rngs), Scale(embed, rngs=rngs)
        self.attn, self.mlp = attention, GatedMLP(embed, mlp, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedder(nnx.Module):
    def __init__(self, vocab: int, embed: int, *, rngs: nnx.Rngs):
        self.input_embedding = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (vocab, embed)))

    def encode(self, tokens):
        return self.input_embedding[(tokens,)]

    def decode(self, x):
        return jnp.dot(x, self.input_embedding.T)


class Qwen3(nnx.Module):
    def __init__(self, vocab, embed, mlp, heads, kv_heads, head_dim, layers=1, *, rngs):
        self.embedder = Embedder(vocab, embed, rngs=rngs)
        made = [QwenAttention(embed, heads, kv_heads, head_dim, rngs=rngs) for _ in range(layers)]
        self.layers = nnx.List([Block(each, embed, mlp, rngs=rngs) for each in made])
        self.final_norm = Scale(embed, rngs=rngs)
        self.lm_head = Einsum("BTD,DV->BTV", (embed, vocab), rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder.encode(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


class Gemma(nnx.Module):
    def __init__(self, vocab, embed, mlp, heads, kv_heads, head_dim, layers=1, *, rngs):
        self.embedder = Embedder(vocab, embed, rngs=rngs)
        made = [GemmaAttention(embed, heads, kv_heads, head_dim, rngs=rngs) for _ in range(layers)]
        self.layers = nnx.List([Block(each, embed, mlp, rngs=rngs) for each in made])
        self.final_norm = Scale(embed, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder.encode(tokens) * self.embedder.input_embedding.shape[1] ** 0.5
        for layer in self.layers:
            x = layer(x)
        return self.embedder.decode(self.final_norm(x))


class Mixer(nnx.Module):
    """A transformer's layer in words of its author's own."""

    def __init__(self, embed, mlp, heads, *, rngs):
        self.heads = heads
        self.before, self.between = nnx.RMSNorm(embed, rngs=rngs), nnx.RMSNorm(embed, rngs=rngs)
        self.project, self.merge = nnx.Linear(embed, 3 * embed, rngs=rngs), nnx.Linear(embed, embed, rngs=rngs)
        self.expand, self.contract = nnx.Linear(embed, mlp, rngs=rngs), nnx.Linear(mlp, embed, rngs=rngs)

    def __call__(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.reshape(shape) for part in jnp.split(self.project(self.before(x)), 3, axis=-1))
        x = x + self.merge(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
        return x + self.contract(nnx.gelu(self.expand(self.between(x))))


class OwnWords(nnx.Module):
    def __init__(self, vocab, embed, mlp, heads, *, rngs):
        self.lexicon = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (vocab, embed)))
        self.mixer = Mixer(embed, mlp, heads, rngs=rngs)

    def __call__(self, tokens):
        return self.mixer(self.lexicon[tokens]) @ self.lexicon.T


class ViTBlock(nnx.Module):
    def __init__(self, embed, mlp, heads, *, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(embed, rngs=rngs), nnx.LayerNorm(embed, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(num_heads=heads, in_features=embed, decode=False, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(embed, mlp, rngs=rngs), nnx.Linear(mlp, embed, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.linear2(nnx.gelu(self.linear1(self.norm2(x))))


class ViT(nnx.Module):
    def __init__(self, embed, mlp, heads, size=224, patch=16, classes=1000, layers=1, *, rngs):
        self.patches = nnx.Conv(3, embed, (patch, patch), (patch, patch), padding="VALID", rngs=rngs)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, embed)))
        self.positions = nnx.Param(jnp.zeros((1, (size // patch) ** 2 + 1, embed)))
        self.layers = nnx.List([ViTBlock(embed, mlp, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(embed, rngs=rngs)
        self.classifier = nnx.Linear(embed, classes, rngs=rngs)

    def __call__(self, image):
        x = self.patches(image)
        x = x.reshape(len(x), -1, x.shape[-1])
        cls = jnp.tile(self.cls_token[...], (len(x), 1, 1))
        x = jnp.concatenate([cls, x], axis=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.norm(x)[:, 0])


class Norm(nn.Module):
    """RMSNorm whose scale is called `weight`."""

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        return weight * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class PaLIEinsum(nn.Module):
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param("w", nn.initializers.normal(0.02), self.shape))


class PaLIMLP(nn.Module):
    embed: int
    mlp: int

    @nn.compact
    def __call__(self, x):
        gates = self.param("gating_einsum", nn.initializers.normal(0.02), (2, self.embed, self.mlp))
        x = nn.gelu(jnp.dot(x, gates[0])) * jnp.dot(x, gates[1])
        return jnp.dot(x, self.param("linear", nn.initializers.normal(0.02), (self.mlp, self.embed)))


class PaLIAttention(nn.Module):
    embed: int
    heads: int
    kv_heads: int
    head_dim: int

    def setup(self):
        self.q_einsum = PaLIEinsum((self.heads, self.embed, self.head_dim))
        self.kv_einsum = PaLIEinsum((2, self.kv_heads, self.embed, self.head_dim))
        self.attn_vec_einsum = PaLIEinsum((self.heads, self.head_dim, self.embed))

    def __call__(self, x):
        q = self.q_einsum("BTD,NDH->BTNH", x)
        k, v = self.kv_einsum("BSD,2KDH->2BSKH", x)
        return self.attn_vec_einsum("BTNH,NHD->BTD", grouped(rotate(q), rotate(k), v))


class PaLIBlock(nn.Module):
    embed: int
    mlp_dim: int
    heads: int
    kv_heads: int
    head_dim: int

    def setup(self):
        self.pre_attention_norm, self.pre_ffw_norm = Norm(), Norm()
        self.attn = PaLIAttention(self.embed, self.heads, self.kv_heads, self.head_dim)
        self.mlp = PaLIMLP(self.embed, self.mlp_dim)

    def __call__(self, x, _):
        x = x + self.attn(self.pre_attention_norm(x))
        return x + self.mlp(self.pre_ffw_norm(x)), None


class PaLI(nn.Module):
    vocab: int
    embed: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 2
    embed_dtype: str = "float32"

    @nn.compact
    def __call__(self, tokens):
        table = self.param("input_embedding", nn.initializers.normal(0.02), (self.vocab, self.embed))
        layers = nn.scan(PaLIBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        kind = (self.embed, self.mlp, self.heads, self.kv_heads, self.head_dim)
        x, _ = layers(*kind, name="layers")(table[tokens].astype(self.embed_dtype), None)
        return jnp.dot(Norm(name="final_norm")(x), table.T)


def split(x, heads):
    return x.reshape(*x.shape[:2], heads, -1)


def dense(width, bias=True, **kwargs):
    return nn.Dense(width, use_bias=bias, kernel_init=nn.initializers.normal(0.02), **kwargs)


class LlamaAttention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        q, k, v = (split(dense(width, False, name=name)(x), self.heads) for name in ("q_proj", "k_proj", "v_proj"))
        return dense(width, False, name="o_proj")(grouped(rotate(q), rotate(k), v).reshape(x.shape))


class LlamaMLP(nn.Module):
    mlp: int

    @nn.compact
    def __call__(self, x):
        gate, up = dense(self.mlp, False, name="gate_proj")(x), dense(self.mlp, False, name="up_proj")(x)
        return dense(x.shape[-1], False, name="down_proj")(nn.silu(gate) * up)


class LlamaBlock(nn.Module):
    heads: int
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        x = x + LlamaAttention(self.heads, name="self_attn")(Norm(name="input_layernorm")(x))
        return x + LlamaMLP(self.mlp_dim, name="mlp")(Norm(name="post_attention_layernorm")(x))


class Llama(nn.Module):
    vocab: int
    embed: int
    mlp: int
    heads: int
    layers: int = 1

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.embed, name="embed_tokens")(tokens)
        for n in range(self.layers):
            x = LlamaBlock(self.heads, self.mlp, name=str(n))(x)
        return dense(self.vocab, False, name="lm_head")(Norm(name="norm")(x))


class Conv1D(nn.Module):
    """GPT-2's own name for a dense layer; its kernel is [out, in]."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.02), (self.features, x.shape[-1])).transpose()
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))) + bias


class GPT2Attention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.split(Conv1D(3 * x.shape[-1], name="c_attn")(x), 3, axis=2)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], jnp.int32))
        mixed = nn.dot_product_attention(*(split(each, self.heads) for each in (q, k, v)), mask=mask)
        return Conv1D(x.shape[-1], name="c_proj")(mixed.reshape(x.shape))


class GPT2MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Conv1D(x.shape[-1], name="c_proj")(nn.gelu(Conv1D(4 * x.shape[-1], name="c_fc")(x)))


class GPT2Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        x = x + GPT2Attention(self.heads, name="attn")(nn.LayerNorm(name="ln_1")(x))
        return x + GPT2MLP(name="mlp")(nn.LayerNorm(name="ln_2")(x))


class GPT2(nn.Module):
    vocab: int
    embed: int
    heads: int
    positions: int = 1024
    layers: int = 1

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(self.vocab, self.embed, name="wte")
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = table(tokens) + nn.Embed(self.positions, self.embed, name="wpe")(places)
        for n in range(self.layers):
            x = GPT2Block(self.heads, name=f"h_{n}")(x)
        return nn.LayerNorm(name="ln_f")(x) @ table.embedding.T


class BertSelfAttention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        q, k, v = (split(dense(x.shape[-1], name=name)(x), self.heads) for name in ("query", "key", "value"))
        return nn.dot_product_attention(q, k, v).reshape(x.shape)


class BertOutput(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, residual):
        return nn.LayerNorm(name="LayerNorm")(dense(self.width, name="dense")(x) + residual)


class BertAttention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        return BertOutput(x.shape[-1], name="output")(BertSelfAttention(self.heads, name="self")(x), x)


class BertIntermediate(nn.Module):
    mlp: int

    @nn.compact
    def __call__(self, x):
        return nn.gelu(dense(self.mlp, name="dense")(x))


class BertLayer(nn.Module):
    heads: int
    mlp: int

    @nn.compact
    def __call__(self, x):
        x = BertAttention(self.heads, name="attention")(x)
        return BertOutput(x.shape[-1], name="output")(BertIntermediate(self.mlp, name="intermediate")(x), x)


class Bert(nn.Module):
    vocab: int
    embed: int
    mlp: int
    heads: int
    positions: int = 512
    layers: int = 1

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(self.vocab, self.embed, name="word_embeddings")
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = table(tokens) + nn.Embed(self.positions, self.embed, name="position_embeddings")(places)
        x = nn.LayerNorm(name="LayerNorm")(x + nn.Embed(2, self.embed, name="token_type_embeddings")(0 * tokens))
        for n in range(self.layers):
            x = BertLayer(self.heads, self.mlp, name=str(n))(x)
        x = nn.LayerNorm(name="transform_norm")(nn.gelu(dense(self.embed, name="transform")(x)))
        return x @ table.embedding.T + self.param("bias", nn.initializers.zeros, (self.vocab,))


class T5Attention(nn.Module):
    heads: int
    head_dim: int
    biased: bool = False
    causal: bool = False

    @nn.compact
    def __call__(self, x, source=None):
        source, inner = x if source is None else source, self.heads * self.head_dim
        q = split(dense(inner, False, name="q")(x), self.heads)
        k, v = (split(dense(inner, False, name=name)(source), self.heads) for name in ("k", "v"))
        bias = jnp.zeros((1, self.heads, q.shape[1], k.shape[1]))
        if self.biased:
            near = jnp.clip(jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None] + 16, 0, 31)
            bias = nn.Embed(32, self.heads, name="relative_attention_bias")(near).transpose((2, 0, 1))[None]
        if self.causal:
            bias = jnp.where(jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool)), bias, -1e30)
        mixed = nn.dot_product_attention(q, k, v, bias=bias)
        return dense(x.shape[-1], False, name="o")(mixed.reshape(*x.shape[:2], inner))


class T5MLP(nn.Module):
    mlp: int

    @nn.compact
    def __call__(self, x):
        hidden = nn.gelu(dense(self.mlp, False, name="wi_0")(x)) * dense(self.mlp, False, name="wi_1")(x)
        return dense(x.shape[-1], False, name="wo")(hidden)


class T5Block(nn.Module):
    heads: int
    head_dim: int
    mlp: int
    causal: bool = False

    @nn.compact
    def __call__(self, x, source=None):
        own = T5Attention(self.heads, self.head_dim, True, self.causal, name="SelfAttention")
        x = x + own(Norm(name="layer_norm_0")(x))
        if source is not None:
            across = T5Attention(self.heads, self.head_dim, name="EncDecAttention")
            x = x + across(Norm(name="layer_norm_1")(x), source)
        return x + T5MLP(self.mlp, name="DenseReluDense")(Norm(name="layer_norm_2")(x))


class T5(nn.Module):
    vocab: int
    embed: int
    mlp: int
    heads: int
    head_dim: int
    layers: int = 1

    @nn.compact
    def __call__(self, tokens):
        shared = nn.Embed(self.vocab, self.embed, name="shared")
        kind = (self.heads, self.head_dim, self.mlp)
        source = x = shared(tokens)
        for n in range(self.layers):
            source = T5Block(*kind, name=f"encoder_{n}")(source)
        source = Norm(name="encoder_norm")(source)
        for n in range(self.layers):
            x = T5Block(*kind, causal=True, name=f"decoder_{n}")(x, source)
        return dense(self.vocab, False, name="lm_head")(Norm(name="decoder_norm")(x))


class WhisperAttention(nn.Module):
    heads: int
    causal: bool = False

    @nn.compact
    def __call__(self, x, source=None):
        width, source = x.shape[-1], x if source is None else source
        q, v = split(dense(width, name="q_proj")(x), self.heads), split(dense(width, name="v_proj")(source), self.heads)
        k = split(dense(width, False, name="k_proj")(source), self.heads)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], jnp.int32)) if self.causal else None
        return dense(width, name="out_proj")(nn.dot_product_attention(q, k, v, mask=mask).reshape(x.shape))


class WhisperLayer(nn.Module):
    heads: int
    causal: bool = False

    @nn.compact
    def __call__(self, x, source=None):
        own = WhisperAttention(self.heads, self.causal, name="self_attn")
        x = x + own(nn.LayerNorm(name="self_attn_layer_norm")(x))
        if source is not None:
            across = WhisperAttention(self.heads, name="encoder_attn")
            x = x + across(nn.LayerNorm(name="encoder_attn_layer_norm")(x), source)
        hidden = nn.gelu(dense(4 * x.shape[-1], name="fc1")(nn.LayerNorm(name="final_layer_norm")(x)))
        return x + dense(x.shape[-1], name="fc2")(hidden)


class Whisper(nn.Module):
    vocab: int
    embed: int
    heads: int
    frames: int = 1500
    positions: int = 448
    layers: int = 1

    @nn.compact
    def __call__(self, sound, tokens):
        x = nn.gelu(nn.Conv(self.embed, (3,), padding=1, name="conv1")(sound))
        x = nn.gelu(nn.Conv(self.embed, (3,), 2, padding=1, name="conv2")(x))
        x = x + nn.Embed(self.frames, self.embed, name="encoder_positions")(jnp.arange(x.shape[1]))
        for n in range(self.layers):
            x = WhisperLayer(self.heads, name=f"encoder_{n}")(x)
        source = nn.LayerNorm(name="encoder_norm")(x)
        table = nn.Embed(self.vocab, self.embed, name="embed_tokens")
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = table(tokens) + nn.Embed(self.positions, self.embed, name="embed_positions")(places)
        for n in range(self.layers):
            x = WhisperLayer(self.heads, True, name=f"decoder_{n}")(x, source)
        return nn.LayerNorm(name="decoder_norm")(x) @ table.embedding.T


def token_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return losses.sum(), losses.size


def image_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return losses.sum(), losses.size


def sound_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["sound"], batch["tokens"]), batch["targets"])
    return losses.sum(), losses.size
