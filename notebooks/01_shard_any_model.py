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
# # Shard any model
#
# A Flax NNX model that knows nothing of jaxpar is trained on eight devices: replicated, with ZeRO stages 1 to 3, and
# with tensor and sequence parallelism. Each section predicts a number on paper, runs, measures, and explains the gap.
#
# The eight devices are simulated on one processor. Bytes, placements, collectives and losses are what eight real
# devices would have; times are not, so there are none here.

# %%
import jaxpar as jp

jp.simulate(8)  # before anything else uses JAX

import re
from collections import Counter
import jax, jax.numpy as jnp, matplotlib.pyplot as plt, numpy as np, optax
from flax import nnx
from flax.linen import with_logical_constraint as constrain

# %% [markdown]
# ## The model
#
# Flax can name the dims of a weight (`nnx.with_partitioning`) and of an activation (`with_logical_constraint`). A name
# says what a dim *is*, not where it goes; without a mesh, names do nothing. This is all the model below uses.


# %%
def named(*names):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return {"kernel_init": init, "use_bias": False}


STREAM = ("batch", "seq", "embed")
HIDDEN = ("batch", "seq", "mlp")
HEADS = ("batch", "seq", "heads", "head_dim")

# %% [markdown]
# A decoder of one block. First the feed-forward layer; its learned `gain` is a scalar, which will matter in section 2.


