"""Models that look into their own variables, as their authors write them, and small. None knows of jaxpar.

Normed     linen   `WeightNorm` and `SpectralNorm` around layers, BatchNorm over the devices of a pmap
Tied       linen   a head that takes its table out of `module.variables`, as Flax models of transformers do
Lm1b       linen   annotated `MultiHeadDotProductAttention`: boxes of fewer names than dims
Bridged    linen   an NNX module inside, by `nnx.bridge.to_linen`
Back       nnx     a Linen module inside, by `nnx.bridge.ToNNX`
"""

from typing import Any

import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from published.example import Example, context, digit_loss, image, image_loss, images, language_loss, tokens

VOCAB, EMBED = 32, 16


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = x.reshape(x.shape[0], -1)
        x = nn.WeightNorm(nn.Dense(32))(x)  # its parameter is called "Dense_0/kernel/scale"
        x = nn.relu(nn.BatchNorm(use_running_average=not train, axis_name="batch")(x))
        x = nn.relu(nn.SpectralNorm(nn.Dense(32))(x, update_stats=train))
        return nn.WeightNorm(nn.Dense(10), variable_filter={"kernel", "bias"})(x)


class Embeddings(nn.Module):
    def setup(self):
        self.word_embeddings = nn.Embed(VOCAB, EMBED)
        self.layer_norm = nn.LayerNorm()

    def __call__(self, tokens):
        return self.layer_norm(self.word_embeddings(tokens))


class Transformer(nn.Module):
    def setup(self):
        self.embeddings = Embeddings()
        self.dense = nn.Dense(EMBED)

    def __call__(self, tokens):
        return self.dense(self.embeddings(tokens))


class Tied(nn.Module):
    def setup(self):
        self.transformer = Transformer()
        self.lm_head = nn.Dense(VOCAB, use_bias=False)  # has no parameter of its own
        self.bias = self.param("bias", nn.initializers.zeros, (VOCAB,))

    def __call__(self, tokens):
        hidden = self.transformer(tokens)
        shared = self.transformer.variables["params"]["embeddings"]["word_embeddings"]["embedding"].T
        logits: Any = self.lm_head.apply({"params": {"kernel": shared}}, hidden)
        return logits + self.bias


class Lm1b(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        kernel, bias, table = (
            nn.initializers.xavier_uniform(),
            nn.initializers.normal(1e-6),
            nn.initializers.normal(1.0),
        )
        box = nn.with_logical_partitioning
        x = nn.Embed(VOCAB, EMBED, embedding_init=box(table, ("vocab", "embed")))(tokens)
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4,
            qkv_features=32,
            kernel_init=box(kernel, ("embed", "heads")),  # three dims: the initializer is asked for two
            bias_init=box(bias, ("heads",)),
            use_bias=False,
            deterministic=True,
        )
        x = x + attention(
            nn.LayerNorm(scale_init=box(nn.initializers.ones, ("embed",)))(x), mask=nn.make_causal_mask(tokens)
        )
        y = nn.relu(nn.Dense(32, kernel_init=box(kernel, ("embed", "mlp")), bias_init=box(bias, ("mlp",)))(x))
        x = x + nn.Dense(EMBED, kernel_init=box(kernel, ("mlp", "embed")), bias_init=box(bias, ("embed",)))(y)
        return nn.Dense(VOCAB, kernel_init=box(kernel, ("embed", "vocab")), bias_init=box(bias, ("vocab",)))(x)


class Inner(nnx.Module):
    def __init__(self, into: int, out: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(into, out, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)
        self.norm = nnx.BatchNorm(out, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.linear(x)))


class Bridged(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nnx.bridge.to_linen(Inner, 64, 32)(x.reshape(x.shape[0], -1)))


class Back(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, axis_name="batch", rngs=rngs)
        head = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
        self.head = nnx.bridge.ToNNX(head, rngs=rngs).lazy_init(jnp.zeros([1, 32]))

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.linear(x.reshape(x.shape[0], -1)))))


STEPS, ADAM = optax.sgd(0.1, 0.9), optax.adam(5e-3)
EXAMPLES = {
    "normed": Example(module=Normed(), loss=image_loss, batch=images, inputs=image, optimizer=STEPS),
    "tied": Example(module=Tied(), loss=language_loss, batch=tokens, inputs=context, optimizer=ADAM),
    "lm1b": Example(module=Lm1b(), loss=language_loss, batch=tokens, inputs=context, optimizer=ADAM),
    "bridged": Example(module=Bridged(), loss=digit_loss, batch=images, inputs=image, optimizer=STEPS),
    "back": Example(module=Back, loss=digit_loss, batch=images, optimizer=STEPS),
}
