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
# # Mixtures of experts
#
# A mixture of experts has many feed-forward layers in place of one, and a router that chooses a few of them for each token. It has the
# parameters of all experts and computes with the chosen ones. On several devices, each device holds some of the experts, and tokens
# travel to them: by an all-to-all, whose bytes can be predicted on paper.
#
# Eight devices are simulated on one processor. Losses, counts and bytes are those of eight real ones; times are not, and none are printed.

# %%
import jaxpar as jp

jp.simulate(8)  # before anything else uses JAX

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

# %% [markdown]
# ## 1. A model of your own
#
# One expert is a function of its parameters and of tokens `[n, dim]`. The parameters of all experts are stacked: dim 0 counts the experts,
# and its name is `expert`.

# %%
EXPERTS, K, DIM, HIDDEN, VOCAB = 8, 2, 64, 96, 256
SIZES = {"vocab": VOCAB, "embed": DIM, "mlp": HIDDEN, "expert": EXPERTS}


def weight(rngs, *names):
    shape = [SIZES[name] for name in names]
    return nnx.Param(rngs.params.normal(shape) / shape[-2] ** 0.5, out_sharding=names)


def expert(params, x):
    return nnx.silu(x @ params["up"]) @ params["down"]


# %% [markdown]
# The router scores all experts for each token, and `top_k` takes the best two. `jp.mixture` brings tokens and experts together: it returns
# the weighted sums of what the experts compute, and counts what became of each choice. The model does not know on how many devices it runs.


# %%
class Mixture(nnx.Module):
    def __init__(self, capacity, spare, *, rngs):
        self.capacity, self.spare = capacity, spare
        self.router = nnx.Param(rngs.params.normal((DIM, EXPERTS)) / DIM**0.5, out_sharding=("embed", None))
        self.up = weight(rngs, "expert", "embed", "mlp")
        self.down = weight(rngs, "expert", "mlp", "embed")

    def __call__(self, x):
        scores = jax.nn.softmax(x @ self.router[...])
        weights, choices = jax.lax.top_k(scores, K + self.spare)  # best first; spare ones are for section 4
        params = {"up": self.up[...], "down": self.down[...]}
        return jp.mixture(expert, params, x, choices, weights[..., :K], capacity=self.capacity)


