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
# # How replicas agree
#
# Replicas of a model see different examples, and must come to agree. The first half is about messages: the lessons that MPI
# begins with, as programs for eight devices. The second half is about what to send: everything in every step, or less,
# or less often. Each section predicts, runs, and explains the gap.
#
# The networks are small: one for handwritten digits, and a decoder for text. The devices are simulated on one processor.
# Messages, bytes and losses are those of real devices; times would not be, and the few that are here come from formulas.

# %%
import jaxpar as jp

jp.simulate(8)  # before anything else uses JAX

from functools import partial

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

from jaxpar.exchange import (
    AsynchronousEasgd,
    Downpour,
    Exponential,
    Link,
    Stale,
    TwoLevels,
    WorkerTimes,
    algorithms,
    contraction,
    mean_staleness,
    programs,
    ring,
)  # fmt: skip
from jaxpar.train import race, virtual_clock

# %% [markdown]
# ## 1. Ranks
#
# In MPI every process runs the same program, and asks for its *rank* to know which one it is. In JAX the program of each device
# is the function given to `shard_map`, and its rank is `axis_index`. We take four devices; each begins with one row of `x`, and we
# look at what each ends with.

# %%
mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))


def on_each(program, x):
    """Runs a program on each device with its row of x, and returns what each ends with, by name."""
    rows = jax.P("data")

    def row(x):
        return {name: value[None] for name, value in program(x[0]).items()}

    return jax.device_get(jax.jit(jax.shard_map(row, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))(x))


def rank(x):
    r = jax.lax.axis_index("data")
    return {"rank": r, "x times rank": x * r}


x = np.array([1, 2, 3, 4])
for name, ends in on_each(rank, x).items():
    print(f"{name:<13}{ends}")

# %% [markdown]
# ## 2. Send and receive
#
# An MPI process calls `send`, another one `recv`, and if one of the two calls is forgotten the other waits for ever. Here one line says
# who sends to whom, all devices run it, and it is compiled to one `ppermute`.
#
# **Predict.** Rank 0 sends its 1 to rank 3. The others keep what they have.

# %%
print(on_each(lambda x: {"sent": programs.send(x, "data", source=0, target=3)}, x)["sent"])

# %% [markdown]
# ## 3. One to all, all to one
#
# `broadcast` gives the root's array to all, `reduce` gives the root the sum. Both go along a tree: with $P$ devices they take
# $P - 1$ messages in $\lceil \log_2 P \rceil$ rounds. `scatter` gives each device its part of the root's array, and `gather`
# brings one from each back. Below, rank 0
# begins with 10 11 12 13, rank 1 with 20 21 22 23, and so on; all but `scatter` take the first number of it.
#
# **Predict** each line before you read it.


# %%
def rooted(x):
    own = x[0]  # the rest is what rank 0 scatters
    return {
        "broadcast": programs.broadcast(own, "data"),
        "reduce": programs.reduce(own, "data"),
        "scatter": programs.scatter(x, "data"),
        "gather": programs.gather(own, "data"),
    }


for name, ends in on_each(rooted, 10 * x[:, None] + np.arange(4)).items():
    print(f"{name:<10}{ends.tolist()}")

# %% [markdown]
# After a reduction only the root knows the sum, which is why it is not enough for training: all replicas need it.
#
# ## 4. All-reduce
#
# **Predict.** Everyone ends with $1 + 2 + 3 + 4$. A reduction and a broadcast would do it (`tree`), and are not the best way: half of the
# devices have nothing to do in the first round, and three quarters in the second. In a ring all send all the time, pieces of
# a $P$-th: $2(P-1)$ rounds, in which each device sends $2\,\frac{P-1}{P}$ of the array.


# %%
def sums(x):
    return {name: programs.all_reduce(x, "data", algorithm=name) for name in algorithms.ALL_REDUCE}


for name, ends in on_each(sums, np.repeat(x[:, None], 4, axis=1)).items():  # four elements on each device
    rounds = algorithms.all_reduce_rounds(name, 4, 4)
    sent = [sum(m.size for messages in rounds for m in messages if m.source == device) for device in range(4)]
    print(f"{name:<11} {len(rounds)} rounds, at most {max(sent)} elements from a device; ends: {np.unique(ends)}")

