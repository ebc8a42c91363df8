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
# # Pipelines
#
# Consecutive layers on different devices, and the batch in pieces that follow one another through them. *When* a device
# works on which piece is a table. The first half of this notebook draws and prices tables; the second half trains with
# them, and compares with one device.
#
# The eight devices are simulated on one processor. Losses, parameters and bytes are those of the compiled program. Prices
# are counted in units of one forward: nothing here is timed.

# %%
import jaxpar as jp

jp.simulate(8)  # before anything else uses JAX

import inspect
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from IPython.display import SVG

from jaxpar.pipeline import history

# %% [markdown]
# ## 1. One microbatch
#
# Four stages have two layers each. `F` is a stage's forward, `B` its backward; `.` is a stage that waits.
#
# **Predict.** The whole batch goes through at once. Each stage waits until it comes by, twice: of 4 stages, one works. Idle
# are $1 - 1/P = 75\,\%$.

# %%
naive = jp.schedule("gpipe", stages=4, microbatches=1)
print(naive)
print(f"idle: {naive.bubble:.1%}")

# %% [markdown]
# ## 2. GPipe
#
# [Huang et al. 2018](https://arxiv.org/abs/1811.06965) cut the batch into $M$ microbatches: while the second stage has the
# first, the first stage has the second. All forwards, then all backwards, and one update by the sum of the gradients.
#
# **Predict.** Each stage works on $M$ of $M + P - 1$ places in a row, forward and backward alike, so idle are
# $(P-1)/(M+P-1) = 3/11 = 27.3\,\%$, whatever forward and backward take. Until its backward, a forward leaves activations:
# those of all 8 microbatches. Here and below, a backward takes as long as two forwards.


# %%
# of a stage a forward takes 1, a backward of inputs 1, one of weights 1; `B` is both together
def draw(name, **settings):
    return SVG(jp.schedule(name, stages=4, microbatches=8, **settings).svg())


draw("gpipe")

# %% [markdown]
# As predicted. The bubble shrinks with $M$, but memory grows with it: for a bubble of 5 %, 57 microbatches, all kept.
#
# ## 3. 1F1B
#
# A backward frees what its forward kept, so it should come as early as it can: from then on, each stage does one forward,
# one backward, and so on ([Narayanan et al. 2020](https://arxiv.org/abs/2006.09503)).
#
# **Predict.** The same bubble: the first microbatch takes as long to get through. Of activations, stage $d$ keeps $P - d$:
# 4, 3, 2, 1, for any $M$.

# %%
draw("1f1b")

# %% [markdown]
# **Explain the gap.** Run freely, it is as predicted. But jaxpar runs a table as *one* program on all devices, and in it
# every tick ends with messages that all wait for. In the steady state some stages do a forward while others do a
# backward; the forward takes 1, the tick takes 2, and a stage needs 4 for what is worth 3.
#
# ## 4. One kind of op at a time
#
# The cure is to let all stages go forward together, and backward together. For that, a stage must be two forwards ahead of
# its neighbour, not one ([Zhuang et al. 2022](https://arxiv.org/abs/2211.05322), for another reason).
#
# **Predict.** The barrier costs nothing: 27.3 % both ways. Stage $d$ keeps $2(P-1-d) + 1$: 7, 5, 3, 1.

# %%
draw("1f1b_phased")

# %% [markdown]
# As predicted; this is what `jp.Pipeline()` runs by default on GPUs. Memory is bounded still, by $2P - 1$.
#
# **Predict** both bubbles of both tables as $M$ grows. Run freely, all go to 0. With the barrier, 1F1B does in 4 what is worth
# 3, however many microbatches there are: a quarter stays idle.

# %%
for count in (8, 32, 128):
    for name in ("1f1b", "1f1b_phased"):
        cost = jp.schedule(name, stages=4, microbatches=count).price()
        shares = f"{cost.asynchronous_bubble:6.1%} ideal, {cost.barrier_bubble:6.1%} as one program runs it"
        print(f"{count:>4} microbatches  {name:<12} {shares}")

