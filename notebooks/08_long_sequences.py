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
# # Long sequences
#
# A sequence that is too long for one device is shared by several. All of a transformer but attention takes tokens one by
# one and does not mind; in attention every query meets every key before it. Here are three ways to let them meet: who
# holds which tokens, who works when, what is sent, and what is kept.
#
# Eight simulated devices train, and XLA's compiler for GPUs tells of H100s that are absent (`pip install
# 'jaxpar[gpu-plan]'`). Nothing here is a measured time.

# %%
import jaxpar as jp

jp.simulate(8)  # before anything else uses JAX

from functools import cache, partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

P = 8  # devices that share a sequence
shades = plt.get_cmap("viridis")(np.linspace(0.0, 0.95, P))

# %% [markdown]
# ## 1. Who holds which tokens
#
# Cut a sequence in eight pieces, one after the other, and let each device work for the queries of its own. Under a causal
# mask a query meets the keys up to its own, so late queries meet more.
#
# **Predict.** Of $P$ pieces, the queries of piece $r$ meet $r$ whole pieces and half of their own: the last device has
# $2P - 1 = 15$ times the work of the first. All wait for it.
#
# The cure has a name, *zigzag*: cut $2P$ chunks, and give device $r$ the early chunk $r$ and the late chunk $2P-1-r$. What is
# missing early is there late, and the sum is the same for all.


# %%
def contiguous(r):
    return [2 * r, 2 * r + 1]


def zigzag(r):
    return [r, 2 * P - 1 - r]


C = 32  # tokens of a chunk
causal = np.tril(np.ones((2 * P * C, 2 * P * C)))
chunks = causal.reshape(2 * P, C, 2 * P, C).mean((1, 3))  # how much of each pair of chunks is seen


def met(cut, queries, keys):
    """Returns how much of the square of one device's queries and another's keys is seen."""
    return chunks[np.ix_(cut(queries), cut(keys))].mean()


for cut in (contiguous, zigzag):
    work = [sum(met(cut, r, other) for other in range(P)) / P for r in range(P)]
    print(f"{cut.__name__:<10}", " ".join(f"{share:.2f}" for share in work), "of its queries and all keys")


# %%
def bare(ax, title):
    ax.set(title=title, xticks=[], yticks=[], aspect="equal")
    ax.spines[:].set_visible(False)


figure, axes = plt.subplots(1, 2, figsize=(9, 4.6), dpi=110, layout="constrained")
for ax, cut in zip(axes, (contiguous, zigzag), strict=True):
    whose = {chunk: r for r in range(P) for chunk in cut(r)}
    for q in range(2 * P):
        for k in range(q + 1):
            corners = [(k, q), (k, q + 1), (k + 1, q + 1), (k + 1, q)][: 3 if q == k else 4]
            ax.fill(*zip(*corners, strict=True), color=shades[whose[q]], ec="white", lw=0.5)
        ax.text(q + 1.15, q + 0.3, whose[q], fontsize=8, color="black")
    ax.set(xlim=(0, 2 * P + 1), ylim=(2 * P, 0))
    bare(ax, cut.__name__)
figure.supxlabel("keys")
figure.supylabel("queries")
figure.suptitle("Which device works for which queries")
plt.show()

# %% [markdown]
# As predicted, 0.06 to 0.94 of what there is, and with zigzag half of it for everyone. In jaxpar batches come in contiguous
# pieces, and every model keeps its positions; the chunks are swapped at the door of attention, and swapped back behind it.
#
# ## 2. Who works when
#
# In a **ring** ([Liu et al. 2023](https://arxiv.org/abs/2310.01889)) queries stay, and keys and values go around. In each turn
# a device works with the keys that it has, while it sends them on and the next ones come. $P - 1$ hops are enough.
#
# **Predict.** A turn takes as long as its slowest device. With contiguous pieces the first turn takes half a square of two
# pieces and all others a whole one, though some devices see nothing in them: $\frac12 + 7$. With zigzag each turn takes half.

# %%
turns = {
    cut: np.array([[met(cut, r, (r - turn) % P) for turn in range(P)] for r in range(P)])
    for cut in (contiguous, zigzag)
}
for cut, shares in turns.items():
    print(f"{cut.__name__:<10} takes {shares.max(0).sum():.1f} squares, and {shares.sum() / P:.1f} of them are work")

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.9), dpi=110, sharey=True, layout="constrained")
for ax, (cut, shares) in zip(axes, turns.items(), strict=True):
    begins = np.concatenate([[0], np.cumsum(shares.max(0))])
    for r, turn in np.ndindex(shares.shape):
        source = (r - turn) % P
        if shares[r, turn]:
            ax.barh(r, shares[r, turn], left=begins[turn], height=0.86, color=shades[source], ec="white")
            ink = "black" if source > P // 2 else "white"
            ax.text(begins[turn] + shares[r, turn] / 2, r, source, color=ink, fontsize=8, ha="center", va="center")
    ax.set(title=cut.__name__, xlabel="time, in squares of two pieces", xlim=(0, 7.6), yticks=range(P))
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False)
axes[0].set_ylabel("device")
axes[0].invert_yaxis()
figure.suptitle("Whose keys each device works with")
plt.show()