class LanguageModel(nnx.Module):
    """Predicts the next byte from this one and the mean of those before it."""

    def __init__(self, capacity, spare=0, *, rngs):
        self.embed, self.head = weight(rngs, "vocab", "embed"), weight(rngs, "embed", "vocab")
        self.mixture = Mixture(capacity, spare, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed[...][tokens]
        x += jnp.cumsum(x, axis=1) / jnp.arange(1, tokens.shape[1] + 1)[:, None]
        y, load = self.mixture(x)
        return jp.constrain(x + y, "batch", "seq", "embed") @ self.head[...], load


# %% [markdown]
# A loss may return more than the loss: each entry is a sum and the number to divide it by. Here the choices of a sequence are counted.


# %%
def loss(model, batch):
    logits, load = model(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    sequences = jnp.float32(len(losses))
    counts = {name: (jnp.sum(count, dtype=jnp.float32), sequences) for name, count in load._asdict().items()}
    return {"loss": (losses.sum(), losses.size)} | counts


# %% [markdown]
# ## 2. Eight devices, and the losses of one
#
# `Parallel(expert=4, data=2)`: groups of four devices hold two experts each, and there are two such groups. All eight devices see different
# sequences. `capacity=1.0` gives each expert as many slots as its mean number of tokens: $2 \cdot 64 / 8 = 16$ of a sequence.

# %%
SEQ, BATCH = 64, 32
text, optimizer = jp.open_data(jp.Data(seq=SEQ)), optax.adam(4e-3)


def train(model, parallel, loss, devices, batch=BATCH, steps=3):
    layout = jp.compose(model, parallel, jax.devices()[:devices])
    step, state, metrics = jp.train_step(layout, loss, optimizer), jp.init_state(layout, optimizer), []
    for i in range(steps):
        state, of_step = step(state, text.batch(i, batch))
        metrics.append(of_step)
    return step, layout, [{name: float(value) for name, value in of_step.items()} for of_step in metrics]


mesh = jp.Parallel(expert=4, data=2)
drop = partial(LanguageModel, 1.0)
step, layout, eight = train(drop, mesh, loss, devices=8)
print(*(line for line in layout.explain().splitlines() if line.startswith(("parameter", "mixture"))), sep="\n")

# %% [markdown]
# Dim `expert` of 8 is split over the axis `expert` of 4. ZeRO would split experts over `fsdp` too, which this mesh lacks. The router is no
# expert: ZeRO-3 shards it over `expert`, and it is gathered before use.
#
# **Predict.** Experts choose among the tokens of one sequence only, so that what overflows does not depend on the other sequences of a device.
# The losses are those of one device, and so are the counts.

# %%
_, _, one = train(drop, jp.Parallel(), loss, devices=1)
for name in ("loss", "kept", "dropped"):
    for label, metrics in (("8 devices", eight), ("1 device", one)):
        print(f"{name:<8} {label:<10}", *(f"{row[name]:11.6f}" for row in metrics))
    np.testing.assert_allclose([row[name] for row in eight], [row[name] for row in one], rtol=1e-5)

# %% [markdown]
# ## 3. What travels
#
# **Predict.** A device has $32 \cdot 64 / 8$ tokens. Each has 2 choices, and each choice is a vector of 64 numbers of 4 bytes. With capacity $c$
# an all-to-all has $c$ times as many slots as choices, empty or not. One slot in four is for an expert of the device itself, so $3/4$ leave
# it. A layer has four all-to-alls: tokens to their experts and results back, and the gradients of both.

# %%
tokens = BATCH * SEQ // 8
payload = tokens * K * DIM * 4 * 1.0  # of capacity 1.0
paper = 4 * payload * 3 / 4
ledger = jp.inspect(step, text.batch(0, BATCH)).ledger
moved = [entry for entry in ledger if entry.kind == "all-to-all"]
compiled = sum(entry.step_wire for entry in moved)
print(f"all-to-alls: {sum(entry.times for entry in moved)}, over {', '.join({axis for e in moved for axis in e.axes})}")
print(f"predicted {paper / 1024:.1f} KiB   compiled {compiled / 1024:.1f} KiB")
assert sum(entry.times for entry in moved) == 4
assert abs(compiled / paper - 1) < 0.002

# %% [markdown]
# No gap. What else is sent? **Predict.** The gradients of experts are summed over `data` alone: the other devices of `expert` have other
# experts. All other parameters are summed over both axes.

# %%
experts = [e for e in ledger if any(path in ("mixture/up", "mixture/down") for path in e.parameters)]
for entry in experts:
    print(f"{entry.kind} over {', '.join(entry.axes)}: {entry.times} x {entry.payload / 1024:.0f} KiB   {entry.cause}")
of_matrix = EXPERTS // 4 * DIM * HIDDEN * 4  # bytes
sums = [e for e in experts if e.kind == "all-reduce" and e.payload == of_matrix]
assert {e.axes for e in sums} == {("data",)}
assert sum(e.times for e in sums) == 2
of_head = [e for e in ledger if "head" in e.parameters and e.kind == "all-reduce"]
assert {axis for e in of_head for axis in e.axes} == {"data", "expert"}

# %% [markdown]
# ## 4. What overflows
#
# With capacity 1.0 there are as many slots as choices, but the router does not choose evenly. A choice that finds its expert full is
# dropped, and the sum of the token lacks that expert. If `choices` has more entries than `weights`, the token asks the experts of these
# spare entries first: the choice spills. Without a capacity every expert has a slot for every token.
#
# **Predict.** The first step starts from the same parameters three times, so the first two keep as many choices. Without a capacity nothing
# is lost, and an all-to-all has $8 \cdot 64$ slots of a sequence in place of $2 \cdot 64$: four times the bytes, most of them empty.

# %%
spill, unlimited = partial(LanguageModel, 1.0, spare=2), partial(LanguageModel, None)
_, _, of_spill = train(spill, mesh, loss, devices=8, steps=1)
step, _, of_unlimited = train(unlimited, mesh, loss, devices=8, steps=1)
first = {"capacity 1.0, drop": eight[0], "capacity 1.0, spill": of_spill[0], "no capacity": of_unlimited[0]}
for name, row in first.items():
    print(f"{name:<20}", *(f"{key} {row[key]:6.2f}   " for key in ("sent", "kept", "spilled", "dropped")))
    assert row["sent"] == row["kept"] + row["spilled"] + row["dropped"] == K * SEQ
assert eight[0]["kept"] == of_spill[0]["kept"]
assert of_spill[0]["dropped"] < eight[0]["dropped"]
assert of_unlimited[0]["dropped"] == of_unlimited[0]["spilled"] == 0

# %%
figure, ax = plt.subplots(figsize=(8, 2.4), dpi=110, layout="constrained")
left = np.zeros(len(first))
for key, color in (("kept", "#31688e"), ("spilled", "#35b779"), ("dropped", "#c9c9c9")):
    width = np.array([row[key] for row in first.values()])
    ax.barh(list(first), width, left=left, color=color, label=key)
    left += width
ax.set(xlabel=f"choices of a sequence, of {K * SEQ}", xlim=(0, K * SEQ))
ax.invert_yaxis()
ax.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside upper center", ncols=3, frameon=False)
plt.show()

# %%
moved = [e for e in jp.inspect(step, text.batch(0, BATCH)).ledger if e.kind == "all-to-all"]
without = sum(entry.step_wire for entry in moved)
print(f"no capacity: predicted {EXPERTS / K * paper / 1024:.1f} KiB   compiled {without / 1024:.1f} KiB")
assert abs(without / (EXPERTS / K * paper) - 1) < 0.002

# %% [markdown]
# ## 5. Watch the load
#
# If the router prefers some experts, those overflow, and the others have empty slots. Two remedies are in use. A *balance loss*
# ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961)) adds a term to the loss that is least when all experts are chosen equally. A *bias*
# ([Wang et al. 2024](https://arxiv.org/abs/2408.15664)) is added to the scores for the choice alone: after each step it rises by
# `balance_rate` for experts with less than the mean load, and falls by as much for those with more.
#
# `jp.Decoder` has both. A step reports `load_max`, the load of the fullest expert of a layer over the mean: 1 is even, and of 8 experts 4 is the
# worst, where all tokens choose the same two. The metric `loss` includes the balance loss, `cross_entropy` does not. **Predict.** Without a remedy the load grows uneven; with one, it does not.

# %%
SHAPE = {
    "vocab": VOCAB,
    "seq": SEQ,
    "layers": 2,
    "dim": DIM,
    "heads": 4,
    "scan": False,
}  # two layers compile sooner unrolled
dense = jp.DecoderConfig(**SHAPE, hidden=K * HIDDEN)
mixture = {"count": EXPERTS, "per_token": K, "hidden": HIDDEN, "capacity": 1.25, "balance": 0.0}
REMEDIES = {"none": {}, "balance loss": {"balance": 0.01}, "bias": {"balance_rate": 0.01}}


def decoder(**remedy):
    return partial(jp.Decoder, replace(dense, experts=mixture | remedy))


runs = {
    name: train(decoder(**remedy), jp.Parallel(expert=4), jp.next_token_loss, devices=4, batch=16, steps=60)
    for name, remedy in REMEDIES.items()
}
curves = {name: {key: np.array([row[key] for row in rows]) for key in rows[0]} for name, (*_, rows) in runs.items()}
starts = [of["cross_entropy"][0] for of in curves.values()]
np.testing.assert_allclose(starts, starts[0], rtol=1e-5)

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), dpi=110, layout="constrained")
for (name, of), color in zip(curves.items(), ("#777777", "#31688e", "#e07b39"), strict=True):
    axes[0].plot(of["load_max"], color=color, label=name)
    axes[1].plot(of["cross_entropy"], color=color, label=name)
