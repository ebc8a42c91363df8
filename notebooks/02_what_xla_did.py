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
# # What XLA did
#
# A declaration sets where arrays live; XLA decides what is sent, when, and what is kept. Here its GPU compiler is used,
# for H100s that are absent: each section predicts a number on paper, compiles, reads it, and explains the gap.
#
# Nothing is run. Sizes, counts and bytes are those of the compiled program. Times are **modelled**: a formula applied to
# that program, measured by nobody. The compiler is in `pip install 'jaxpar[gpu-plan]'`, and needs no GPU and no CUDA.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpar as jp

# %% [markdown]
# A small decoder of Llama's kind: a vocabulary of 1,280, sequences of 96, 4 layers that `scan` runs as one, a stream 256
# wide, 8 heads, a feed-forward 512 wide. `inspect` takes a step and the shapes of a batch, and returns a report.

# %%
V, S, L, D, H, B = 1280, 96, 4, 256, 512, 16
SMALL = jp.DecoderConfig(vocab=V, seq=S, layers=L, dim=D, heads=8, hidden=H)


def look(parallel, gpus="h100:1x8", settings=SMALL, model=jp.Decoder, examples=B, **numerics):
    layout = jp.compose(partial(model, settings), parallel, jp.target_devices(gpus))
    step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3), **numerics)
    tokens = jax.ShapeDtypeStruct((examples, settings.seq), jnp.int32)
    return jp.inspect(step, {"inputs": tokens, "targets": tokens})


# %% [markdown]
# ## 1. What data parallelism sends
#
# **Predict.** A layer has four matrices of attention, $D \times D$; three of the feed-forward, $D \times H$; two norms.
# Outside are embedding, head and a norm. Each device makes a gradient of all $P$ parameters from its own examples, and
# an all-reduce adds them up: $4P$ bytes of float32.

# %%
layer = 4 * D * D + 3 * D * H + 2 * D
P = L * layer + 2 * V * D + D


def compare(report, **predicted):
    for kind in sorted({entry.kind for entry in report.ledger}):
        paper = predicted.get(kind.replace("-", "_"), 0)
        got = sum(entry.step_payload for entry in report.ledger if entry.kind == kind)
        print(f"{kind:<16} predicted {paper:>12,}   compiled {got:>12,}   gap {got - paper:,} bytes")


ddp = look(jp.Parallel(data=8))
compare(ddp, all_reduce=4 * P)

# %% [markdown]
# **Explain the gap.** One more float32 is summed: the loss. The ledger has an entry for each array, how often it travels,
# and the line of the model behind it. A gradient is known by its shape: where several parameters share it, it carries all
# their names; where its shape says nothing, as that of the loss, it is called after the operation it comes from.