# %% [markdown]
# As predicted.
#
# ## 5. Several chunks on a stage
#
# A stage may hold chunks from different places of the model: layers 0 and 4 on stage 0, 1 and 5 on stage 1, and so on. A
# microbatch goes around twice ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 2.2).
#
# **Predict.** What starts and ends a step are $P - 1$ ticks of *half* a stage, so idle are $(P-1)/(vM+P-1) = 3/19 =
# 15.8\,\%$ for $v = 2$ chunks. The price: 7 borders between parts instead of 3, so $7 \cdot 2 \cdot 8 = 112$ messages
# instead of 48.

# %%
draw("interleaved_phased", chunks=2)

# %% [markdown]
# As predicted. Interleaving keeps more at once than 1F1B, and less than its phased form: 11 halves on stage 0 are worth 5.5
# microbatches.
#
# ## 6. Backward in two halves
#
# A backward computes two things: the gradient of its input, which the stage before is waiting for, and that of its weights,
# which nobody needs before the update. [Qi et al. 2023](https://arxiv.org/abs/2401.10241) split it: `B` is the first half,
# `W` the second, and a `W` can wait until there would be a bubble.
#
# **Predict.** ZB-H1 takes 27 ticks, of which a stage works in $3 \cdot 8 = 24$: idle are $3/27 = 11.1\,\%$, for the
# activations of 1F1B's first stage.

# %%
draw("zb_h1")

# %% [markdown]
# As predicted, *because* all three take the same time. They do not: of a transformer's stage, the input's half has the
# matmuls of attention too. Section 7 prices that.
#
# ## 7. A V
#
# Two chunks on a stage, but the second half of the model comes back *up* the stages: the first stage has the first and the
# last part ([Qi et al. 2024](https://arxiv.org/abs/2405.15362)). The loss, and with it the first backward, is where the
# batch came in.
#
# **Predict.** $6M + P - 1 = 51$ ticks of half a stage, 48 of them work: idle are 5.9 %. Activations: those of 1F1B's first
# stage, on all of them.

# %%
draw("zb_v")

# %% [markdown]
# As predicted. Now all that jaxpar knows, for 32 microbatches, with what a transformer's ops take in dot FLOP: `F` 1,
# `B` 1.14, `W` 0.86. **Predict** which tables lose to the barrier: those whose ticks mix ops, and the more the longer the
# longest op of a tick is than the others.

# %%
print(jp.schedule("gpipe", stages=4, microbatches=32).compare(backward=1.14, weights=0.86))

# %% [markdown]
# As predicted: `1f1b` loses most, since its whole backward takes twice a forward; split backwards lose less; `gpipe`,
# `looped_bfs` and the phased tables nothing. So what is best depends on who runs it: `zb_v`, if every stage is a program of
# its own; in one program, with so many microbatches, `interleaved_phased`.
#
# ## 8. The same losses
#
# A decoder of 8 layers on 4 stages, and two such pipelines side by side: `pipe=4, data=2`. The task is to count in steps of
# 1 to 8, modulo 64.
#
# **Predict.** A table says when, not what: gradients are summed over microbatches and divided once, so every schedule
# trains what one device trains, up to rounding. The sums of 8 microbatches are in another order than one device's.

# %%
SMALL = jp.DecoderConfig(vocab=64, seq=16, layers=8, dim=32, heads=4, hidden=64, tied=False)
decoder, adam = partial(jp.Decoder, SMALL), optax.adam(5e-3, eps=1e-4)


def batch(i, examples=64):
    rng = np.random.default_rng(i)
    start, stride = rng.integers(0, 64, (examples, 1)), rng.integers(1, 9, (examples, 1))
    tokens = ((start + stride * np.arange(17)) % 64).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


# %% [markdown]
# Between steps a stage stores its layers in their natural order, whatever the table: one state serves all of them. A step
# uses its state up, so each run gets a copy.


