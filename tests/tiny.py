"""Tiny language models that between them hold what makes parity hard, and one way to train them.

annotated  NNX, logical names, layers stacked and scanned, dropout, tied embedding
bare       NNX without a name, Flax's own attention, BatchNorm, a parameter no axis divides
linen      Linen, boxes on some parameters, nn.scan with nn.remat, dropout, BatchNorm
Staged     NNX, a scan of its own and the one line that lets a pipeline cut it; apart from the three
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp

VOCAB, DIM, HIDDEN, SEQ, BATCH = 32, 16, 32, 8, 16


def named(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(DIM, HIDDEN, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Annotated(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.blocks = stack(rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
        @nnx.remat
        def layers(x, block):
            return jp.constrain(block(x), "batch", "seq", "embed")

        return self.embed.attend(self.dropout(layers(self.embed(tokens), self.blocks)))


def stack(rngs, layers=2, make=Block):
    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def made(rngs):
        return make(rngs)

    return made(rngs)


def scanned(body, carry, *each):
    """Returns the carry after `body(carry, *one of each)` for all layers of a stack."""
    axes = (nnx.Carry, *(0 for _ in each))
    scan = nnx.scan(in_axes=axes, out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
    return scan(body)(carry, *each)


class Lean(nnx.Module):
    """The least a layer can be, for programs with many copies of it."""

    def __init__(self, rngs, dim=DIM, hidden=HIDDEN):
        self.up = nnx.Linear(dim, hidden, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(hidden, dim, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Staged(nnx.Module):
    def __init__(self, rngs, *, layers=8, tied=True, rate=0.0, vocab=VOCAB, dim=DIM, hidden=HIDDEN):
        self.deterministic, self.count, self.rate = False, layers, rate
        self.embed = nnx.Embed(vocab, dim, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.blocks = stack(rngs, layers, lambda rngs: Lean(rngs, dim, hidden))
        self.head = None if tied else nnx.Linear(dim, vocab, kernel_init=named("embed", "vocab"), rngs=rngs)
        self.keys = nnx.Rngs(dropout=rngs.dropout()) if rate else None

    def __call__(self, tokens):
        keys = None
        if self.keys is not None and not self.deterministic:
            keys = jax.random.split(self.keys.dropout(), self.count)
        x = jp.pipelined(self.layers, self.embed(tokens), keys)
        return self.embed.attend(x) if self.head is None else self.head(x)

    def layers(self, x, keys):
        def layer(x, block, *key):
            y = block(x)
            for one in key:
                y = jnp.where(jax.random.bernoulli(one, 1 - self.rate, y.shape), y / (1 - self.rate), 0).astype(y.dtype)
            return jp.constrain(y, "batch", "seq", "embed")

        return scanned(layer, x, self.blocks, *(() if keys is None else (keys,)))


class Bare(nnx.Module):
    def __init__(self, rngs):
        self.token_embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, DIM, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.mix = nnx.Param(jnp.linspace(0.9, 1.1, 3))  # three numbers: no axis of two divides them
        self.logits = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.token_embed(tokens)
        x = x + self.attention(self.norm(x)) * self.mix[...].sum()
        return self.logits(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        box = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        y = nn.Dense(HIDDEN, kernel_init=box, name="up")(nn.LayerNorm()(x))
        y = nn.with_logical_constraint(y, ("batch", "seq", "mlp"))
        y = nn.Dense(DIM, name="down")(nn.gelu(y))
        return x + nn.Dropout(0.1, deterministic=not train)(y), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Embed(VOCAB, DIM, name="token_embed")(tokens)
        layers = nn.scan(
            nn.remat(LinenBlock, static_argnums=(2,)),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="blocks")(x, train)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(VOCAB, name="logits")(x)


def token_loss(model, batch):
    """Masked, so that means of means would show."""
    train = {"train": model.training} if hasattr(model, "module") else {}  # Linen is told; NNX modules know
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"], **train), batch["targets"])
    return {"loss": (jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))}


def models():
    return {
        "annotated": Annotated,
        "bare": Bare,
        "linen": jp.from_linen(Linen(), jax.ShapeDtypeStruct((2, SEQ), jnp.int32)),
    }


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
        mask = (rng.random((BATCH, SEQ)) < np.linspace(0.2, 1, BATCH)[:, None]).astype(np.float32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def optimizer():
    # Adam divides by the root of the mean square: with its usual eps of 1e-8 a gradient that is rounding noise
    # (a key bias, which softmax ignores) makes a step of full size in a random direction, on any layout.
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4, weight_decay=1e-2))


def train(model, parallel, devices=None, *, steps=5, chain=None, loss=token_loss, data=batches, **numerics):
    """Returns (losses, state, step) after some steps."""
    chain = chain or optimizer()
    layout = jp.compose(model, parallel, devices)
    state = jp.init_state(layout, chain, seed=1, offload=numerics.get("offload", False))
    step = jp.train_step(layout, loss, chain, **numerics)
    losses = []
    for batch in data(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state, step


def trace(model, parallel, devices=None, *, chain=None, loss=token_loss, **numerics):
    """Traces a step and compiles nothing: for what is refused before a step runs."""
    step = jp.train_step(jp.compose(model, parallel, devices), loss, chain or optimizer(), **numerics)
    step.lower(step.abstract(), next(batches(1)))


def on_one_device(model, **settings):
    return train(model, jp.Parallel(), jax.devices()[:1], **settings)


def assert_same_arrays(got, want, tolerance=1e-5):
    """Every array of two trees is equal to a relative and absolute tolerance; keys by their bits."""
    flat, tree = jax.tree.flatten(jax.device_get(jax.tree.map(_bits, got)))
    other, expected = jax.tree.flatten(jax.device_get(jax.tree.map(_bits, want)))
    assert tree == expected
    for a, b in zip(flat, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def _bits(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
