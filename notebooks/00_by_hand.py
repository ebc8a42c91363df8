# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # By hand
#
# The whole of a sharded training step in raw JAX: eight devices as two replicas, of two shards of the state each, of two
# pieces of every matrix (data 2 × fsdp 2 × tensor 2). Every collective is written where it happens. Beside it the same model
# with one line of jaxpar, and the same losses.
#
# The devices are simulated on one processor: placements, bytes and losses are those of eight real ones. There are no times here.

# %%
import jaxpar as jp

jp.simulate(8)  # before anything else uses JAX

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# %% [markdown]
# ## 1. A model on one device
#
# A decoder that reads bytes, of two layers. All its weights are six arrays; those of the layers are stacked, `[layer, ...]`.

# %%
VOCAB, DIM, HEADS, HIDDEN, LAYERS, SEQ, BATCH = 256, 64, 4, 256, 2, 64, 16
SHAPES = {
    "embed": (VOCAB, DIM),
    "qkv": (LAYERS, DIM, 3, HEADS, DIM // HEADS),
    "out": (LAYERS, HEADS, DIM // HEADS, DIM),
    "up": (LAYERS, DIM, HIDDEN),
    "down": (LAYERS, HIDDEN, DIM),
    "head": (DIM, VOCAB),
}


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attend(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


# %%
class Model(nnx.Module):
    def __init__(self, rngs):
        for name, shape in SHAPES.items():
            setattr(self, name, nnx.Param(0.05 * jax.random.normal(rngs.params(), shape)))

    def __call__(self, tokens):
        x = self.embed[tokens]
        for i in range(LAYERS):
            query, key, value = jnp.einsum("bsd,dcnh->cbsnh", norm(x), self.qkv[i])
            x = x + jnp.einsum("bsnh,nhd->bsd", attend(query, key, value), self.out[i])
            x = x + nnx.gelu(norm(x) @ self.up[i]) @ self.down[i]
        return norm(x) @ self.head[...]


# %% [markdown]
# ## 2. Who holds what
#
# A mesh gives each device a place on three axes. A `PartitionSpec` says for each dim of an array along which axis it is cut.
#
# * `tensor` cuts heads, hidden units and the vocabulary: what a matrix multiplication can be cut in without a word between
#   devices ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053)).
# * `fsdp` cuts the other dim, only for storage: whoever needs a matrix gathers it first
#   ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), stage 3).
# * `data` cuts nothing of the state: two copies. The batch is cut over `data` and `fsdp`.

# %%
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
SPECS = {
    "embed": P(None, "fsdp"),
    "qkv": P(None, "fsdp", None, "tensor"),
    "out": P(None, "tensor", None, "fsdp"),
    "up": P(None, "fsdp", "tensor"),
    "down": P(None, "tensor", "fsdp"),
    "head": P("fsdp", "tensor"),
}
ROWS = P(("data", "fsdp"))  # of the batch
WHERE = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

# %% [markdown]
# ## 3. Forward
#
# Inside `shard_map` a function sees the pieces of one device, and talks to others in words of its own. Three of them:
#
# * `all_gather` over `fsdp`, before a matrix is used. Its transpose, in the backward pass, is a `psum_scatter`: gradients are
#   summed over the devices that saw other examples, and each keeps its shard. Nobody has to write that.
# * `psum` over `tensor`, after the second matrix of a pair: each device has multiplied its heads, or its hidden units, and the
#   sum over all of them is the result. Backward, the same is done before the first matrix; JAX puts it there, because `x` is
#   the same on both devices and its gradient has to be.
# * `psum` over `data` for gradients of what is copied: JAX puts it there for the same reason.


# %%
def whole(weight, dim):
    return lax.all_gather(weight, "fsdp", axis=dim, tiled=True)


def forward(weights, tokens):
    """Returns logits of this device's examples and its half of the vocabulary. Shape [batch / 4, seq, vocab / 2]."""
    x = whole(weights["embed"], 1)[tokens]
    for i in range(LAYERS):
        query, key, value = jnp.einsum("bsd,dcnh->cbsnh", norm(x), whole(weights["qkv"][i], 0))
        part = jnp.einsum("bsnh,nhd->bsd", attend(query, key, value), whole(weights["out"][i], 2))
        x = x + lax.psum(part, "tensor")
        part = nnx.gelu(norm(x) @ whole(weights["up"][i], 0)) @ whole(weights["down"][i], 1)
        x = x + lax.psum(part, "tensor")
    return norm(x) @ whole(weights["head"], 0)


# %% [markdown]
# ## 4. Loss
#
# No device has all logits of a token. The log of a sum over the vocabulary is a `psum` of two halves; for the sake of small
# numbers the largest logit is taken off first. The logit of the target is on one of both devices; the other one adds 0.


# %%
def loss_of(weights, batch):
    logits = forward(weights, batch["inputs"])
    half = VOCAB // 2
    largest = lax.pmax(lax.stop_gradient(logits).max(-1), "tensor")
    total = lax.psum(jnp.exp(logits - largest[..., None]).sum(-1), "tensor")
    at = batch["targets"] - lax.axis_index("tensor") * half
    own = jnp.take_along_axis(logits, jnp.clip(at, 0, half - 1)[..., None], axis=-1)[..., 0]
    target = lax.psum(jnp.where((at >= 0) & (at < half), own, 0.0), "tensor")
    losses = jnp.log(total) + largest - target
    return lax.psum(losses.sum(), ("data", "fsdp")) / (BATCH * SEQ)


# %% [markdown]
# ## 5. Update
#
# Adam ([Kingma, Ba 2015](https://arxiv.org/abs/1412.6980)) works on each number by itself, so each device updates its shards and
# nobody sends anything. Its two moments lie where their weights lie. The step is one program: donated buffers are reused.

# %%
RATE, B1, B2, EPS = 3e-3, 0.9, 0.999, 1e-8


def update(weights, first, second, number, batch):
    loss, grads = jax.value_and_grad(loss_of)(weights, batch)
    first = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, first, grads)
    second = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, second, grads)
    up, down = 1 / (1 - B1**number), 1 / (1 - B2**number)
    weights = jax.tree.map(lambda w, m, v: w - RATE * (m * up) / (jnp.sqrt(v * down) + EPS), weights, first, second)
    return weights, first, second, number + 1, loss


shards = (SPECS, SPECS, SPECS, P())
mapped = jax.shard_map(
    update, mesh=mesh, in_specs=(*shards, {"inputs": ROWS, "targets": ROWS}), out_specs=(*shards, P())
)
by_hand = jax.jit(mapped, donate_argnums=(0, 1, 2, 3))

# %% [markdown]
# ## 6. The same with jaxpar
#
# Names say what the dims of a weight are; `Parallel` says how many devices each axis has. Which dim goes where, what is
# gathered and summed, and when, follows.

# %%
names = {
    "embed": (None, "embed"), "qkv": (None, "embed", None, "heads", None), "out": (None, "heads", None, "embed"),
    "up": (None, "embed", "mlp"), "down": (None, "mlp", "embed"), "head": ("embed", "vocab"),
}  # fmt: skip
layout = jp.compose(Model, jp.Parallel(data=2, fsdp=2, tensor=2, paths=names))
optimizer = optax.adam(RATE)
state = jp.init_state(layout, optimizer, seed=0)
step = jp.train_step(layout, jp.next_token_loss, optimizer)
layout

# %% [markdown]
# **Predict.** A quarter of each weight is on each device, by hand as with jaxpar.

# %%
weights = {name: jax.device_put(np.asarray(state.params[name]), WHERE[name]) for name in SHAPES}


def on_one_device(tree):
    shards = [shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


quarter = sum(4 * np.prod(shape) for shape in SHAPES.values()) / 4
print(f"predicted {quarter:,.0f} bytes, by hand {on_one_device(weights):,}, jaxpar {on_one_device(state.params):,}")

# %% [markdown]
# **Explain the gap** of 16,384 bytes: `embed` is cut by `fsdp` alone, by hand and by name, so that a token can be looked up without a
# word to the other device of `tensor`. A quarter of it would be 16 KiB, a half is 32 KiB.
#
# ## 7. The same losses
#
# **Predict.** Both add up the same numbers in another order: losses agree to the last digits of a float32, about $10^{-7}$ of
# their size at first. Each step moves the weights by as much, so that differences grow, slowly.

# %%
text = jp.open_data(jp.Data(seq=SEQ))  # the source code of this Python, byte by byte
zeros = {name: jnp.zeros(shape, device=WHERE[name]) for name, shape in SHAPES.items()}
held = (weights, zeros, jax.tree.map(jnp.copy, zeros), jnp.ones(()))
mine, theirs = [], []
for i in range(40):
    batch = text.batch(i, BATCH)
    *held, loss = by_hand(*held, batch)
    state, metrics = step(state, batch)
    mine.append(float(loss))
    theirs.append(float(metrics["loss"]))
mine, theirs = np.array(mine), np.array(theirs)
apart = np.abs(mine / theirs - 1)
print(f"loss {mine[0]:.4f} ... {mine[-1]:.4f} by hand, {theirs[0]:.4f} ... {theirs[-1]:.4f} with jaxpar")
print(f"they differ by {apart.max():.1e} of their size at most")
assert apart.max() < 1e-5

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4.2), sharex=True, height_ratios=[2, 1], layout="constrained")
above.plot(theirs, lw=5, alpha=0.3, label="jaxpar")
above.plot(mine, lw=1.2, color="black", label="by hand")
above.set_ylabel("loss")
above.legend(frameon=False)
below.semilogy(np.maximum(apart, 1e-9), ".", color="black")
below.set(ylabel="difference\n(0 at 1e-9)", xlabel="step", ylim=(5e-10, 1e-4))
for ax in (above, below):
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# As predicted.
#
# ## 8. The same collectives
#
# `jp.inspect` reads any compiled program. **Predict** what a device sends by hand, in a step. Over `fsdp`: its 144 KiB of shards, once, when
# the other one gathers; and as many bytes of gradients, when they are summed and scattered. Over `tensor`: a sum of
# `[4, 64, 64]` float32, 64 KiB, after attention and after the feed-forward layer of both layers, forward and backward; and one before the head,
# backward: 9 in all, 576 KiB.