# %% [markdown]
# Empty is waiting. The zigzag ring ends in 4.0 and never waits, if keys come before their turn does. How much is computed
# in fact? XLA counts it below.
#
# ## 3. Three ways, the same loss
#
# | `context_by` | what meets where | sent in a layer, forward |
# |---|---|---|
# | `"gather"` | every device gets all keys and values | keys, values |
# | `"ring"` | keys and values go around | keys, values |
# | `"ulysses"` | devices exchange heads for tokens: each has all tokens of its own heads | queries, keys, values, result |
#
# `ulysses=2` beside `"ring"` does both: pairs of devices exchange heads, and four such pairs rotate. **Predict.** The
# mathematics is the same, so losses differ by rounding.


# %%
class OnlyAttention(nnx.Module):
    """A model of your own, of nothing but attention."""

    def __init__(self, vocab, dim, heads, kv_heads, head_dim, *, rngs):
        shapes = {"embed": (vocab, dim), "q": (dim, heads, head_dim), "out": (heads, head_dim, dim)}
        shapes |= {name: (dim, kv_heads, head_dim) for name in "kv"}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), shape)))

    def __call__(self, tokens, segments=None, positions=None):
        x = jp.constrain(self.embed[...][tokens], "batch", "seq", "embed")
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[...]) for w in (self.q, self.k, self.v))
        met = jp.attention(q, k, v, causal=True, segments=segments)
        x += jnp.einsum("bshk,hkd->bsd", met, self.out[...])
        return jp.constrain(x, "batch", "seq", "embed") @ self.embed[...].T


small, optimizer = partial(OnlyAttention, 64, 32, 8, 1, 4), optax.adam(1e-2)
WAYS = {
    "one device": None,
    "gather": {"context_by": "gather"},
    "ring": {"context_by": "ring"},
    "ring x ulysses": {"context_by": "ring", "ulysses": 2},
}


def batch(i):
    """Returns rows of several documents each, whose tokens mostly count upwards."""
    rng = np.random.default_rng(i)
    jumps = np.where(rng.random((4, 65)) < 0.5, 1, rng.integers(0, 64, (4, 65)))
    tokens = (np.cumsum(jumps, axis=1) % 64).astype(np.int32)
    segments = np.cumsum(rng.random((4, 65)) < 0.1, axis=1).astype(np.int32)
    mask = (np.diff(segments) == 0).astype(np.float32)  # the last token of a document predicts none
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask, "segments": segments[:, :-1]}


@cache
def made(way):
    how = WAYS[way]
    of = jp.Parallel() if how is None else jp.Parallel(context=8, **how)
    layout = jp.compose(small, of, jax.devices()[:1] if how is None else None)
    return jp.init_state(layout, optimizer), jp.train_step(layout, jp.next_token_loss, optimizer), layout


def train(way, batches):
    state, step, _ = made(way)
    state, losses = jax.tree.map(jnp.copy, state), []  # a step uses its state up
    for given in batches:
        state, metrics = step(state, given)
        losses.append(float(metrics["loss"]))
    return np.array(losses)


five = [batch(i) for i in range(5)]
alone = train("one device", five)
for way in WAYS:
    losses = train(way, five)
    print(f"{way:<15}", *(f"{loss:.6f}" for loss in losses), f" off by {np.abs(losses / alone - 1).max():.0e}")

# %% [markdown]
# As predicted. The layout says which way, and why; a step, what it found in the model.

# %%
_, step, layout = made("ring x ulysses")
print(
    *(line for line in layout.explain().splitlines() if "context by" in line), *step.compiler.implementations, sep="\n"
)

# %% [markdown]
# Two devices exchange heads, and the model has one head of keys: it had to be repeated.
#
# ## 4. Documents that share a row
#
# Those rows held several documents each. `segments` says which one a token is of; a query meets keys of its own alone.
# A ring never builds that mask: positions and segments of the blocks that meet are compared where they meet.
#
# **Predict.** Let one token fall to the document before it, and the loss changes: that token is seen by others, and sees
# others.