# %%
def in_words(size):
    power = min(int(np.log2(size)) // 10, 3)
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def show(entries):
    for e in entries:
        print(f"{e.kind:<15}{e.times:>3} × {in_words(e.payload):<8}  {e.source:<15} {e.cause}")


show(ddp.ledger)

# %% [markdown]
# The layers' gradients travel as stacks of four, when the backward loop is done: sums below 8 MiB are taken out of it, for to
# start one takes longer than to send it. Larger ones travel layer by layer, inside of the loop.
#
# ## 2. What ZeRO sends
#
# **Predict.** The paper ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 7) counts elements: an
# all-reduce is a reduce-scatter and an all-gather. ZeRO-2 does the first for gradients and the second for parameters:
# $4P$ bytes each. ZeRO-3 gathers parameters for the forward pass, throws them away, and gathers them again for the
# backward pass: $8P$, half as much again in all.

# %%
zero2, zero3 = look(jp.Parallel(fsdp=8, zero=2)), look(jp.Parallel(fsdp=8))
for name, report, gathers in (("ZeRO-2", zero2, 1), ("ZeRO-3", zero3, 2)):
    print(name)
    compare(report, reduce_scatter=4 * P, all_gather=gathers * 4 * P)

# %% [markdown]
# **Explain the gap.** ZeRO-2 is as predicted, but for 8 bytes: the loss, and the norm of the gradient, of which each
# device now has only a part. XLA's ZeRO-3 gathers only once. Did it keep what it gathered?

# %%
shares = {share.cause: share.bytes for share in zero3.memory}
gathered = shares["gathered weights"]
print(f"all parameters: {in_words(4 * P)}; gathered weights in memory: {in_words(gathered)}")

# %% [markdown]
# It did: a gathered weight is to `jax.grad` one more value that the backward pass will need. What is missing is the
# embedding, whose lookup needs none, and what is free again when memory is fullest. So inside a step, this ZeRO-3 holds
# nearly all of the parameters whole. The cure is to recompute, which section 4 does.
#
# Where do the gathers stand? `loop` says in which loops, and how often each turns.

# %%
for name, report in (("ZeRO-2", zero2), ("ZeRO-3", zero3)):
    gathers = [e for e in report.ledger if e.kind == "all-gather" and e.payload > 4096]
    print(f"{name}: loops {sorted({e.loop for e in gathers})}")
    show(gathers)

# %% [markdown]
# ZeRO-2 gathers stacks of four layers before the first one runs, in no loop. ZeRO-3 gathers one layer in each of four turns,
# and only the embedding and the head outside.
#
# ## 3. What tensor parallelism sends
#
# **Predict.** A layer sums its stream after attention and after the feed-forward, and their gradients likewise
# ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053)): $4L$ all-reduces of $16 \times 96 \times 256$ floats = 1.5 MiB.
# Write it down as a budget, the way your own tests would.

# %%
tensor = look(jp.Parallel(tensor=8))
stream = 4 * B * S * D
try:
    jp.assert_collectives(tensor, {"tensor": {"all-reduce": 4 * L}}, at_least=stream)
except jp.JaxparError as error:
    print(str(error).replace("; ", ";\n    "))

# %% [markdown]
# **Explain the gap** of one, and of a gather. The paper counts a layer; around the layers is a vocabulary. Each device has
# part of the head, and the gradients of the stream are summed: $4L + 1$. The table of tokens is split by its columns, and
# what each device looked up is gathered: half the bytes of a sum. `lower_bound` leaves the small ones out: what are they?

# %%
jp.assert_collectives(tensor, {"tensor": {"all-reduce": 4 * L + 1, "all-gather": 1}}, at_least=stream)
compare(tensor, all_reduce=(4 * L + 1) * stream)
show(e for e in tensor.ledger if e.payload < stream)

# %% [markdown]
# Cross-entropy over a split vocabulary: each of eight parts sends two numbers for each of 1,536 tokens, the logarithm of a
# sum and the label's logit, 96 KiB in all, in place of the logits, which would be 7.5 MiB. And the norm of the gradient, one
# number.
#
# ## 4. Memory by cause
#
# **Predict.** With ZeRO-3 on eight devices, the arguments can be counted: $4P/8$ bytes of parameters, twice that for
# Adam, two int32 for each of $2 \times 96$ tokens. With `remat="full"`, the backward pass recomputes each layer from its
# input, so of all activations the loop keeps only the stream before each layer: $L \times 2 \times 96 \times 256$ floats.

# %%
full = look(jp.Parallel(fsdp=8), remat="full")
shares = {share.cause: share for share in full.memory}
for cause, paper in {"parameters": 4 * P // 8, "optimizer state": P, "batch": 2 * 4 * 2 * S}.items():
    print(f"{cause:<16} predicted {paper:>9,}   {shares[cause].how} {shares[cause].bytes:>9,} bytes")
kept = [what for what in shares["activations"].largest if what[0].startswith(f"f32[{L},2,{S},{D}]")]
print(f"streams kept     predicted {4 * L * 2 * S * D:>9,}   compiled {kept}")

# %% [markdown]
# **Explain the gap** of 4 bytes: Adam counts its updates. All the others are exact.
#
# The report gives every byte to one cause. What cannot be counted by hand is read where XLA put it, at the moment when
# temporary memory is fullest.

# %%
reports = {"remat='none'": zero3, "remat='full'": full}
assert all(sum(share.bytes for share in report.memory) == report.total for report in reports.values())
figure, ax = plt.subplots(figsize=(10, 2.6), dpi=110, layout="constrained")
left = np.zeros(2)
causes = ("parameters", "optimizer state", "gradients", "gathered weights", "activations", "everything else")
for colour, cause in zip([0, 1, 4, 6, 8, 18], causes, strict=True):
    sizes = [sum(s.bytes for s in report.memory if s.cause == cause) / 2**20 for report in reports.values()]
    ax.barh(list(reports), sizes, left=left, color=plt.cm.tab20c(colour), label=cause)
    left += sizes
ax.spines[["top", "right"]].set_visible(False)
ax.set(xlabel="MiB on each device", title="ZeRO-3 on eight devices", ylim=(1.5, -0.5))
ax.legend(frameon=False, ncols=2, loc="lower right")
plt.show()

# %% [markdown]
# Recomputing each layer, gathers included, is what lets go of the gathered weights, and of most activations: what is left
# are the kept streams, one layer at a time, and XLA's own scratch. The price is on the wire, and in FLOP.
#
# **Predict.** Now ZeRO-3 gathers twice, as in the paper, but for what is outside of the layers, and the scales of their
# norms, which are gathered for all layers at once. A forward pass takes a third of the model's FLOP, and all of it but the
# head is done again.

# %%
compare(full, reduce_scatter=4 * P, all_gather=4 * (P + L * (layer - 2 * D)))
products = L * (2 * (layer - 2 * D) + 4 * S * D)  # FLOP of a token: its matrices, scores and their use
again = products / (4 * products + 3 * 2 * V * D)
print(f"recomputed: predicted {again:.1%}, compiled {full.flop.recomputed / full.flop.total:.1%} of all FLOP")

# %% [markdown]
# **Explain the gap** in FLOP: the backward pass needs the inputs of a layer's matmuls, not its last result. So the last
# matmul of each layer, $D \times H$ of the feed-forward, need not be done again, and XLA drops what nobody reads. Without
# it, paper says 4.59 of 23.46 MFLOP for each token: 19.6 %.
#
# ## 5. A fault
#
# One line too many: somebody wanted to look at the logits, and asked for all of them on every device.
#
# **Predict.** The numbers stay right and nothing warns. Under `data=8`, an all-gather brings every device the logits of
# the others: $16 \times 96 \times 1280$ floats = 7.5 MiB, beside 12.5 MiB of gradients.


# %%
class Careless(jp.Decoder):
    def __call__(self, tokens):
        logits = super().__call__(tokens)
        return jax.lax.with_sharding_constraint(logits, PartitionSpec())


careless = look(jp.Parallel(data=8), model=Careless)
compare(careless, all_reduce=4 * P + 4, all_gather=4 * B * S * V)
print("flags of the step of section 1:", len(ddp.flags))
print(*careless.flags)

# %% [markdown]
# **Explain the gap.** The bytes are as predicted. The line is the one that *makes* what is gathered, the last of
# `Decoder`: a constraint leaves no instruction behind, it only changes the sharding of the matmul before it. The culprit
# is downstream of the line that is named, and close to it.
#
# ## 6. What waits for what
#
# XLA fixes the order in which kernels and collectives start. Given a price for each, that order can be replayed. The
# prices are the data sheet's, derated: this is a **model**, good for comparing, and no measurement.
#
# Nothing is allocated, so size is free: now a decoder of 0.96 billion parameters in bfloat16 with ZeRO-3, one sequence of
# 2,048 tokens for each GPU, on one node and on eight.

# %%
LARGE = jp.DecoderConfig(vocab=32768, seq=2048, layers=16, dim=2048, heads=16, hidden=5632)
numerics = {"settings": LARGE, "precision": "bf16", "remat": "full"}
one = look(jp.Parallel(fsdp=8), "h100:1x8", examples=8, **numerics)
eight = look(jp.Parallel(fsdp=64), "h100:8x8", examples=64, **numerics)

# %% [markdown]
# **Predict.** A ring of $n$ moves $(n-1)/n$ of what is gathered twice and scattered once, 2 bytes each; embedding and head
# are gathered once. NVLink has 450 GB/s for each GPU; between nodes, the eight network ports of a node have
# 8 × 50 GB/s for a ring of all, and the model takes 80 % of either. So eight nodes need a quarter more time: 17 ms instead
# of 13. The matmuls, with 8 FLOP per weight and token, take 20 ms at 74 % of the peak: a perfect order could hide all.

# %%
outside = 2 * LARGE.vocab * LARGE.dim
inside = LARGE.layers * (4 * LARGE.dim**2 + 3 * LARGE.dim * LARGE.hidden)
moved = 2 * (3 * inside + 2 * outside)
print("modelled, ms     kernels  collectives: paper  replayed   exposed    step")
for report, n, rate in ((one, 8, 450e9), (eight, 64, 400e9)):
    t, paper = report.timeline, moved * (n - 1) / n / (0.8 * rate)
    times = (t.compute, paper, t.communication["fsdp"], t.exposed["fsdp"], t.seconds)
    print(f"{n:>4} GPUs     " + "".join(f"{1e3 * x:{w}.1f}" for x, w in zip(times, (10, 20, 10, 10, 8), strict=True)))

# %% [markdown]
# **Explain the gap.** Kernels take twice as long as the matmuls: softmax, norms and Adam move memory, and this attention
# writes its scores to memory, which the fused kernel that jaxpar's models take on a real GPU does not. Collectives take
# longer than on paper, which has bandwidth only: each of some 160 takes time to start, three times as long between nodes.
# And not all of them are hidden. Look at the end of a turn of the forward loop, and of one of the backward loop.

# %%
for name, report in (("one node", one), ("eight nodes", eight)):
    events = report.timeline.events
    kernels = [(e.start, e.end) for e in events if e.stream == "compute"]
    for loop, fold in zip(("forward", "backward"), [e.start for e in events if "more turns" in e.name], strict=True):
        print(f"{name}, {loop}, modelled:")
        for e in [e for e in events if e.stream == "fsdp" and e.start < fold][-5:]:
            hidden = sum(max(0.0, min(end, e.end) - max(start, e.start)) for start, end in kernels)
            print(f"  {e.name:<14} {1e6 * (e.end - e.start):4.0f} µs, {hidden / (e.end - e.start):4.0%} hidden")

# %% [markdown]
# A turn gathers its own weights, and has nothing to compute until the first of them are there; XLA, as it is set here,
# does not gather them in the turn before. The reduce-scatters of gradients run beside kernels, which hide them. One node
# also hides the three large gathers of each turn; on eight nodes XLA orders the gathers otherwise, and hides at most one.
# So the exposed time more than triples, while the traffic grows by an eighth.
#
# ## 7. The whole report
#
# At the end of a cell, a report shows itself. Sections open with a click; **exact**, **compiled** and **modelled** say
# which kind a number is. `report.html("report.html")` writes the same as a page, `print(report)` as text.

# %%
eight

# %% [markdown]
# ## 8. Any jitted function
#
# No model of jaxpar's, no layout: a function, and arguments that carry their shardings. `roles` says what they are, so
# that memory gets its causes and gradients their names.
#
# **Predict.** Over `data=2`, both gradients: $2 \cdot 4 \cdot 1024 \cdot 4096 / 4$ bytes = 8 MiB. Over `tensor=4`, the
# matmul after `down`: 256 examples × 1,024 floats = 1 MiB, once; the backward pass would sum the gradient of `x`, but
# nobody asks for it.


# %%
def update(w, x):
    def loss(w):
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - x) ** 2)

    return jax.tree.map(lambda w, gradient: w - 0.1 * gradient, w, jax.grad(loss)(w))


mesh = Mesh(np.array(jp.target_devices("h100:1x8")).reshape(2, 4), ("data", "tensor"))


# %%
def array(shape, *axes):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


w = {"up": array((1024, 4096), None, "tensor"), "down": array((4096, 1024), "tensor", None)}
report = jp.inspect(jax.jit(update), w, array((512, 1024), "data", None), roles=("parameters", "batch"))
show(report.ledger)
jp.assert_collectives(report, {"data": {"all-reduce": 2}, "tensor": {"all-reduce": 1}})

# %% [markdown]
# As predicted. The two gradients have one shape but for the order of its dims, so each entry carries both names. (The line is
# one of this notebook: to Python, a cell is a file whose name is a number.)
#
# ## What to try next
#
# * `sequence=True` beside `tensor=8`: which all-reduces become pairs, and where does a third one come from?
# * `accumulate=4` under ZeRO-3: a flag says what it costs.
# * In section 6, `jp.Parallel(data=8, fsdp=8)` on eight nodes: which axis crosses the network, and what is exposed?
# * `jaxpar inspect job.toml --target h100:16x8`: the same for a job, from the command line.