# %%
examples = {name: jax.device_put(value, NamedSharding(mesh, ROWS)) for name, value in batch.items()}
both = {"by hand": jp.inspect(by_hand, *held, examples), "jaxpar": jp.inspect(step, batch)}
print(f"{'':<10}{'over':<14}{'collective':<16}{'times':>6}{'KiB sent':>10}")
for name, report in both.items():
    kinds = dict.fromkeys(sorted((entry.axes, entry.kind) for entry in report.ledger))
    for axes, kind in kinds:
        same = [entry for entry in report.ledger if (entry.axes, entry.kind) == (axes, kind)]
        times, sent = sum(entry.times for entry in same), sum(entry.step_wire for entry in same)
        print(f"{name:<10}{' x '.join(axes):<14}{kind:<16}{times:>6}{sent / 1024:>10.1f}")

# %% [markdown]
# As predicted, and 3 KiB for the log of the sum over the vocabulary. jaxpar's program gathers the same 144 KiB, and sends the same over `tensor`.
#
# **Explain the gap** in the gradients. By hand they are summed over `data` whole, 288 KiB, and then scattered over `fsdp`: JAX sums where
# the copy was made, and that is before the gather. jaxpar scatters first, and sums shards: half the bytes where it matters most, between
# nodes. Its sums over `fsdp` say all-reduce, because XLA for a processor has no reduce-scatter of its own accord; for GPUs it has.
#
# ## What to try next
#
# * `jp.Parallel(fsdp=8, zero=1)` in section 6 is one line. What would have to change in sections 2 to 5?
# * Change section 3 so that gradients are scattered before they are summed over `data`. (`lax.pcast` says where a copy is made.)
# * Leave out the `psum` of the attention in section 3. Does anybody complain? What does the loss do?
# * Write a pipeline of two stages by hand; then read [Pipelines](03_pipelines.ipynb).