# %%
def flipped(batch):
    segments = batch["segments"].copy()
    row, token = np.argwhere(np.diff(segments, axis=1) > 0)[0]
    segments[row, token + 1] -= 1
    return batch | {"segments": segments}


(right,), (wrong,) = (train("ring", [given]) for given in (batch(0), flipped(batch(0))))
print(f"loss {right:.6f}, and with one segment of {4 * 64} flipped {wrong:.6f}")

# %% [markdown]
# ## 5. What is sent
#
# The same model with 8 heads of queries and 2 of keys, each 128 wide, for eight absent H100s in 16 bits, and rows of
# 32,768 and 65,536 tokens.
#
# **Predict.** A device's piece of keys and values is $2 \cdot 2 \cdot 128 \cdot s/8$ numbers of 2 bytes. Gathered, 7 pieces
# come forward and 7 of gradients go back. In a ring a piece hops 7 times forward and 7 times backward, its gradients 7 times in
# float32, and once home. The door: a device keeps one chunk in eight of q, k, v and the result, and of their gradients.


# %%
def look(by, seq):
    model, parallel = partial(OnlyAttention, 256, 64, 8, 2, 128), jp.Parallel(context=8, context_by=by)
    layout = jp.compose(model, parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, jp.next_token_loss, optimizer, precision="bf16")
    tokens = jax.ShapeDtypeStruct((1, seq), np.int32)
    return jp.inspect(step, {"inputs": tokens, "targets": tokens})


LENGTHS = [32_768, 65_536]
reports = {"gather": [look("gather", LENGTHS[-1])], "ring": [look("ring", seq) for seq in LENGTHS]}

# %%
S = LENGTHS[-1]
piece, chunk = 2 * 2 * 128 * S // 8 * 2, 128 * S // 16 * 2  # bytes
door = 2 * (8 + 2 + 2 + 8) * 2 * chunk * 7 / 8  # forward and backward, heads of q, k, v and the result, two chunks
paper = {"gather": (7 + 7) * piece, "ring": (7 + 7 + 2 * 7 + 1) * piece + door}
for by, (*_, report) in reports.items():
    sent = sum(e.step_wire for e in report.ledger if e.kind != "all-reduce")
    print(f"{by:<7} predicted {paper[by] / 2**20:5.1f} MiB   compiled {sent / 2**20:5.1f} MiB")

# %% [markdown]
# **Explain the gap.** One hop: the first of the forward pass and the first of the backward pass send the same, and XLA,
# which sees both in one program, sends it once. (The ledger has all-reduces too: of the gradients of parameters.)
#
# A ring sends more, then. But a hop travels while a turn is worked on, and gathered keys are waited for; and look what it
# does not compute and does not keep.
#
# ## 6. What is computed, and what is kept
#
# **Predict.** Gathering computes whole squares of queries and keys, and masks half of them: two matmuls forward and four
# backward, of $2 \cdot 8 \cdot 128 \cdot s^2/8$ FLOP each. It keeps scores of $s \cdot s/8$ for each of 8 heads. The ring keeps
# none, so backward it makes them again, by a fifth matmul; but of a square it computes 3 of 4 chunk pairs in the first
# turn and 2 of 4 in the others, $(2P+1)/4P = 0.53$. Twice the tokens, twice the memory.

# %%
matmuls, square = {"gather": 2 + 4, "ring": 2 + 5}, 2 * 8 * 128 * S * S / 8
print(f"scores of all heads in float32: {8 * S * S / 8 * 4 / 2**30:.1f} GiB")
for by, per_length in reports.items():
    share = per_length[-1].flop.total / (matmuls[by] * square)
    kept = [next(m.bytes for m in report.memory if m.cause == "activations") / 2**30 for report in per_length]
    print(f"{by:<7} {share:.3f} of the square, activations", *(f"{gib:.3f} GiB" for gib in kept))

# %% [markdown]
# **Explain the gap.** The ring is a bit better than predicted: of the two chunk pairs on the diagonal, blocks in which
# nothing is seen are not computed either. Gathering has the scores of its one layer in float32, and half as much in the
# shares that are made of them. Of 131,072 tokens it would be four times that, and no GPU has it; of the ring, twice.
#
# ## Which one
#
# Short rows: `gather`, the default, which sends least and has the largest matmuls. Long rows: `ring`, with any number of
# heads; `ulysses` where there are as many heads as devices, and fast links between all of them. `context_by="auto"`
# takes the fastest form by the plan's formulas whose scores fit the chip, and says so. On GPUs in 16 bits, rings and
# `ulysses` call cuDNN's kernel; here, on simulated devices, blocks are plain matmuls of XLA's.
