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
# The eight devices are simulated on one processor. Placements and bytes of state are those of eight real devices, and
# so are the losses, up to rounding. Times would not be: there are none here.

# %%
import jaxpar as jp

jp.simulate(8)  # before anything else uses JAX

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from flax.linen import with_logical_constraint as constrain

# %% [markdown]
# ## The model
#
# Flax can name the dims of a weight (`nnx.with_partitioning`) and of an activation (`with_logical_constraint`). A name
# says what a dim *is*, not where it goes; without a mesh, names do nothing. The model uses both, and no more than that.
#
# Attention is Flax's own layer, given a function that names the dims of queries, keys, values and their result.

# %%
STREAM, HIDDEN = ("batch", "seq", "embed"), ("batch", "seq", "mlp")
HEADS = ("batch", "seq", "heads", "head_dim")


def named(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


def attend(query, key, value, **_):
    query, key, value = (constrain(x, HEADS) for x in (query, key, value))
    return constrain(jax.nn.dot_product_attention(query, key, value, is_causal=True), HEADS)


Attention = partial(nnx.MultiHeadAttention, 4, 128, use_bias=False, decode=False)

# %% [markdown]
# The feed-forward layer. Its learned `gain` is a scalar, which will matter in section 2.


# %%
class FeedForward(nnx.Module):
    def __init__(self, dim, rngs):
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.gain * self.down(constrain(nnx.gelu(self.up(x)), HIDDEN))


# %% [markdown]
# The whole model: a decoder of one block, for 64 tokens, with 4 heads and a stream 128 wide.


# %%
class Model(nnx.Module):
    def __init__(self, *, rngs):
        into, out = named("embed", "heads", "head_dim"), named("heads", "head_dim", "embed")
        self.embed = nnx.Embed(64, 128, embedding_init=named("vocab", "embed"), rngs=rngs)
        self.attention = Attention(kernel_init=into, out_kernel_init=out, attention_fn=attend, rngs=rngs)
        self.mlp, self.norm = FeedForward(128, rngs), nnx.RMSNorm(128, rngs=rngs)
        self.head = nnx.Linear(128, 64, use_bias=False, kernel_init=named("embed", "vocab"), rngs=rngs)

    def stream(self, tokens):
        x = constrain(self.embed(tokens), STREAM)
        x = constrain(x + self.attention(x), STREAM)
        return constrain(x + self.mlp(x), STREAM)

    def __call__(self, tokens):
        return self.head(self.norm(self.stream(tokens)))


# %% [markdown]
# The task: count in steps of 1 to 8, modulo 64. The batch of update `i` depends on `i` alone, so that every run below
# sees the same examples.
#
# A loss function returns a **sum and a count**. The step sums both over devices and microbatches and divides once, so
# the result does not depend on how the batch was cut.


# %%
def loss(model, batch):
    logits = model(batch["inputs"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses), losses.size


def batch(i, examples=16, length=32):
    rng = np.random.default_rng(i)
    start, stride = rng.integers(0, 64, (examples, 1)), rng.integers(1, 9, (examples, 1))
    tokens = ((start + stride * np.arange(length + 1)) % 64).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


# %% [markdown]
# ## 1. One declaration
#
# `Parallel` gives the sizes of the mesh axes: `data` copies the training state, `fsdp` shards it, `tensor` splits each
# matrix. `compose` turns the model's names into a placement of every parameter. Nothing is allocated yet.
#
# **Predict.** Every matrix is cut in 2 by `fsdp` and in 2 by `tensor`, and copied by `data`. Each device holds a quarter
# of 213,121 float32 parameters: 213,121 bytes = 208.1 KiB.

# %%
layout = jp.compose(Model, jp.Parallel(data=2, fsdp=2, tensor=2))
print(layout.explain())

# %% [markdown]
# A layout shows itself, too: the devices, what joins them, and who holds which piece of what.

# %%
layout

# %% [markdown]
# **Explain the gap** of 131 bytes. `tensor` leaves vectors whole: a device holds 64 of the norm's 128 entries instead of
# 32, which is 128 bytes more. The scalar `gain` cannot be cut at all: 4 bytes instead of 1.
#
# ## 2. Bytes per device under ZeRO
#
# **Predict.** $P$ float32 parameters are $4P$ bytes, their gradients $4P$, Adam's two moments $8P$. ZeRO
# ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054)) divides them among $N$ devices, one after the other.
# Between steps jaxpar divides the parameters from stage 1 on, as Megatron-LM's distributed optimizer does: ZeRO-1 and 2
# gather them once for a step, ZeRO-3 a layer at a time.
#
# | | parameters | gradients | Adam |
# |---|---|---|---|
# | DDP | $4P$ | $4P$ | $8P$ |
# | ZeRO-1 | $4P/N$ | $4P$ | $8P/N$ |
# | ZeRO-2 | $4P/N$ | $4P/N$ | $8P/N$ |
# | ZeRO-3 | $4P/N$ | $4P/N$ | $8P/N$ |
#
# **Run.** Create the four states, each born on the devices that keep it.

# %%
adam = optax.adam(5e-3)
stages = {"DDP": jp.Parallel(data=8)} | {f"ZeRO-{zero}": jp.Parallel(fsdp=8, zero=zero) for zero in (1, 2, 3)}
states = {name: jp.init_state(jp.compose(Model, parallel), adam) for name, parallel in stages.items()}


def on_one_device(tree):
    shards = [shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


# %% [markdown]
# **Measure** what device 0 holds, shard by shard. Gradients live only inside a step; they come next.

# %%
P = sum(place.leaf.size for place in layout.placements.values())
paper = {"DDP": (4 * P, 8 * P), "ZeRO-1": (P / 2, P), "ZeRO-2": (P / 2, P), "ZeRO-3": (P / 2, P)}
print(f"{'bytes on device 0':<20}{'predicted':>13}{'measured':>13}{'gap':>8}")
for name, state in states.items():
    found = on_one_device(state.params), on_one_device(state.optimizer)
    for what, predicted, measured in zip(("parameters", "Adam"), paper[name], found, strict=True):
        print(f"{name:<8}{what:<12}{predicted:13,.1f}{measured:13,}{measured - predicted:8.1f}")

# %% [markdown]
# **Explain the gap**, to the byte. Adam counts its updates in an int32 that every device has: 4 bytes. Eight devices
# cannot share the scalar `gain`: it takes 4 bytes instead of 0.5, and its two moments 8 instead of 1.
#
# ZeRO-1 and ZeRO-2 keep the same state between steps. **Predict** the difference inside a step that sums gradients over
# 4 microbatches: the sum takes $4P$ bytes under ZeRO-1 and $4P/8$ under ZeRO-2, so ZeRO-2 saves $3.5P$. **Measure** by
# asking the compiler for the scratch memory of both.

# %%
scratch = []
for name in ("ZeRO-1", "ZeRO-2"):
    step = jp.train_step(jp.compose(Model, stages[name]), loss, adam, accumulate=4)
    compiled = step.lower(states[name], step.put(batch(0, examples=32))).compile()
    scratch.append(compiled.memory_analysis().temp_size_in_bytes)
print(f"scratch memory: ZeRO-1 {scratch[0]:,} bytes, ZeRO-2 {scratch[1]:,} bytes")
print(f"saved: {scratch[0] - scratch[1]:,} bytes, predicted {3.5 * P:,.0f}")

# %% [markdown]
# **Explain the gap.** The compiler plans all scratch memory together, activations included, and lets buffers share
# space; the formula knows only one of them.
#
# ## 3. Where each shard lives
#
# A JAX array knows which device holds which part of it. `draw` makes a picture of that. A box is a shard, at its place
# in the matrix; a disc is a device that holds it. A coloured box exists once, a grey one as often as it has discs.

# %%
plt.rcParams.update({"figure.dpi": 130, "axes.spines.top": False, "axes.spines.right": False})
SHADES = [*plt.cm.Blues([0.95, 0.8, 0.67, 0.54]), *plt.cm.Oranges([0.95, 0.78, 0.64, 0.52])]


def draw(ax, sharding, shape, title):
    holders = {}
    for device, parts in sharding.devices_indices_map(shape).items():
        (top, bottom, _), (left, right, _) = parts[0].indices(shape[0]), parts[1].indices(shape[1])
        holders.setdefault((left, top, right - left, bottom - top), []).append(device.id)
    for (left, top, width, height), ids in holders.items():
        colour = "0.9" if len(ids) > 1 else [*SHADES[ids[0]][:3], 0.3]
        ax.add_patch(plt.Rectangle((left, top), width, height, fc=colour, ec="white", lw=3))
        for i, device in enumerate(ids):
            spot = 23 * (i % 4 - (min(len(ids), 4) - 1) / 2), 23 * ((len(ids) - 1) // 4 / 2 - i // 4)
            look = {"color": "white", "weight": "bold", "ha": "center", "va": "center"}
            look["bbox"] = {"boxstyle": "circle", "fc": SHADES[device], "lw": 0}
            ax.annotate(device, (left + width / 2, top + height / 2), spot, textcoords="offset points", **look)
    ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0), xticks=[], yticks=[], title=title)
    ax.spines[:].set_visible(False)


# %% [markdown]
# **Predict** where eight devices keep the matrix `mlp/up`, with dims `embed` (128, downwards) and `mlp` (512, to the
# right), and where they keep Adam's first moment of it.

# %%
states["2 × 2 × 2"] = jp.init_state(layout, adam)
titles = {"DDP": "data=8", "ZeRO-1": "fsdp=8, zero=1", "ZeRO-3": "fsdp=8, zero=3"}
titles["2 × 2 × 2"] = "data=2, fsdp=2, tensor=2"
figure, rows = plt.subplots(2, 4, figsize=(13, 5.4), layout="constrained")
for row, what in zip(rows, ("weight", "first moment"), strict=True):
    for ax, name in zip(row, titles, strict=True):
        tree = states[name].params if what == "weight" else states[name].optimizer[0].mu
        array = tree["mlp"]["up"]["kernel"]
        draw(ax, array.sharding, array.shape, f"{name}\n{titles[name]}" if what == "weight" else "")
        ax.set_xlabel(f"{on_one_device(array) // 1024} KiB on each device")
    row[0].set_ylabel(what, fontsize=12)
plt.show()

# %% [markdown]
# DDP keeps eight copies of both. ZeRO-1 cuts both along their largest dim, as ZeRO-3 does: between steps they are the same.
# On the right, `tensor` cuts `mlp` because of its name, `fsdp` takes the dim that is left, and `data` makes two
# copies: device 4 holds what device 0 holds.
#
# ## 4. The same losses
#
# The numbers of a new state depend on the seed alone, so runs on different meshes can be compared update by update.


# %%
def train(model, parallel, devices=None, updates=24):
    layout = jp.compose(model, parallel, devices)
    state, step = jp.init_state(layout, adam, seed=0), jp.train_step(layout, loss, adam)
    losses = []
    for i in range(updates):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return np.array(losses, np.float32)


# %% [markdown]
# **Predict.** One device and eight add up the same numbers in another order, so they may differ in the last place of
# float32. For a loss between 4 and 8 that place is worth $2^{-21} = 4.8 \cdot 10^{-7}$, between 1 and 2 a quarter of it.

# %%
one = train(Model, jp.Parallel(), devices=jax.devices()[:1])
eight = train(Model, jp.Parallel(data=2, fsdp=2, tensor=2))
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6), layout="constrained")
left.plot(one, color=SHADES[7], linewidth=7, label="one device")
left.plot(eight, color=SHADES[0], linewidth=1.5, label="eight devices, 2 × 2 × 2")
right.axhspan(-1, 1, color="0.9")
right.plot((eight - one) / np.spacing(one), "o", color=SHADES[0])  # spacing: from one float32 to the next
left.set(title="Loss", xlabel="update", ylabel="nats per token")
left.legend(frameon=False)
right.set(title="Eight devices minus one", xlabel="update", ylabel="units in the last place")
plt.show()
print(f"largest difference: {np.abs(eight - one).max():.1e}")