# %%
def train(step, state, updates=10):
    state, losses = jax.tree.map(jnp.copy, state), []
    for i in range(updates):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


def layout(model=decoder, **pipeline):
    return jp.compose(model, jp.Parallel(pipe=4, data=2, pipeline=jp.Pipeline(microbatches=8, **pipeline)))


def apart(a, b):
    gaps = jax.tree.map(lambda x, y: np.abs(x - y).max(), jax.device_get(a.params), jax.device_get(b.params))
    return max(jax.tree.leaves(gaps))


# %%
alone = jp.compose(decoder, jp.Parallel(), jax.devices()[:1])
one, after = train(jp.train_step(alone, jp.next_token_loss, adam), jp.init_state(alone, adam, seed=0))
start = jp.init_state(layout(), adam, seed=0)
print(f"one device: loss {one[0]:.3f} ... {one[-1]:.3f}")
for name in ("gpipe", "1f1b", "1f1b_phased", "zb_v"):
    losses, state = train(jp.train_step(layout(schedule=name), jp.next_token_loss, adam), start)
    print(f"{name:<12} losses differ by {np.abs(losses - one).max():.1e}, parameters by {apart(state, after):.1e}")

# %% [markdown]
# **Explain the gap.** A loss is a sum over 1,024 tokens, in float32, whose last place is worth $4.8 \cdot 10^{-7}$ between 4
# and 8. One device adds them all at once; a pipeline adds 8 sums of 128, from two replicas each. The tables agree with one
# another to the last digit shown: all of them take the microbatches in the same order.
#
# ## 9. Memory against microbatches
#
# **Predict.** Between its forward and its backward, a stage keeps its input and computes the rest again (`keep="inputs"`).
# A microbatch of 4 sequences on each replica is $4 \cdot 16 \cdot 32$ floats = 8 KiB. GPipe keeps one for every microbatch: 8
# KiB more for each. 1F1B keeps at most 4, for any number. **Measure** by asking the compiler.


