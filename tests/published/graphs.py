"""Models of graphs, of rewards and of words, as their authors write them, and small. None knows of jaxpar.

GraphNet      linen   jraph's: edges, nodes and globals updated in turn, all graphs of a batch in one
GCN           nnx     normalized sums over neighbours
ActorCritic   linen   PPO: one torso, a head of policy and one of value; a clipped ratio
DuelingDQN    nnx     two heads; a target network that is frozen
Word2Vec      nnx     skip-grams with negative samples: two tables and nothing else
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from published.example import ROWS, Example, cross_entropy, hits

NODES, EDGES = 4, 8  # of each graph


class MLP(nn.Module):
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for size in self.sizes:
            x = nn.LayerNorm()(nn.relu(nn.Dense(size)(x)))
        return x


class GraphNet(nn.Module):
    """Sums messages along edges; `graph_of` says of which graph each node is."""

    latent: int = 16

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers, graph_of, graphs: int):
        nodes, edges = nn.Dense(self.latent)(nodes), nn.Dense(self.latent)(edges)
        shared = jnp.zeros((graphs, self.latent))
        for _ in range(2):
            given = jnp.concatenate([edges, nodes[senders], nodes[receivers], shared[graph_of[senders]]], axis=-1)
            edges = edges + MLP((self.latent,))(given)
            sent = jax.ops.segment_sum(edges, senders, num_segments=len(nodes))
            received = jax.ops.segment_sum(edges, receivers, num_segments=len(nodes))
            nodes = nodes + MLP((self.latent,))(jnp.concatenate([nodes, sent, received, shared[graph_of]], axis=-1))
            pooled = [
                jax.ops.segment_sum(nodes, graph_of, num_segments=graphs),
                jax.ops.segment_sum(edges, graph_of[senders], num_segments=graphs),
            ]
            shared = shared + MLP((self.latent,))(jnp.concatenate([*pooled, shared], axis=-1))
        return nn.Dense(1, name="decoder")(shared)[:, 0]


def graph_loss(model, batch):
    parts = (batch[name] for name in ("nodes", "edges", "senders", "receivers", "graph_of"))
    logits = model(*parts, len(batch["label"]))
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).sum(), len(logits)


def graphs(rng):
    """All graphs in one: edges name nodes by their place among those of all graphs."""
    first = NODES * np.repeat(np.arange(ROWS), EDGES)
    return {
        "nodes": rng.normal(size=[ROWS * NODES, 8]).astype(np.float32),
        "edges": rng.normal(size=[ROWS * EDGES, 4]).astype(np.float32),
        "senders": (first + rng.integers(0, NODES, ROWS * EDGES)).astype(np.int32),
        "receivers": (first + rng.integers(0, NODES, ROWS * EDGES)).astype(np.int32),
        "graph_of": np.repeat(np.arange(ROWS), NODES).astype(np.int32),
        "label": rng.integers(0, 2, ROWS).astype(np.float32),
    }


class GCN(nnx.Module):
    def __init__(self, features=8, hidden=16, classes=4, *, rngs: nnx.Rngs):
        self.conv1, self.conv2 = nnx.Linear(features, hidden, rngs=rngs), nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, nodes, senders, receivers):
        degree = jax.ops.segment_sum(jnp.ones(len(senders)), receivers, num_segments=len(nodes)) + 1
        scale = jax.lax.rsqrt(degree)[:, None]

        def spread(x):
            x = x * scale
            return scale * (x + jax.ops.segment_sum(x[senders], receivers, num_segments=len(nodes)))

        x = nnx.relu(spread(self.conv1(nodes)))
        return spread(self.conv2(x))


def node_loss(model, batch):
    logits = model(batch["nodes"], batch["senders"], batch["receivers"])
    losses = cross_entropy(logits, batch["graph_of"] % 4)
    return {"loss": (losses.sum(), losses.size), "accuracy": hits(logits, batch["graph_of"] % 4)}


class ActorCritic(nn.Module):
    actions: int = 4

    @nn.compact
    def __call__(self, frames):
        x = frames.astype(jnp.float32) / 255.0
        x = nn.relu(nn.Conv(8, (4, 4), strides=(2, 2), name="conv1")(x))
        x = nn.relu(nn.Conv(16, (3, 3), strides=(1, 1), name="conv2")(x))
        x = nn.relu(nn.Dense(32, name="hidden")(x.reshape((x.shape[0], -1))))
        return nn.log_softmax(nn.Dense(self.actions, name="logits")(x)), nn.Dense(1, name="value")(x)


def ppo_loss(model, batch):
    log_probs, values = model(batch["frames"])
    probs, values = jnp.exp(log_probs), values[:, 0]
    entropy = jnp.sum(-probs * log_probs, axis=1).sum()
    taken = jax.vmap(lambda row, action: row[action])(log_probs, batch["actions"])
    ratios = jnp.exp(taken - batch["old_log_probs"])
    gains = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
    clipped = gains * jnp.clip(ratios, 0.8, 1.2)
    policy = -jnp.sum(jnp.minimum(ratios * gains, clipped))
    value = jnp.sum(jnp.square(batch["returns"] - values))
    losses = {"loss": policy + 0.5 * value - 0.01 * entropy, "policy": policy, "value": value, "entropy": entropy}
    return {name: (loss, len(values)) for name, loss in losses.items()}


def played(rng):
    return {
        "frames": rng.integers(0, 256, [ROWS, 8, 8, 4]).astype(np.uint8),
        "actions": rng.integers(0, 4, ROWS).astype(np.int32),
        "old_log_probs": np.log(rng.random(ROWS, np.float32) + 0.1),
        "advantages": rng.normal(size=ROWS).astype(np.float32),
        "returns": rng.normal(size=ROWS).astype(np.float32),
    }


class QNetwork(nnx.Module):
    def __init__(self, seen: int, actions: int, *, rngs: nnx.Rngs):
        self.torso = nnx.Linear(seen, 32, rngs=rngs)
        self.value, self.advantage = nnx.Linear(32, 1, rngs=rngs), nnx.Linear(32, actions, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.torso(x))
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(axis=-1, keepdims=True)


class DuelingDQN(nnx.Module):
    def __init__(self, seen=8, actions=4, *, rngs: nnx.Rngs):
        self.online, self.target = (QNetwork(seen, actions, rngs=rngs) for _ in range(2))


def dqn_loss(model, batch):
    """The online network picks the next action, the target says its value."""
    values = jnp.take_along_axis(model.online(batch["state"]), batch["action"][:, None], axis=1)[:, 0]
    best = jnp.argmax(model.online(batch["next"]), axis=-1)
    later = jnp.take_along_axis(model.target(batch["next"]), best[:, None], axis=1)[:, 0]
    wanted = batch["reward"] + 0.99 * (1 - batch["done"]) * later
    return optax.huber_loss(values, jax.lax.stop_gradient(wanted)).sum(), len(values)


def transitions(rng):
    return {
        "state": rng.normal(size=[ROWS, 8]).astype(np.float32),
        "next": rng.normal(size=[ROWS, 8]).astype(np.float32),
        "action": rng.integers(0, 4, ROWS).astype(np.int32),
        "reward": rng.normal(size=ROWS).astype(np.float32),
        "done": rng.integers(0, 2, ROWS).astype(np.float32),
    }


class Word2Vec(nnx.Module):
    def __init__(self, vocab=64, dim=16, *, rngs: nnx.Rngs):
        self.center = nnx.Embed(vocab, dim, embedding_init=nnx.initializers.normal(0.3), rngs=rngs)
        self.outside = nnx.Embed(vocab, dim, embedding_init=nnx.initializers.normal(0.3), rngs=rngs)

    def __call__(self, center, words):
        return jnp.einsum("bd,bkd->bk", self.center(center), self.outside(words))


def skipgram_loss(model, batch, key):
    """The word that stands there, and five drawn at random that do not."""
    center, near = batch["words"][:, 0], batch["words"][:, 1]
    drawn = jax.random.randint(key, (len(center), 5), 0, 64)
    right = model(center, near[:, None])[:, 0]
    wrong = model(center, drawn)
    losses = -jax.nn.log_sigmoid(right) - jax.nn.log_sigmoid(-wrong).sum(axis=-1)
    return losses.sum(), losses.size


def words(rng):
    return {"words": rng.integers(0, 64, [ROWS, 2]).astype(np.int32)}


ADAM = optax.adam(3e-3, eps=1e-4)
EXAMPLES = {
    "graph net": Example(
        module=GraphNet(),
        loss=graph_loss,
        batch=graphs,
        inputs=lambda batch: (
            *(batch[name] for name in ("nodes", "edges", "senders", "receivers", "graph_of")),
            len(batch["label"]),
        ),
        optimizer=ADAM,
    ),
    "gcn": Example(module=GCN, loss=node_loss, batch=graphs, optimizer=ADAM),
    "ppo": Example(
        module=ActorCritic(), loss=ppo_loss, batch=played, inputs=lambda batch: (batch["frames"],), optimizer=ADAM
    ),
    "dqn": Example(
        module=DuelingDQN,
        loss=dqn_loss,
        batch=transitions,
        optimizer=optax.multi_transform(
            {"online": ADAM, "target": optax.set_to_zero()}, {"online": "online", "target": "target"}
        ),
    ),
    "word2vec": Example(module=Word2Vec, loss=skipgram_loss, batch=words, optimizer=optax.adagrad(0.1)),
}