axes[0].set(xlabel="step", ylabel="fullest expert over the mean", title="load_max", ylim=(1, 4))
axes[1].set(xlabel="step", ylabel="nats per byte", title="cross-entropy", ylim=(2, 4))
axes[0].legend(frameon=False, title="remedy")
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
last = {name: {key: values[-20:].mean() for key, values in of.items()} for name, of in curves.items()}
for name, means in last.items():
    print(
        f"{name:<13} load_max {means['load_max']:.2f}   dropped {means['dropped']:.1%}   "
        f"cross-entropy {means['cross_entropy']:.3f}"
    )
load, drops, ends = ([means[key] for means in last.values()] for key in ("load_max", "dropped", "cross_entropy"))
assert load[0] > load[1] > load[2] > 1
assert drops[0] > drops[1] > drops[2] > 0
assert load[0] > curves["none"]["load_max"][0] > load[2]
assert max(ends) / min(ends) < 1.01

# %% [markdown]
# **What is seen**, in means over the last 20 steps. Without a remedy the load ends less even than it began, and with either one it is
# more even. The bias does more than the balance loss at these two settings. Neither reaches 1, and both runs still drop choices.
#
# **What is not seen** is a gain: the three cross-entropies lie within 1 % of each other, with one seed each. In sixty steps this small model
# does not suffer from an uneven router, although it drops more choices. But an even router overflows less at the same capacity, so that a
# smaller capacity would do, and capacity is bytes and FLOP.
#
# ## 6. What it costs next to a dense decoder
#
# Two experts of width 96 compute as much for a token as one dense feed-forward of width 192. All eight have the parameters of one of width 768.
#
# **Predict.** A feed-forward of width $h$ has three matrices of $64 \cdot h$: 6 FLOP for each number and token, two forward and four backward. The
# mixture computes slots, and capacity 1.25 has a quarter more of them than choices. Its router is a matrix of $64 \cdot 8$.