# %%
class FeedForward(nnx.Module):
    def __init__(self, dim, rngs):
        self.norm, self.gain = nnx.RMSNorm(dim, rngs=rngs), nnx.Param(jnp.ones(()))
        self.up = nnx.Linear(dim, 4 * dim, **named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, **named("mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        hidden = constrain(nnx.gelu(self.up(self.norm(x))), HIDDEN)
        return constrain(x + self.gain * self.down(hidden), STREAM)


# %% [markdown]
# Causal attention. Everything that has a dim `heads` says so: three weights in, one out, and the activations between.


# %%
class Attention(nnx.Module):
    def __init__(self, dim, heads, rngs):
        shape, into, out = (heads, dim // heads), named("embed", *HEADS[2:]), named(*HEADS[2:], "embed")
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.query, self.key, self.value = (nnx.LinearGeneral(dim, shape, **into, rngs=rngs) for _ in range(3))
        self.out = nnx.LinearGeneral(shape, dim, axis=(-2, -1), **out, rngs=rngs)

    def __call__(self, x):
        q, k, v = (constrain(f(self.norm(x)), HEADS) for f in (self.query, self.key, self.value))
        y = constrain(jax.nn.dot_product_attention(q, k, v, is_causal=True), HEADS)
        return constrain(x + self.out(y), STREAM)


# %% [markdown]
# The whole model, and a loss. A loss function returns a **sum and a count**: the step divides once, after it has summed
# over devices and microbatches, so that the result cannot depend on how the batch was cut.


# %%
class Model(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(1.0), ("vocab", "embed"))
        self.embed = nnx.Embed(64, 128, embedding_init=init, rngs=rngs)
        self.attention, self.mlp = Attention(128, 4, rngs), FeedForward(128, rngs)
        self.head = nnx.Linear(128, 64, **named("embed", "vocab"), rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.mlp(self.attention(self.embed(tokens))))


# %% [markdown]
# The task: count in steps of 1 to 8, modulo 64. After the first token the step is unknown; after the second the rest
# follows. The batch of update `i` depends on `i` alone, so that every run below sees the same examples.


# %%
def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return jnp.sum(losses), losses.size


def batch(i, examples=16, length=32):
    start, stride = np.random.default_rng(i).integers([[0, 1]], [[64, 9]], (examples, 2)).T[..., None]
    tokens = (start + stride * np.arange(length + 1)) % 64
    return {"inputs": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


# %% [markdown]
# ## 1. One declaration
#
# `Parallel` gives the sizes of the mesh axes: `data` copies the training state, `fsdp` shards it, `tensor` splits each
# matrix. `compose` resolves the model's names into a placement of every array. Nothing is allocated yet.
#
# **Predict.** Every matrix is cut in 2 by `fsdp` and in 2 by `tensor`, and copied by `data`. So each device holds a
# quarter of the 213,249 parameters, in float32: 213,249 bytes = 208.3 KiB.

# %%
layout = jp.compose(Model, jp.Parallel(data=2, fsdp=2, tensor=2))
print(layout.explain())

# %% [markdown]
# **Explain the gap.** A few hundred bytes more than a quarter. The two norms are vectors, which `tensor` leaves whole: 128 of
# their entries stand where a quarter would be 64. The scalar `gain` cannot be cut at all.
#
# ## 2. Bytes per device under ZeRO
#
# Adam keeps two moments, so with $P$ parameters in float32 there are $4P$ bytes of parameters, $4P$ of gradients and
# $8P$ of optimizer state. **Predict**, with $N = 8$ devices ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)):
#
# | | parameters | gradients | Adam |
# |---|---|---|---|
# | DDP | $4P$ | $4P$ | $8P$ |
# | ZeRO-1 | $4P$ | $4P$ | $8P/N$ |
# | ZeRO-2 | $4P$ | $4P/N$ | $8P/N$ |
# | ZeRO-3 | $4P/N$ | $4P/N$ | $8P/N$ |
#
# Gradients live only inside a step; parameters and optimizer state stay. **Run**: create the four states.

# %%
adam = optax.adam(3e-3)
stages = {"DDP": jp.Parallel(data=8)} | {f"ZeRO-{zero}": jp.Parallel(fsdp=8, zero=zero) for zero in (1, 2, 3)}
states = {name: jp.create(jp.compose(Model, parallel), adam) for name, parallel in stages.items()}


def on_one_device(tree, device=jax.devices()[0]):
    shards = [shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


# %% [markdown]
# **Measure** what device 0 holds, shard by shard.

# %%
P = sum(array.size for array in jax.tree.leaves(layout.params))
print(f"{P:,} parameters; bytes on device 0, predicted and measured")
for name, state in states.items():
    params = 4 * P / (8 if name == "ZeRO-3" else 1), on_one_device(state.params)
    moments = 8 * P / (1 if name == "DDP" else 8), on_one_device(state.optimizer)
    show = "{0:11,.1f} {1:9,} ({2:+.1f})".format
    print(f"{name:7} parameters {show(*params, params[1] - params[0])}", end="   ")
    print(f"Adam {show(*moments, moments[1] - moments[0])}")

# %% [markdown]
# **Explain the gap**, to the byte. Adam counts its updates in one int32: 4 bytes everywhere. The scalar `gain` stays
# whole, and so do its two moments: where $P$ is divided by 8, it weighs 4 instead of 0.5 bytes (3.5 more), its moments 8
# instead of 1 (7 more). On a large model the formulas are exact for all purposes.
#
# ZeRO-1 and ZeRO-2 keep the same state; they differ inside the step. **Predict**: when microbatches are summed, the sum
# of gradients needs $4P$ bytes under ZeRO-1 and $4P/8$ under ZeRO-2, so ZeRO-2 saves $3.5P$. **Measure**: ask the compiler.

# %%
scratch = {}
for name in ("ZeRO-1", "ZeRO-2"):
    step = jp.build(jp.compose(Model, stages[name]), loss, adam, accumulate=4)
    compiled = step.lower(states[name], batch(0, examples=32)).compile()
    scratch[name] = compiled.memory_analysis().temp_size_in_bytes
print(f"scratch memory of a step: {scratch}")
print(f"saved: {scratch['ZeRO-1'] - scratch['ZeRO-2']:,} bytes, predicted {3.5 * P:,.0f}")

# %% [markdown]
# **Explain the gap.** The compiler plans all scratch memory at once, activations included, and lets buffers share space;
# the formula counts one of them.
#
# ## 3. Where each shard lives
#
# A JAX array knows which device holds which part of it. `draw` makes one picture of that: a box is a shard, at its place
# in the matrix; a disc is a device that holds it. Two discs in a box are two copies.


# %%
SHADES = [*plt.cm.Blues([0.95, 0.8, 0.67, 0.54]), *plt.cm.Oranges([0.95, 0.78, 0.64, 0.52])]


def draw(ax, sharding, shape, title):
    holders = {}
    for device, parts in sharding.devices_indices_map(shape).items():
        box = tuple(part.indices(size)[:2] for part, size in zip(parts[:2], shape))  # noqa: B905
        holders.setdefault(box, []).append(device.id)
    for ((top, bottom), (left, right)), ids in holders.items():
        ax.add_patch(plt.Rectangle((left, top), right - left, bottom - top, fc="0.95", ec="0.35"))
        wide = min(len(ids), 4)
        high = -(-len(ids) // wide)
        for i, device in enumerate(ids):
            x, y = left + (right - left) * (i % wide + 0.5) / wide, top + (bottom - top) * (i // wide + 0.5) / high
            disc = {"boxstyle": "circle", "fc": SHADES[device], "lw": 0}
            ax.text(x, y, device, color="white", ha="center", va="center", weight="bold", bbox=disc)
    ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=(0, shape[1]), yticks=(0, shape[0]))
    ax.set_title(title, fontsize=11)


# %% [markdown]
# The weight `mlp/up`, dims `embed` (128, down) and `mlp` (512, across), and Adam's first moment of it. **Predict** the
# four columns before you look: who has copies, and of what?

# %%
states["data 2 × fsdp 2 × tensor 2"] = jp.create(layout, adam)
shown = {name: states[name] for name in ("DDP", "ZeRO-1", "ZeRO-3", "data 2 × fsdp 2 × tensor 2")}
figure, axes = plt.subplots(2, 4, figsize=(14, 5.4), layout="constrained")
for column, (name, state) in zip(axes.T, shown.items(), strict=True):
    for ax, tree, what in zip(column, (state.params, state.optimizer[0].mu), ("weight", "moment"), strict=True):
        array = tree["mlp"]["up"]["kernel"]
        draw(ax, array.sharding, array.shape, f"{name}: {what}")
plt.show()

# %% [markdown]
# DDP keeps eight copies of everything. ZeRO-1 cuts the moment along its largest dim and keeps the weight; ZeRO-3 cuts both.
# On the right, `tensor` cuts `mlp` because of its name, `fsdp` takes the dim that is left, and `data` makes the copies:
# device 4 holds what device 0 holds.
#
# ## 4. The same losses
#
# **Predict.** One device and eight compute the same sums in another order. Float32 keeps about seven digits, so the
# losses agree to about $10^{-6}$, and no more than that.


# %%
def train(model, parallel, devices=None, updates=24):
    layout = jp.compose(model, parallel, devices)
    state, step = jp.create(layout, adam, seed=0), jp.build(layout, loss, adam)
    losses = []
    for i in range(updates):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


# %%
one = train(Model, jp.Parallel(), devices=jax.devices()[:1])
eight = train(Model, jp.Parallel(data=2, fsdp=2, tensor=2))
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
left.plot(one, color=SHADES[7], lw=6, label="one device")
left.plot(eight, color=SHADES[0], lw=1.5, label="2 × 2 × 2")
left.set(title="loss per token (nats)", xlabel="update")
left.legend(frameon=False)
right.stem(eight - one)
plt.show()

# %% [markdown]
# ## 5. Tensor and sequence parallelism
#
# **Predict.**

# %%
def collectives(parallel):
    layout = jp.compose(Model, parallel)
    step = jp.build(layout, loss, adam)
    text = step.lower(jp.create(layout, adam), batch(0)).compile().as_text()
    found = re.findall(r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all)\(", text)
    return Counter(kind for shapes, kind in found if "f32[8,32,128]" in shapes)


tensor, sequence = jp.Parallel(data=2, tensor=4), jp.Parallel(data=2, tensor=4, sequence=True)
print("tensor:             ", dict(collectives(tensor)))
print("tensor and sequence:", dict(collectives(sequence)))

# %%
def after_attention(model, batch):
    x = model.attention(model.embed(batch["inputs"]))
    jax.debug.inspect_array_sharding(x, callback=lambda sharding: seen.append((sharding, x.shape)))
    return jnp.sum(x), x.size

seen=[]
for parallel in (tensor, sequence):
    layout = jp.compose(Model, parallel)
    jp.build(layout, after_attention, adam).evaluate(jp.create(layout, adam), batch(0))
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for ax, title, (sharding, shape) in zip(axes, ("tensor=4", "tensor=4, sequence=True"), seen):
    draw(ax, sharding, shape, title)
plt.show()

# %%
class Bare(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(64, 128, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 128, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(128, 128, rngs=rngs)
        self.head = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.head(x + nnx.gelu(self.mlp(x)))

print(jp.compose(Bare, jp.Parallel(data=2, fsdp=2, tensor=2)).explain())
# %%
paths={r"head/kernel": ["embed", "vocab"]}
eight = train(Bare, jp.Parallel(data=2, fsdp=2, tensor=2))
one = train(Bare, jp.Parallel(), devices=jax.devices()[:1])
print(np.abs(eight-one).max())
eight = train(Bare, jp.Parallel(data=2, fsdp=2, tensor=2,paths=paths))
print(np.abs(eight-one).max())
print(jp.compose(Bare, jp.Parallel(data=2, fsdp=2, tensor=2,paths=paths)).explain())
# %%
try:
    jp.compose(Model, jp.Parallel(tensor=8))
except jp.JaxparError as error:
    print(error)
try:
    jp.compose(Model, jp.Parallel(tensor=8, rules={"head":"tensor","mpl":"tenor"}))
except jp.JaxparError as error:
    print(error)