# %% [markdown]
# As predicted: 6 elements are $2 \cdot \frac34 \cdot 4$, and less is not possible. A butterfly has the fewest rounds but sends everything in
# each of them; `halving`, Rabenseifner's, sends no more than the ring, in fewer rounds.
#
# **Predict** which is best for what. A round costs some microseconds whatever it carries, and then its bytes. So few rounds are
# best for small arrays, and few bytes for large ones.

# %%
link = Link(latency=5e-6, bandwidth=12e9)  # a formula with the numbers of an ordinary fast network, not measured
sizes = np.geomspace(1e3, 1e9, 25)
figure, ax = plt.subplots(figsize=(8, 3.4), dpi=110, layout="constrained")
for name in algorithms.ALL_REDUCE:
    rounds = algorithms.all_reduce_rounds(name, 64, 64)
    seconds = np.array([algorithms.seconds(rounds, link, item=size / 64) for size in sizes])
    ax.loglog(sizes, seconds * 1e3, label=name)
ax.set(title="All-reduce between 64 devices, modelled", xlabel="bytes", ylabel="milliseconds")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# As predicted. XLA and NCCL choose among such algorithms themselves; jaxpar lets you choose one for what it averages
# (`jp.Exchange("diloco", algorithm="tree")`), and `jaxpar exchange collective ring --devices 3` shows any of them message by
# message.
#
# ## 5. Training: everything, in every step
#
# From here on eight replicas train a small network on scikit-learn's 1,797 handwritten digits, 64 of them in a step.


# %%
class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in ((64, 128), (128, 128), (128, 10))])

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


STEPS, BATCH = 100, 64
digits = jp.open_data(jp.Data(source="digits", held_out=0.2))
sgd = optax.sgd(0.3)

# %% [markdown]
# `layout.replica_messages()` says what the replicas send each other. We count the bytes that a device puts on the wire in a step, and how far apart the
# replicas are: the distance of their parameters from their mean.


# %%
def spread(params):
    """Returns how far replicas are from their mean, relative to its length; 0 where there is one copy for all."""
    each = [np.asarray(leaf) for leaf in jax.tree.leaves(params) if leaf.ndim]
    mean = sum(np.square(x.mean(0)).sum() for x in each)
    return np.sqrt(sum(np.square(x - x.mean(0)).sum() / len(x) for x in each) / mean)


def train(exchange, watch=False):
    layout = jp.compose(Net, jp.Parallel(data=8, exchange=exchange))
    step, state, losses, apart = jp.train_step(layout, jp.classification_loss, sgd), jp.init_state(layout, sgd), [], []
    for i in range(STEPS):
        state, metrics = step(state, digits.batch(i, BATCH))
        losses.append(float(metrics["loss"]))
        apart += [spread(state.params)] if watch else []
    sent = sum(each.collective.step_wire / max(each.every, 1) for each in layout.replica_messages())
    return np.array(losses), sent, np.array(apart)


def end(losses):
    return losses[-20:].mean()


# %% [markdown]
# **Predict.** The network has $64 \cdot 128 + 128 + 128 \cdot 128 + 128 + 128 \cdot 10 + 10 = 26{,}122$ parameters. In float32, and by a ring, a
# device sends $2 \cdot \frac78 \cdot 4$ bytes for each: 182,854 bytes in each step.

# %%
METHODS = {
    "all-reduce": jp.Exchange("all_reduce"),
    "local, every 10": jp.Exchange("local", every=10),
    "DiLoCo, every 10": jp.Exchange("diloco", every=10),
    "gossip on a ring": jp.Exchange("gossip", graph="ring"),
    "top 1 %": jp.Exchange("topk", share=0.01),
    "top 1 %, forgetting": jp.Exchange("topk", share=0.01, feedback=False),
}
runs = {"all-reduce": train(METHODS["all-reduce"])}