# %% [markdown]
# **Explain the gap.** A few units in the last place instead of one: a loss is a sum of 512 terms, and the parameters it
# is computed from carry the rounding of all earlier updates.
#
# ### The model back
#
# After training you want your model back. It is plain Flax again: jaxpar leaves nothing in it, and dropout is off.

# %%
layout = jp.compose(Model, jp.Parallel(data=2, fsdp=2, tensor=2))
state, step = jp.init_state(layout, adam), jp.train_step(layout, loss, adam)
for i in range(8):
    state, _ = step(state, batch(i))
model = jp.model(layout, state)  # sharded as in training
alone = jp.model(layout, state, device=jax.devices()[0])  # on one device

# %% [markdown]
# **Predict.** Both have the same parameters, so the same logits for a batch that neither was trained on, up to rounding. Under
# `nnx.jit` the devices split the work of the sharded one.

# %%
tokens = batch(100)["inputs"]
split, whole = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens)), np.asarray(alone(tokens))
shards = (
    model.mlp.up.kernel[...].sharding.shard_shape((128, 512)),
    alone.mlp.up.kernel[...].sharding.shard_shape((128, 512)),
)
print(f"{type(model).__name__}: a device holds {shards[0]} of mlp/up, alone {shards[1]}")
print(f"logits of up to {np.abs(whole).max():.1f} differ by at most {np.abs(split - whole).max():.1e}")
np.testing.assert_allclose(split, whole, atol=1e-4)

