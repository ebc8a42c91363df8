"""Language models in Linen whose authors name dims in words of their own, and small. None knows of jaxpar.

MaxText    a config; layers of `nn.scan` and `nn.remat` that know their names; activations constrained everywhere
Mixtral    a router to the best two of four experts, tokens dispatched and combined by einsums, a loss of balance
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from published.example import Example, context, cross_entropy, tokens

STREAM = ("activation_batch", "activation_norm_length", "activation_embed")
HEADS = ("activation_batch", "activation_length", "activation_heads", "activation_kv")


@dataclass(frozen=True)
class Config:
    vocab_size: int = 32
    base_emb_dim: int = 16
    base_mlp_dim: int = 32
    num_heads: int = 4
    head_dim: int = 4
    num_decoder_layers: int = 2
    dtype: Any = jnp.float32
    logits_via_embedding: bool = False


class DenseGeneral(nn.Module):
    """Contracts the last dims; its kernel has a name for every dim."""

    features: tuple[int, ...]
    kernel_axes: tuple[str, ...]
    contracts: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        shape = (*x.shape[-self.contracts :], *self.features)
        into, out = tuple(range(self.contracts)), tuple(range(self.contracts, len(shape)))
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=into, out_axis=out)
        kernel = self.param("kernel", nn.with_logical_partitioning(init, self.kernel_axes), shape, jnp.float32)
        dims = tuple(range(x.ndim - self.contracts, x.ndim))
        return jax.lax.dot_general(x.astype(self.dtype), jnp.asarray(kernel, self.dtype), ((dims, into), ((), ())))


class RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        cfg = self.config
        shape = (cfg.num_heads, cfg.head_dim)
        named = nn.with_logical_constraint
        query = named(DenseGeneral(shape, ("embed", "q_heads", "kv"), name="query")(x), HEADS)
        key = named(DenseGeneral(shape, ("embed", "kv_heads", "kv_head_dim"), name="key")(x), HEADS)
        value = named(DenseGeneral(shape, ("embed", "kv_heads", "kv_head_dim"), name="value")(x), HEADS)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(cfg.head_dim)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(causal, scores, -1e9)), value)
        out = DenseGeneral((cfg.base_emb_dim,), ("heads", "kv", "embed"), contracts=2, name="out")
        return named(out(named(mixed, HEADS)), STREAM)


class MlpBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        gates = [DenseGeneral((self.config.base_mlp_dim,), ("embed", "mlp"), name=f"wi_{i}")(x) for i in range(2)]
        x = nn.silu(gates[0]) * gates[1]
        x = nn.with_logical_constraint(x, ("activation_batch", "activation_length", "activation_mlp"))
        return DenseGeneral((self.config.base_emb_dim,), ("mlp", "embed"), name="wo")(x)


class DecoderLayer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.with_logical_constraint(x, STREAM)
        x = x + Attention(self.config, name="self_attention")(RMSNorm(name="pre_self_attention_norm")(x))
        x = x + MlpBlock(self.config, name="mlp")(RMSNorm(name="post_self_attention_norm")(x))
        x = nn.Dropout(0.1, broadcast_dims=(-2,))(x, deterministic=deterministic)
        return nn.with_logical_constraint(x, STREAM), None


class MaxText(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens, enable_dropout=True):
        cfg = self.config
        box = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
        table = self.param("token_embedder", box, (cfg.vocab_size, cfg.base_emb_dim))
        x = nn.with_logical_constraint(jnp.asarray(table, cfg.dtype)[tokens], STREAM)
        layer = nn.remat(DecoderLayer, prevent_cse=False, static_argnums=(2,), policy=None)
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast,),
            length=cfg.num_decoder_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(cfg, name="layers")(x, not enable_dropout)
        x = RMSNorm(name="decoder_norm")(x)
        logits = DenseGeneral((cfg.vocab_size,), ("embed", "vocab"), name="logits_dense")(x)
        return nn.with_logical_constraint(
            logits, ("activation_embed_and_logits_batch", "activation_length", "activation_vocab")
        )


def maxtext_loss(model, batch):
    logits = model(batch["tokens"][:, :-1], enable_dropout=model.training)
    one_hot = jax.nn.one_hot(batch["tokens"][:, 1:], logits.shape[-1])
    losses = -jnp.sum(one_hot * nn.log_softmax(logits), axis=-1)
    return losses.sum(), losses.size


class Experts(nn.Module):
    """Feed-forward layers of which each token takes the best few; an expert takes only so many tokens of a sequence."""

    experts: int = 4
    best: int = 2
    capacity: int = 6
    hidden: int = 32

    @nn.compact
    def __call__(self, x):
        batch, length, dim = x.shape
        chances = nn.softmax(nn.Dense(self.experts, use_bias=False, name="gate")(x))
        weights, chosen = jax.lax.top_k(chances, self.best)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        picked = jax.nn.one_hot(chosen, self.experts)
        queue = picked.swapaxes(1, 2).reshape(batch, -1, self.experts)  # first choices come first
        place = (jnp.cumsum(queue, axis=1) - 1).reshape(batch, self.best, length, self.experts).swapaxes(1, 2)
        slots = jax.nn.one_hot(jnp.where(picked > 0, place, -1).astype(jnp.int32), self.capacity)
        combine = jnp.einsum("btk,btkec->btec", weights, slots)
        dispatch = (combine > 0).astype(x.dtype)
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("w1", init, (self.experts, dim, self.hidden))
        gate = self.param("w3", init, (self.experts, dim, self.hidden))
        down = self.param("w2", init, (self.experts, self.hidden, dim))
        y = jnp.einsum("btec,btd->ebcd", dispatch, x)
        y = nn.silu(jnp.einsum("ebcd,edf->ebcf", y, up)) * jnp.einsum("ebcd,edf->ebcf", y, gate)
        y = jnp.einsum("ebcf,efd->ebcd", y, down)
        load = jnp.einsum("bte,bte->be", picked[:, :, 0], chances) * self.experts / length
        self.sow("intermediates", "balance", load.sum(axis=-1))
        return jnp.einsum("ebcd,btec->btd", y, combine)


class Mixtral(nn.Module):
    vocab: int = 32
    dim: int = 16

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.dim)(tokens)
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)(nn.RMSNorm()(x), mask=mask)
        x = x + Experts(name="block_sparse_moe")(nn.RMSNorm()(x))
        return nn.Dense(self.vocab, use_bias=False, name="lm_head")(nn.RMSNorm()(x))


def mixtral_loss(model, batch):
    losses = cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])
    (balance,) = jax.tree.leaves(model.sown["intermediates"])
    return losses.sum() + 0.01 * balance.mean() * losses.size, losses.size


EXAMPLES = {
    "maxtext": Example(
        module=MaxText(Config()),
        loss=maxtext_loss,
        batch=tokens,
        inputs=context,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-3, eps=1e-4)),
    ),
    "mixtral": Example(
        module=Mixtral(), loss=mixtral_loss, batch=tokens, inputs=context, optimizer=optax.adam(5e-3, eps=1e-4)
    ),
}