def report(*names):
    for name in names:
        losses, sent, _ = runs[name]
        print(f"{name:<20} loss {end(losses):.4f} at the end, {sent / 1024:>7.4g} KiB a step from each device")


report("all-reduce")

# %% [markdown]
# As predicted, to the byte.
#
# ## 6. Less often
#
# `local` (model averaging, or local SGD: [Stich 2019](https://arxiv.org/abs/1805.09767)) lets each replica make steps of its own,
# and every so many they take their mean. DiLoCo ([Douillard et al. 2023](https://arxiv.org/abs/2311.08105)) takes the way that
# the mean has gone since the last meeting for a gradient, and gives it to an outer optimizer: SGD with a rate of 0.7 and
# Nesterov's momentum of 0.9.
#
# **Predict.** A meeting every 10 steps costs what an all-reduce costs, so a tenth of the bytes. The replicas drift apart between
# meetings, and then are one again: a saw with teeth of 10.
#
# Gossip ([Lian et al. 2017](https://arxiv.org/abs/1705.09056)) never takes the mean of all: in each step a replica averages
# with its two neighbours on a ring. **Predict.** That keeps the mean of all, and takes away some of what they differ by, less of what is
# the same among neighbours. What stays after one meeting of eight is at worst $(1 + 2\cos(2\pi/8))/3 = 0.805$ of it. As
# each step adds new differences, they should neither grow for ever nor vanish.

# %%
print(f"a ring of 8 keeps {contraction(ring(8)):.3f} of the slowest difference")
for name in ("local, every 10", "DiLoCo, every 10", "gossip on a ring"):
    runs[name] = train(METHODS[name], watch=name != "DiLoCo, every 10")
report(*runs)

# %%
figure, ax = plt.subplots(figsize=(8, 3.0), dpi=110, layout="constrained")
for name in ("local, every 10", "gossip on a ring"):
    ax.plot(np.arange(1, STEPS + 1), 100 * runs[name][2], label=name)