# %% [markdown]
# ## 5. Tensor and sequence parallelism
#
# **Predict**, for `data=2, tensor=4`, the collectives that move the stream: 8 examples × 32 tokens × 128 on a device.
# Tensor parallelism ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053)) sums it after attention and after the
# feed-forward, and their gradients likewise: 4 all-reduces. The split vocabulary adds one for the embedding and one for
# the gradient of the head: 6.
#
# Sequence parallelism ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)) splits the stream along `seq` and
# makes each of the 4 a reduce-scatter and an all-gather. The other 2 depend on what the compiler does with a split
# vocabulary and a split `seq`.


# %%
def collectives(parallel):
    layout = jp.compose(Model, parallel)
    step = jp.train_step(layout, loss, adam)
    program = step.lower(jp.init_state(layout, adam), step.put(batch(0))).compile().as_text()
    found = re.findall(r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all)\(", program)
    return dict(Counter(kind for shapes, kind in found if "f32[8,32,128]" in shapes))


tensor, sequence = jp.Parallel(data=2, tensor=4), jp.Parallel(data=2, tensor=4, sequence=True)
print("tensor:             ", collectives(tensor))
print("tensor and sequence:", collectives(sequence))

# %% [markdown]
# **Explain the gap.** XLA's compiler for processors has no reduce-scatter: it writes an all-reduce and keeps a slice. On
# GPUs and TPUs it is one collective, and 4 pairs move as many bytes as 4 all-reduces. At the embedding and the head the
# compiler gathers the weight (64 × 128, not counted here) instead of moving the stream. If a model names only its stream,
# not the dims `mlp` and `heads` of its activations, the compiler does so with every weight: tensor parallelism is gone.
#
# What sequence parallelism saves is memory. **Predict**: on a device, the stream takes $8 \cdot 32 \cdot 128 \cdot 4$
# bytes = 128 KiB under `tensor=4`, and a quarter of that with `sequence=True`. **Measure** with a loss function that
# looks at the stream.


# %%
def look(model, batch):
    x = model.stream(batch["inputs"])
    jax.debug.inspect_array_sharding(x, callback=lambda sharding: seen.append((sharding, x.shape)))
    return jnp.sum(x), x.size


seen = []
for parallel in (tensor, sequence):
    layout = jp.compose(Model, parallel)
    jp.train_step(layout, look, adam).evaluate(jp.init_state(layout, adam), batch(0))

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for ax, declared, (sharding, shape) in zip(axes, ("tensor=4", "tensor=4, sequence=True"), seen, strict=True):
    size = 4 * np.prod(sharding.shard_shape(shape)) / 1024
    draw(ax, sharding, shape, f"data=2, {declared}\n{size:.0f} KiB on each device")
    ax.set(xlabel=f"seq ({shape[1]})", ylabel=f"batch ({shape[0]})")
plt.show()

# %% [markdown]
# ## 6. A model without names
#
# A decoder as one writes it before thinking of devices. **Predict** what jaxpar can know of it: some parameters have the
# paths that they usually have in Flax; for the others there is only their shape.


# %%
class Bare(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(64, 128, rngs=rngs)
        self.attention = Attention(rngs=rngs)
        self.mlp, self.head = nnx.Linear(128, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.head(x + nnx.gelu(self.mlp(x)))


print(jp.compose(Bare, jp.Parallel(data=2, fsdp=2, tensor=2)).explain())

# %% [markdown]
# The last column says which is which. `no names: largest dim` is a guess: it changes what travels between devices, not
# what is computed. `paths` names the dims of a parameter from outside of the model; `rules` says where a name goes. Here
# `mlp` gets its names, and the vocabulary stays whole: 64 tokens are too few to be worth splitting.

# %%
declared = jp.Parallel(data=2, fsdp=2, tensor=2, paths={"mlp/kernel": ["embed", "mlp"]}, rules={"vocab": None})
layout = jp.compose(Bare, declared)
for path in ("mlp/kernel", "embed/embedding"):
    print(f"{path:<16} {layout.describe(path)}")
gap = train(Bare, declared) - train(Bare, jp.Parallel(), devices=jax.devices()[:1])
print(f"losses on 2 × 2 × 2 and on one device differ by at most {np.abs(gap).max():.1e}")

# %% [markdown]
# ## 7. A wrong declaration
#
# Eight devices cannot share four heads, and `tenser` is a slip of the fingers. **Predict** which of the two you will be
# told about.

# %%
try:
    jp.compose(Model, jp.Parallel(tensor=8, rules={"mlp": "tenser"}))
except jp.JaxparError as error:
    print(error)

# %% [markdown]
# Both, for every parameter concerned, each with the rule it breaks and what to type instead, before anything is allocated.
#
# ## What to try next
#
# * Another mesh: `jp.Parallel(fsdp=4, tensor=2)`, or one size as `-1`. Which boxes of section 3 change?
# * A bigger model on devices you do not have: `jp.compose(Model, parallel, devices=64)` can be explained, not trained.
# * `jp.train_step(..., accumulate=4, precision="bf16", remat="full")`: which of the losses in section 4 stay the same?
# * Your own model and loss in place of `Model` and `loss`.