# %%
def scratch(name, count):
    parallel = jp.Parallel(pipe=4, data=2, pipeline=jp.Pipeline(schedule=name, microbatches=count))
    step = jp.train_step(jp.compose(decoder, parallel), jp.next_token_loss, adam)
    compiled = step.lower(step.abstract(), batch(0, examples=8 * count)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1024


for name in ("gpipe", "1f1b"):
    few, many = scratch(name, 8), scratch(name, 64)
    print(f"{name:<6} {few:6.0f} KiB for 8, {many:6.0f} KiB for 64: {(many - few) / 56:6.2f} KiB for one more")

# %% [markdown]
# **Explain the gap.** GPipe keeps twice 8 KiB: the last stage takes the gradient of the loss with its forward, and keeps
# that too until its backward. What is left, less than 1 KiB, are tokens and rows of the table.
#
# ## 10. Your own model
#
# A stack of equal layers, each with a dim in front that is named `layers`. Flax adds that name to a weight that has names:
# one in a stack is enough. This block mixes tokens by a running mean.


# %%
named = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.mix = nnx.LayerNorm(32, rngs=rngs), nnx.Linear(64, 32, kernel_init=named, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        before = jnp.cumsum(y, axis=1) / jnp.arange(1, y.shape[1] + 1)[:, None]
        return x + nnx.gelu(self.mix(jnp.concatenate([y, before], axis=-1)))


# %% [markdown]
# The rest is Flax's usual way to make a stack, and to scan over it.


# %%
@nnx.split_rngs(splits=8)
@nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
def eight(rngs):
    return Block(rngs)


class Mine(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.blocks = nnx.Embed(64, 32, rngs=rngs), eight(rngs)
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def layers(self, x):
        named = {nnx.PARTITION_NAME: "layers"}
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=named)
        return scan(lambda x, block: block(x))(x, self.blocks)

    def __call__(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


# %% [markdown]
# **Predict.** For `pipe=4`, jaxpar must know where in a call the layers begin and end, and nothing in `Mine` says so.


# %%
def check(model):
    layouts = jp.compose(model, jp.Parallel(), jax.devices()[:1]), layout(model)
    runs = [train(jp.train_step(each, jp.next_token_loss, adam), jp.init_state(each, adam, seed=0)) for each in layouts]
    (want, alone), (got, piped) = runs
    print(f"one device: loss {want[0]:.3f} ... {want[-1]:.3f}")
    print(f"4 stages: losses differ by {np.abs(got - want).max():.1e}, parameters by {apart(piped, alone):.1e}")


try:
    check(Mine)
except jp.JaxparError as error:
    print(error)

# %% [markdown]
# Of the two fixes, one is a line in the model: `jp.pipelined(layers, x)` around the call. Without a pipeline it is
# `layers(x)`. The other, `stages="found"`, needs no call, and runs stages as the next section does.


# %%
class Told(Mine):
    def __call__(self, tokens):
        return self.head(jp.pipelined(self.layers, self.embed(tokens)))


check(Told)

# %% [markdown]
# ## 11. Unequal layers
#
# VGG-16 has no stack. Its convolutions come first, with large activations and few weights; its dense layers come last, with
# small activations and most of the weights. PipeDream ([Narayanan et al. 2019](https://arxiv.org/abs/1806.03377))
# *profiles* such a network, *cuts* it into stages, and *replicates* stages: on 16 devices, 15 run the convolutions,
# each for other microbatches, and one runs the dense layers. That plan is called 15-1. A model says where it may be cut
# by a list of pieces, which are any callables.


# %%
class VGG(nnx.Module):
    def __init__(self, rngs, depths=(2, 2, 3, 3, 3), width=64, dense=4096, size=224, classes=1000):
        kernel = {"kernel_init": nnx.initializers.he_normal(), "rngs": rngs}
        self.ends = np.cumsum(depths).tolist()
        widths = [3, *np.repeat([width, 2 * width, 4 * width, 8 * width, 8 * width], depths).tolist()]
        self.convs = nnx.List([nnx.Conv(*ends, (3, 3), **kernel) for ends in pairwise(widths)])
        widths = [widths[-1] * (size // 32) ** 2, dense, dense, classes]
        self.dense = nnx.List([nnx.Linear(*ends, **kernel) for ends in pairwise(widths)])

    def __call__(self, images):
        def conv(i, x):
            x = nnx.relu(self.convs[i](x))
            return nnx.max_pool(x, (2, 2), strides=(2, 2)) if i + 1 in self.ends else x

        first, second, classes = self.dense
        pieces = [partial(conv, i) for i in range(len(self.convs))]
        pieces += [lambda x: nnx.relu(first(x.reshape(len(x), -1))), lambda x: nnx.relu(second(x)), classes]
        return jp.pipelined(pieces, images)


# %% [markdown]
# **Profile, cut.** `jaxpar partition` does that for a job. It traces the loss and makes no weights, so it can take the
# published network. A roofline of an H100 gives the seconds of each piece; then PipeDream's algorithm finds the cut and
# the replicas together.
#
# **Predict.** For eight machines with 100 Gb/s between them: 7-1, cut between the convolutions and the dense layers. Data
# parallelism sends all gradients; of 7-1, PipeDream says that it sends those of the convolutions, and activations at the cut.


# %%
def images(examples=1, size=224, classes=1000):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(examples, size, size, 3)).astype(np.float32)
    yield {"inputs": inputs, "labels": rng.integers(0, classes, examples).astype(np.int32)}


IMPORTS = """import numpy as np, jaxpar as jp
from flax import nnx
from functools import partial
from itertools import pairwise
"""
JOB = """model.name = "vgg:VGG"
data.source = "vgg:images"
optimizer = {name = "sgd", learning_rate = 0.01}
train = {global_batch = 1, steps = 1, loss = "jaxpar:classification_loss"}
"""

# %% [markdown]
# The two cells above become the module `vgg`, which the job names. `--write cut.toml` would write the job that trains so.

# %%
folder = Path(tempfile.mkdtemp())
cells = [inspect.findsource(function)[0] for function in (VGG.__call__, images)]
(folder / "vgg.py").write_text(IMPORTS + "".join(cells[0] + cells[1]))
(folder / "job.toml").write_text(JOB)
command = "-m jaxpar partition job.toml 8@100Gb/s --rows 32 --allow-import --json plan.json".split()
subprocess.run([sys.executable, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
plan = json.loads((folder / "plan.json").read_text())

# %%
stages = plan["stages"]
work, weights = [each["computes"] * each["replicas"] for each in stages], [each["parameters"] for each in stages]
print(plan["name"])
for stage, seconds, size in zip(stages, work, weights, strict=True):
    shares = f"{seconds / sum(work):5.1%} of the work, {size / sum(weights):5.1%} of the weights"
    print(f"  {len(stage['layers']):>2} pieces, replicas: {stage['replicas']}, {shares}")
assert (plan["name"], [len(stage["layers"]) for stage in stages]) == ("7-1", [13, 3])

# %% [markdown]
# As predicted: seven of eight devices go where most of the work is, and few of the weights.
#
# **Replicate, run.** `stages=(5, 3), replicas=(7, 1)` is that cut of a narrow VGG with one convolution between pools. A tick
# handles a group of 7 microbatches: one on each device of stage 0, all of them on the device of stage 1.
#
# **Predict.** The losses are those of plain Flax and optax on one device, where `jp.pipelined` runs the pieces one by one.

# %%
small_vgg = partial(VGG, depths=(1, 1, 1, 1, 1), width=4, dense=352, size=32, classes=10)
pictures, small_sgd = next(images(112, size=32, classes=10)), optax.sgd(0.01)
seven_one = jp.Pipeline(stages=(5, 3), replicas=(7, 1), microbatches=14)
layouts = {"data=8": jp.compose(small_vgg, jp.Parallel(data=8))}
layouts["7-1"] = jp.compose(small_vgg, jp.Parallel(pipe=8, pipeline=seven_one))
programs = {name: jp.train_step(each, jp.classification_loss, small_sgd) for name, each in layouts.items()}
state, losses = jp.init_state(layouts["7-1"], small_sgd, seed=0), []
network = nnx.eval_shape(lambda: small_vgg(nnx.Rngs(0)))
nnx.update(network, nnx.restore_int_paths(jax.device_get(state.params)))  # Flax begins with the same weights
optimizer = nnx.Optimizer(network, small_sgd, wrt=nnx.Param)


# %%
@nnx.jit
def flax_step(network, optimizer):
    def mean(network):
        logits = network(pictures["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, pictures["labels"]).mean()

    loss, gradients = nnx.value_and_grad(mean)(network)
    optimizer.update(network, gradients)
    return loss


flax_losses = np.array([flax_step(network, optimizer) for _ in range(4)])
for _ in flax_losses:
    state, metrics = programs["7-1"](state, pictures)
    losses.append(float(metrics["loss"]))
gap = np.abs(losses - flax_losses).max()
print(f"Flax: loss {flax_losses[0]:.3f} ... {flax_losses[-1]:.3f}; 7-1 differs by at most {gap:.1e}")
np.testing.assert_allclose(losses, flax_losses, rtol=1e-5)

# %% [markdown]
# **Compare the bytes.** The convolutions have $C$ bytes of weights, the dense layers $D$. At the cut a batch has $A$ bytes of
# activations: 32 floats for each image.
#
# **Predict** what a device sends in a step, on average. Data parallelism: an all-reduce of all gradients, $2 \cdot \frac78
# (C + D)$. PipeDream's 7-1: an all-reduce of $C$ among seven, and across the cut $A$ forward and $A$ backward, so $(7 \cdot
# 2 \cdot \frac67 C + 2A)/8$. **Measure** in the compiled programs.

# %%
C, D = (sum(leaf.nbytes for leaf in jax.tree.leaves(state.params[name])) for name in ("convs", "dense"))
A = len(pictures["labels"]) * 32 * 4
ledgers = {name: jp.inspect(program, pictures).ledger for name, program in programs.items()}


def by_kind(ledger):
    return {kind: sum(e.step_wire for e in ledger if e.kind == kind) for kind in {e.kind for e in ledger}}


traffic = {
    "data=8": by_kind(ledgers["data=8"]),
    "7-1, predicted": {"all-reduce": 7 * 2 * 6 / 7 * C / 8, "collective-permute": 2 * A / 8},
    "7-1": by_kind(ledgers["7-1"]),
}

# %%
figure, ax = plt.subplots(figsize=(9, 2.4), dpi=110, layout="constrained")
left = np.zeros(len(traffic))
for kind in ("all-reduce", "collective-permute", "all-to-all"):
    sizes = [kinds.get(kind, 0) / 1024 for kinds in traffic.values()]
    ax.barh([*traffic], sizes, left=left, label=kind)
    left += sizes
for y, total in enumerate(left):
    ax.text(total, y, f"  {total:.4g}", va="center")
ax.set(title="What a device sends in a step", xlabel="KiB", ylim=(2.5, -0.5), xlim=(0, 1.1 * left.max()))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# Data parallelism sends what was predicted, and 7-1 nearly as much. **Explain the gap.** In PipeDream the last device alone
# has the dense weights, and they never travel. jaxpar stores each parameter split over `pipe`, so that optimizers and
# checkpoints know of no stages. Once per step an all-to-all brings every stage the weights that it reads, and another
# brings the gradients back. Messages of an all-to-all have one size, here an eighth of the dense layers, also those to
# the seven devices that read none of them: a device sends $2 \cdot \frac78 D$, as in an all-reduce of $D$. Without
# padding the average would be $2 \cdot \frac78 (7 C + D)/8$. And the program sends activations in every tick, though
# across the cut they are due once for each group and direction.

# %%
split = D - 4 * 10  # the 10 biases of the last layer are not split
assert [entry.payload for entry in ledgers["7-1"] if entry.kind == "all-to-all"] == [split, split]
groups, ticks = 14 // 7, len(layouts["7-1"].schedule.cells)
assert traffic["7-1"]["collective-permute"] == 2 * A / 8 * ticks / groups
totals = {name: sum(kinds.values()) for name, kinds in traffic.items()}
np.testing.assert_allclose(totals["data=8"], 2 * 7 / 8 * (C + D), rtol=1e-3)
saving, share = 1 - totals["7-1"] / totals["data=8"], C / (C + D)
assert 0 < saving < share
print(f"7-1 sends {saving:.1%} less than data=8; the convolutions have {share:.1%} of the weights")
padded, useful = traffic["7-1"]["all-to-all"] / 1024, 2 * 7 / 8 * (7 * C + D) / 8 / 1024
print(f"all-to-alls send {padded:.4g} KiB; without padding {useful:.4g} KiB")
print(f"activations and their gradients: {2 * A / 8 / 1024:.4g} KiB due, sent {ticks / groups:.0f} times")

# %% [markdown]
# So jaxpar's 7-1 sends less than data parallelism, but saves no more than the gradients of the convolutions. Those of the
# dense layers, which PipeDream's plan saves, are traded for messages of the same size.
#
# ## 12. No flush
#
# All of the tables above drain before the update. PipeDream ([Narayanan et al. 2019](https://arxiv.org/abs/1806.03377))
# does not wait: every microbatch is a batch of its own, and a stage updates its weights right after each backward. Then a
# stage has changed them between a microbatch's forward and its backward. `weights` says what is done about it:
#
# * `stash`: keep the weights of each forward for its backward;
# * `vertical`: and go forward with those that were the newest on stage 0 when the microbatch came in;
# * `2bw`: update once for every $P$ microbatches, and read the weights of the batch before last;
# * `none`: nothing.
#
# **Predict** how many updates are in the weights that stage $d$ uses for microbatch $m$: at first 0, and then $m - (P-1-d)$
# with `stash`, $m - (P-1)$ with `vertical`.

# %%
for weights in ("stash", "vertical", "2bw"):
    print(f"{weights}: updates in the weights of microbatches 0 to 11")
    for stage, versions in enumerate(history(jp.schedule("1f1b", stages=4, microbatches=12), weights)):
        print(f"  stage {stage}   {' '.join(map(str, versions))}")

# %% [markdown]
# As predicted. The last stage is never late, the first one by 3. With `vertical` and `2bw` all stages agree, so there is a
# formula for what they train: $w_{t+1} = w_t - \eta \nabla f_t(w_{t-3})$, and with $t-1$ in place of $t-3$ for `2bw`, whose
# $f_t$ is the loss of 4 microbatches. One device can do that in a loop, with steps of plain SGD: a step from $w_{t-3}$
# says what the gradient there is.


# %%
sgd = optax.sgd(0.1)
plain = jp.train_step(alone, jp.next_token_loss, sgd)
begun = replace(start, optimizer=sgd.init(start.params), exchange=())
new = jax.device_get(begun)


def loop(late, microbatches=1):
    kept, data = [new.params], batch(0)
    for t in range(8 // microbatches):
        old = kept[max(0, t - late)]
        mine = {key: value[np.arange(64) % 8 // microbatches == t] for key, value in data.items()}
        moved, _ = plain(jax.device_put(replace(new, params=old), jax.devices()[0]), mine)
        kept.append(jax.tree.map(lambda w, a, b: w + (a - b), kept[-1], jax.device_get(moved.params), old))
    return replace(new, params=kept[-1])


# %% [markdown]
# **Predict** which of the four equals which loop after a step of 8 microbatches.

# %%
loops = {"no delay": loop(0), "3 late": loop(3), "4 at once, 1 late": loop(1, microbatches=4)}
rules = ("stash", "vertical", "2bw", "none")
steps = {weights: jp.train_step(layout(schedule="1f1b", weights=weights), jp.next_token_loss, sgd) for weights in rules}
print(f"{'parameters differ by':<22}" + "".join(f"{name:>20}" for name in loops))
for weights, step in steps.items():
    _, state = train(step, begun, updates=1)
    print(f"  {weights:<20}" + "".join(f"{apart(state, other):20.1e}" for other in loops.values()))

# %% [markdown]
# **Explain the gap.** `vertical` and `2bw` are what their formulas say. `stash` is neither, nor is it plain SGD: each stage is
# late by another number. It is the gradient of one function all the same, at mixed weights: those of the first table of this
# section. `none` is the gradient of none: its forward and its backward belong to different functions. Does a loss show it?
#
# **Predict.** Three updates change little in the weights, so `none` should stay close to `stash`, and being later should cost
# `vertical` some of the progress. `2bw` makes 2 updates in a step where the others make 8.

# %%
figure, ax = plt.subplots(figsize=(9, 3.4), dpi=110, layout="constrained")
for weights, look in zip(rules, ("-", "-", "-", "k:"), strict=True):
    losses, _ = train(steps[weights], begun, updates=40)
    ax.plot(losses, look, label=f"{weights}: {losses[-1]:.3f} at the end")
ax.set(title="Four rules, the same data and rate", xlabel="step of 8 microbatches", ylabel="nats per token")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# As predicted, and the dotted line lies on that of `stash`: here, at this rate, a loss curve does not tell a right gradient
# from a wrong one. Comparing parameters does: jaxpar's tests replay `stash` on one device, microbatch by microbatch.
#
# ## What to try next
#
# * `sgd = optax.sgd(1.0)`: whose curve breaks first?
# * `keep="residuals"` in section 9: what does one more microbatch cost now?
# * `jaxpar schedule --compare --stages 8 --microbatches 16 --times 1,1.14,0.86,0.1`: who minds messages?
# * `jaxpar schedule 1f1b --stages 4 --microbatches 8 --csv own.csv`, move two cells, `jp.Pipeline(schedule="own.csv")`.