ax.set(title="How far apart eight replicas are", xlabel="step", ylabel="% of the parameters' length", ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# As predicted: teeth of 10, and a plateau. A neighbour is heard in every step, at the price of all parameters to two of them: a little
# more than an all-reduce.
#
# With equal examples, `local` is behind: the mean of eight ways is about as long as one of them, so eight replicas are hardly faster than
# one with less noise. (Its loss is also that of replicas before they meet, each by itself.) DiLoCo's outer momentum goes on where all
# agree, and is nearly where the all-reduce is, for a tenth of the bytes.
#
# ## 7. Less of it
#
# Gradients can be compressed instead. 1-bit SGD ([Seide et al. 2014](https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html))
# sends the sign of each element and one scale for many, and *remembers* what that loses, to add it to the next gradient: error
# feedback. TernGrad ([Wen et al. 2017](https://arxiv.org/abs/1705.07878)) draws -1, 0 or 1 at random, right in the mean, and
# has nothing to remember. Here we send the largest hundredth of the elements
# ([Stich et al. 2018](https://arxiv.org/abs/1809.07599)), with a memory and without.
#
# **Predict.** Of a block of 1,024 elements 10 travel, each 4 bytes and 2 for its place: 60 bytes instead of 4,096, a
# 68th. The two matrices of 8,192 and 16,384 elements are compressed, the biases and the small last layer are not: 1,546 numbers
# that go whole.
#
# **Predict** who trains. What was not sent is not lost with a memory: it waits until it is among the largest. Without one an element that
# is never among the largest never learns.

# %%
for name in ("top 1 %", "top 1 %, forgetting"):
    runs[name] = train(METHODS[name])
report("all-reduce", "top 1 %", "top 1 %, forgetting")
whole = 128 + 128 + 10 + 1280
print(f"of that the part that goes whole: {2 * 7 / 8 * 4 * whole / 1024:.4g} KiB")

# %% [markdown]
# As predicted. Most of what still travels is the part that goes whole; in a large model that is next to nothing. A memory has a price as
# well: an element may wait a hundred steps, and then comes late. With momentum on top, or at a rate near the largest possible one, late
# gradients do harm (sections 9 and 10).
#
# ## 8. Against examples, and against bytes
#
# Every method saw the same examples in the same order. **Predict** who is first on the left, where the axis is examples, and who on
# the right, where it is bytes.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), dpi=110, sharey=True, layout="constrained")
at = np.arange(1, STEPS + 1)
for name, (losses, sent, _) in runs.items():
    smooth = [losses[max(0, i - 9) : i + 1].mean() for i in range(STEPS)]
    axes[0].semilogy(at * BATCH, smooth, lw=1.3)
    axes[1].loglog(at * sent, smooth, lw=1.3, label=name)
axes[0].set(title="Equal examples", xlabel="examples", ylabel="loss, mean of 10 steps")
axes[1].set(title="Equal bytes", xlabel="bytes a device has sent")
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
axes[0].minorticks_off()
figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
plt.show()

# %% [markdown]
# With equal examples the all-reduce leads, the top hundredth with a memory beside it. With equal bytes the order turns: what sends a
# tenth is ahead by ten times, and gossip on a ring is last, as it sends most. On fast links the left picture counts, on slow links the
# right one.
#
# ## 9. On text, and with Adam
#
# A decoder of two layers reads the source code of Python byte by byte, in the same eight replicas. It trains by plain SGD
# and by Adam, with all gradients, with the sign of each (a bit, and one scale for 1,024 of them) and a memory, and with signs
# alone.
#
# **Predict.** An update of SGD is linear in the gradient: what comes a few steps late is added up as if it had come in time. Adam
# divides each element by how large its gradients have been of late. A memory that is let go makes them large by jumps, so what is late
# is not added up. With SGD the memory should help, with Adam do harm.

# %%
decoder = partial(jp.Decoder, jp.DecoderConfig(layers=2, dim=32, heads=2, seq=64))
text = jp.open_data(jp.Data(seq=64))
SENT = {
    "all of it": jp.Exchange("all_reduce"),
    "signs": jp.Exchange("sign"),
    "signs, forgetting": jp.Exchange("sign", feedback=False),
}
RATES = {"SGD": optax.sgd(0.3), "Adam": optax.adam(4e-3)}


def read(exchange, optimizer):
    """Returns the losses of 80 steps of 16 sequences."""
    layout = jp.compose(decoder, jp.Parallel(data=8, exchange=exchange))
    step, state, losses = jp.train_step(layout, jp.next_token_loss, optimizer), jp.init_state(layout, optimizer), []
    for i in range(80):
        state, metrics = step(state, text.batch(i, 16))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


curves = {name: {sent: read(exchange, rate) for sent, exchange in SENT.items()} for name, rate in RATES.items()}
for name, each in curves.items():
    print(name + ": " + ", ".join(f"{sent} {end(losses):.3f}" for sent, losses in each.items()))

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), dpi=110, sharey=True, layout="constrained")
for ax, (name, each) in zip(axes, curves.items(), strict=True):
    for sent, losses in each.items():
        smooth = [losses[max(0, i - 9) : i + 1].mean() for i in range(len(losses))]
        ax.plot(np.arange(1, len(losses) + 1), smooth, lw=1.3, label=sent)
    ax.set(title=name, xlabel="step")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("nats a byte, mean of 10 steps")
axes[1].legend(frameon=False)
plt.show()

# %% [markdown]
# With SGD as predicted: signs with a memory end where all of the gradient does, and signs alone far behind.
#
# **Explain the gap** with Adam: after 80 steps the memory has done no harm, and no good either; both are behind. Adam makes of signs, which
# all have one size, nearly what it makes of gradients, so that little was lost. In longer runs of a larger decoder the memory does
# harm: after 300 steps 1.59 times the loss of an all-reduce, without it 1.10 (`tests/bench/README.md`).
#
# ## 10. Late
#
# All of these wait for each other. Asynchronous SGD does not: a worker takes the newest parameters, computes a gradient, and its gradient
# is applied when it is finished, however many others were applied meanwhile. One JAX program on a mesh cannot be late, so jaxpar
# *simulates* who is when, on a virtual clock, and computes exactly what comes of it (`jaxpar exchange compare JOB --methods
# sync,async,ssp:3`).
#
# **Predict.** Eight workers that are alike: while one computes, each of the seven others finishes once, in the mean. A bound on
# how far the fastest may lead (stale-synchronous, [Ho et al. 2013](https://papers.nips.cc/paper/4894)) cannot make gradients
# fresher than it makes workers wait: with 0 all wait in every step, and nothing is stale.