# %%
batch = text.batch(0, 16)


def look(hidden):
    layout = jp.compose(partial(jp.Decoder, replace(dense, hidden=hidden)), jp.Parallel(data=4), jax.devices()[:4])
    step = jp.train_step(layout, jp.next_token_loss, optimizer)
    return layout, jp.inspect(step, batch)


step, layout, _ = runs["none"]
reports = {"dense, 192": look(192), "8 experts of 96": (layout, jp.inspect(step, batch)), "dense, 768": look(768)}

# %%
for name, (layout, report) in reports.items():
    parameters = sum(np.prod(placement.leaf.shape) for placement in layout.placements.values())
    print(f"{name:<16} {parameters:>9,} parameters   {report.flop.total / 1e6:6.1f} MFLOP per device and step")

small, of_experts, large = (report.flop.total for _, report in reports.values())
layers, tokens = SHAPE["layers"], 16 * SEQ // 4
extra = 6 * tokens * layers * (0.25 * 3 * DIM * K * HIDDEN + DIM * EXPERTS)
print(f"experts over dense, 192: predicted {1 + extra / small:.4f}   compiled {of_experts / small:.4f}")
print(f"dense, 768 over experts: compiled {large / of_experts:.2f}")
assert abs(of_experts / (small + extra) - 1) < 0.002

# %% [markdown]
# No gap: a slot is computed, empty or not, so that the capacity is paid in full. For that the mixture has the parameters of the large dense
# decoder, and with them its optimizer state and its gradients. Memory is what experts cost, and the axis `expert` is how several devices
# share it.
#
# ## What to try next
#
# * `Parallel(expert=2, fsdp=4)`: experts are sharded over `fsdp` too. What does `layout.explain()` say, and how many bytes move?
# * Section 3 for absent H100s in 16 bits, as in [What XLA did](02_what_xla_did.ipynb): half the bytes. Here the ledger also has an all-gather of
#   the router's scores, as XLA does not split `top_k` on processors; is it there for GPUs?
# * `overflow="spill"` in `jp.Decoder`'s experts: the metric `spilled` rises, `dropped` falls.
# * `balance=0.1`, or `balance_rate=0.001` as in DeepSeek-V3: how long does the load take to even out?
# * `jaxpar train configs/experts4_data2.toml` is such a decoder as a job.