# %%
times = WorkerTimes(law=Exponential(), compute=1.0)
for name, bound in (("asynchronous", None), ("a lead of 3", 3), ("a lead of 0", 0)):
    updates = Stale(bound=bound).updates(8, 2000, times)
    print(
        f"{name:<13} staleness {mean_staleness(updates):.2f}, {updates[-1].seconds:7.0f} virtual seconds for 16,000 gradients"
    )

# %% [markdown]
# As predicted for 7. Synchronous workers take 2.7 times as long: each step waits for the slowest of eight, which takes
# $1 + \frac12 + \dots + \frac18 = 2.72$ times the mean. A lead of 3 is between the two in both. Whether staleness costs more than
# waiting depends on the rate: on a parabola with curvature $\lambda$, gradients that are $\tau$ updates late converge only where
# $\eta\lambda < 2 \sin\frac{\pi}{2(2\tau + 1)}$: 2 for $\tau = 0$, and 0.21 for $\tau = 7$. Asynchronous SGD does converge, at a
# lower rate, and so more slowly per example.
#
# ## 11. A parameter server
#
# Before all-reduces there were parameter servers: workers fetch the parameters from a server, and push gradients to it. The server may
# be in shards, each with some of the parameters and versions of its own (DistBelief's *Downpour*, Dean et al. 2012), or in two
# levels. In *asynchronous elastic averaging* ([2014](https://arxiv.org/abs/1412.6651)) the server holds a center to which
# workers, each with parameters of its own, are drawn every so many steps. Here the eight workers have eight digits each, compute
# for a second in the mean, and a message takes a tenth of one.
#
# Every method has a rate at which one gradient moves the parameters by 0.05 of itself: where the server takes the mean of
# eight, the rate is 0.4. In elastic averaging each worker trains by itself, at 0.4.
#
# **Predict.** All see the same 2,560 digits. Who needs the least time for them, and who has the least loss at the end?

# %%
alone = jp.compose(Net, jp.Parallel(), jax.devices()[:1])
late = WorkerTimes(law=Exponential(), compute=1.0, travel=0.1)


def share(number):
    """Returns the eight digits of a worker's gradient."""
    batch = digits.batch(number // 8, BATCH)
    return {name: value[number % 8 * 8 :][:8] for name, value in batch.items()}


def simulate(method, rate):
    """Returns virtual seconds and loss of each update."""
    points, worker = [], jp.train_step(alone, jp.classification_loss, optax.sgd(rate))
    told = lambda update, loss: points.append((update.seconds, loss))  # noqa: E731
    if isinstance(method, AsynchronousEasgd):
        virtual_clock.run_elastic(worker, method.local_steps(8, 40, late), method.alpha(8), share, told)
    else:
        virtual_clock.run(worker, method.updates(8, 40, late), share, told)
    return np.array(sorted(points)).T


SERVERS = {
    "all wait for all, as an all-reduce": (Stale(bound=0), 0.4),
    "stale-synchronous, a lead of 3": (Stale(bound=3), 0.07),
    "asynchronous": (Stale(), 0.05),
    "Downpour, 3 shards": (Downpour(shards=3), 0.05),
    "two levels, 2 servers": (TwoLevels(servers=2), 0.2),
    "asynchronous EASGD, every 4": (AsynchronousEasgd(every=4), 0.4),
}
points = {name: simulate(*method) for name, method in SERVERS.items()}
for name, (seconds, losses) in points.items():
    print(
        f"{name:<36}{len(seconds):4} updates in {seconds[-1]:4.0f} virtual seconds, loss {losses[-len(losses) // 8 :].mean():.3f}"
    )

# %%
figure, ax = plt.subplots(figsize=(7.5, 3.6), dpi=110, layout="constrained")
for name, (seconds, losses) in points.items():
    window = max(1, len(losses) // 10)
    ax.plot(seconds, [losses[max(0, i + 1 - window) : i + 1].mean() for i in range(len(losses))], lw=1.3, label=name)
ax.set(xlabel="virtual seconds (modelled)", ylabel="loss, mean of a tenth of the updates")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# Who waits for all takes 124 virtual seconds, who waits for none 51: 2.7 times less but for the messages. With gradients
# that are seven updates late the loss is no worse here, as 0.05 is a rate at which they are stable. Two levels wait for four workers at a
# time, and are between. In elastic averaging the losses are of the workers' own parameters: each has made 40 steps, from 8 digits
# each, and is drawn to the others' center a ninth of the way every fourth step, so that it learns more slowly from the same digits, and
# sends a quarter.
#
# ## 12. Without locks
#
# On one machine workers may be threads, and the server its memory. *Hogwild!* ([Recht et al. 2011](https://arxiv.org/abs/1106.5730)) takes
# no locks at all: threads read parameters while others write them, and an update may overwrite another. This is not simulated: the
# threads below race on this notebook's processor.
#
# The paper's example is a sparse support vector machine: an example has few of many features, so that threads seldom write the
# same element.
#
# **Predict.** On sparse examples four threads reach what one reaches by as many updates. And with the network of section 5, in which
# every gradient changes every parameter, at a rate of 0.3?

# %%
rng = np.random.default_rng(0)
FEATURES, ACTIVE = 5_000, 10
truth = rng.normal(size=FEATURES).astype(np.float32)


class Margin(nnx.Module):
    def __init__(self, rngs):
        self.weights = nnx.Param(np.zeros(FEATURES, np.float32))

    def __call__(self, features, values):
        return (self.weights[...][features] * values).sum(-1)


def hinge(model, batch):
    """Returns the loss of a support vector machine, and the count of examples."""
    margins = model(batch["features"], batch["values"]) * batch["labels"]
    return jax.numpy.maximum(0, 1 - margins).sum(), margins.size


def sparse(number):
    """Returns 8 examples with few active features each."""
    rng = np.random.default_rng(number)
    features = np.stack([rng.choice(FEATURES, ACTIVE, replace=False) for _ in range(8)])
    values = rng.normal(size=features.shape).astype(np.float32)
    return {"features": features, "values": values, "labels": np.sign((truth[features] * values).sum(-1))}


margins = jp.train_step(jp.compose(Margin, jp.Parallel(), jax.devices()[:1]), hinge, optax.sgd(1.0))
network = jp.train_step(alone, jp.classification_loss, sgd)
for name, step, examples, rate in (("sparse", margins, sparse, 0.4), ("dense", network, share, 0.3)):
    for workers in (1, 4):
        result = race(step, examples, workers=workers, updates=1000, rate=rate)
        print(
            f"{name:<6} {workers} threads: loss {result.loss[-100:].mean():.2f}, elements that an update writes "
            f"{result.write_share.mean():4.0%}, updates of others meanwhile {result.staleness.mean():.0f}"
        )

# %% [markdown]
# As predicted on sparse examples: an update writes one element in seventy, and three others were made meanwhile, mostly of other
# elements. The dense network is hurt: gradients are three updates late at a rate at which that is too late, some writes undo others, and
# part of its units are dead at the end, so that their gradients are zero. A smaller rate helps; so does one thread. Two runs of this
# section differ, as threads race otherwise each time.
#
# ## What to try next
#
# * `jp.Exchange("diloco", every=10)` in section 9: is its outer momentum made for Adam, or for SGD?
# * `jp.Exchange("gossip", graph="exponential")` in section 6: whose replicas are closer?
# * `jp.Exchange("streaming", every=20, fragments=4)`: DiLoCo that sends a quarter of the layers at a time. This network has no stack
#   of layers; what is a fragment then?
# * `jaxpar exchange compare configs/digits.toml --methods sync,diloco:20,sign,ssp:3`: the same as one page, with virtual seconds.
