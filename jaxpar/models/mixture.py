"""A mixture of experts as a layer: a router, experts, and shared experts.

    x ─► router (float32) ─► scores ─► the best experts, and their weights ─► jp.mixture ─► + shared experts

The losses of a row depend on that row alone, so that they are the same on any mesh and in any microbatches.
"""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.blocks.attention_mask import Documents, apply_layer
from jaxpar.models.custom_gradients import activate
from jaxpar.models.dim_names import constrain
from jaxpar.models.experts import mixture
from jaxpar.models.layers import Block, BlockConfig, FeedForward, LayerKind, activate_gate, weight
from jaxpar.models.settings.decoder import Activation
from jaxpar.models.settings.experts import ExpertsConfig


class RouterSums(NamedTuple):
    """Sums of the routers, over tokens and layers so far.

    Attributes:
      losses: Balance loss and z-loss of each row, without their weights. Shape [batch, 2], float32.
      sent: Choices of each layer with experts. Shape [batch, layers with experts, experts], float32.
      lost: Spilled and dropped choices. Shape [batch, 2], float32.
    """

    losses: jax.Array
    sent: jax.Array
    lost: jax.Array

    @classmethod
    def zeros(cls, batch: int, layers: int, experts: int) -> "RouterSums":
        """The sums before the first layer."""
        arrays = (jnp.zeros((batch, *shape), jnp.float32) for shape in ((2,), (layers, experts), (2,)))
        return cls(*(constrain(x, "batch", *(None,) * (x.ndim - 1)) for x in arrays))


class LayerInputs(NamedTuple):
    """The inputs of a layer with a mixture, besides the stream.

    Attributes:
      key: Dropout key, or None.
      number: Number of the layer among those with experts.
      bias: Added to the scores for the choice of experts. Shape [experts], or None.
    """

    key: jax.Array | None
    number: jax.Array
    bias: jax.Array | None


class MixtureLayer(nnx.Module):
    """A router, its experts, and shared experts."""

    def __init__(self, s: BlockConfig, e: ExpertsConfig, *, rngs: nnx.Rngs):
        hidden = e.hidden or s.hidden
        into, out = 1 / math.sqrt(s.dim), s.out_scale / math.sqrt(hidden)
        rows, columns = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        self.settings = e
        self.activation: Activation = s.activation
        self.router = weight(rngs, (s.dim, e.count), ("embed", None), into)
        self.up = weight(rngs, (e.count, s.dim, hidden), rows, into)
        self.gate = weight(rngs, (e.count, s.dim, hidden), rows, into) if s.gated else None
        self.down = weight(rngs, (e.count, hidden, s.dim), columns, out)
        self.shared = FeedForward(replace(s, hidden=e.shared * hidden, biases=()), rngs=rngs) if e.shared else None

    def __call__(
        self, x_bsd: jax.Array, bias: jax.Array | None = None, *, limited: bool = True
    ) -> tuple[jax.Array, RouterSums]:
        """Returns [batch, seq, dim] and the sums of this layer, with one layer in `sent`.

        `limited`: whether an expert may overflow; in decoding they have none, as a row has one token.
        """
        e = self.settings
        # in float32: in 16 bits, scores of many experts are equal, and which one wins is a matter of rounding
        logits = _float32_logits(x_bsd, self.router[...].astype(jnp.float32))
        scores = jax.nn.softmax(logits) if e.scores == "softmax" else jax.nn.sigmoid(logits)
        choices = self._choose(jax.lax.stop_gradient(scores if bias is None else scores + bias))
        weights = _choice_scores(scores, choices[..., : e.per_token])
        if e.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        params = {"up": self.up[...], "down": self.down[...]} | ({} if self.gate is None else {"gate": self.gate[...]})
        y, load = mixture(
            partial(_expert, self.activation), params, x_bsd, choices, weights * e.scale, **e.bound if limited else {}
        )
        if limited and e.overflow == "refuse":
            y = jnp.where(load.dropped.sum(-1)[:, None, None] > 0, jnp.nan, y)
        y = y if self.shared is None else y + self.shared(x_bsd)
        sent = load.sent.astype(jnp.float32)
        shares = scores if e.scores == "softmax" else scores / jnp.sum(scores, axis=-1, keepdims=True)
        balance = e.count * jnp.sum(sent / jnp.sum(sent, axis=-1, keepdims=True) * jnp.mean(shares, axis=1), axis=-1)
        z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2, axis=-1)
        lost = jnp.stack([load.spilled.sum(-1), load.dropped.sum(-1)], axis=-1).astype(jnp.float32)
        return y, RouterSums(jnp.stack([balance, z], axis=-1), sent[:, None], lost)

    def _choose(self, scores: jax.Array) -> jax.Array:
        """Returns the experts of each token, best first, of the best groups. Shape [batch, seq, choices]."""
        e = self.settings
        if e.groups:
            grouped = scores.reshape(*scores.shape[:-1], e.groups, -1)
            best_two = jnp.sort(grouped, descending=True)[..., :2].sum(-1)
            best = _top_choices(best_two, e.group_limit)
            taken = jnp.any(best[..., None] == jnp.arange(e.groups), axis=-2)
            scores = jnp.where(taken[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return _top_choices(scores, e.choices)


def _top_choices(scores: jax.Array, count: int) -> jax.Array:
    """Returns the numbers of the highest scores, best first: those of `jax.lax.top_k`."""
    # XLA partitions `top_k` as if the scores were sharded: it sorts the best of each token a second time
    return jnp.argsort(-scores, axis=-1)[..., :count]


@jax.custom_vjp
def _float32_logits(x_bsd: jax.Array, router_de: jax.Array) -> jax.Array:
    """Computes x @ router in float32, and saves x in its own dtype; JAX would save it in float32 as well."""
    return jnp.einsum("bsd,de->bse", x_bsd.astype(jnp.float32), router_de)


def _float32_logits_backward(residuals: tuple[jax.Array, jax.Array], grad_bse: jax.Array):
    x_bsd, router_de = residuals
    grad_x = jnp.einsum("bse,de->bsd", grad_bse, router_de).astype(x_bsd.dtype)
    return grad_x, jnp.einsum("bsd,bse->de", x_bsd.astype(jnp.float32), grad_bse)


_float32_logits.defvjp(lambda x, router: (_float32_logits(x, router), (x, router)), _float32_logits_backward)


@jax.custom_vjp
def _choice_scores(scores_bse: jax.Array, choices_bsk: jax.Array) -> jax.Array:
    """Looks up the scores of the chosen experts [batch, seq, k], and saves the choices only."""
    # a sum instead of a lookup: XLA ends the process at some lookups per row inside of pipelines
    chosen = choices_bsk[..., None] == jnp.arange(scores_bse.shape[-1])
    return jnp.sum(jnp.where(chosen, scores_bse[..., None, :], 0), axis=-1)


def _choice_scores_forward(scores_bse: jax.Array, choices_bsk: jax.Array):
    return _choice_scores(scores_bse, choices_bsk), (choices_bsk, jnp.arange(scores_bse.shape[-1]))


def _choice_scores_backward(residuals: tuple[jax.Array, jax.Array], grad_bsk: jax.Array):
    choices_bsk, experts = residuals
    return jnp.sum(jnp.where(choices_bsk[..., None] == experts, grad_bsk[..., None], 0), axis=-2), None


_choice_scores.defvjp(_choice_scores_forward, _choice_scores_backward)


def _expert(activation: Activation, params: dict[str, jax.Array], x_nd: jax.Array) -> jax.Array:
    """The feed-forward layer of one expert."""
    h = x_nd @ params["up"]
    h = activate_gate(activation, x_nd @ params["gate"], h) if "gate" in params else activate(h, activation)
    return h @ params["down"]


class MixtureBlock(Block):
    """A transformer layer whose feed-forward is a mixture. Its stream is {"x", "router": `RouterSums`, ...}."""

    def __init__(self, s: BlockConfig, e: ExpertsConfig, *, rngs: nnx.Rngs):
        super().__init__(s, lambda s, rngs: MixtureLayer(s, e, rngs=rngs), rngs=rngs)

    def run_stream(self, stream: dict, inputs: LayerInputs, kind: LayerKind) -> dict:
        """Applies the layer to a stream, and adds its sums to those of the router."""
        found: list[RouterSums] = []

        def mlp(x: jax.Array) -> jax.Array:
            y, sums = self.mlp(x, inputs.bias)
            found.append(sums)
            return y

        def layer(x: jax.Array, documents: Documents) -> jax.Array:
            return self.layer(x, inputs.key, lambda x: self.attention(x, documents, kind), mlp)

        router = stream["router"]
        after = apply_layer(layer, {name: value for name, value in stream.items() if name != "router"})
        (sums,) = found
        here = jnp.arange(router.sent.shape[1]) == inputs.number
        sent = router.sent + here[:, None] * sums.sent
        return after | {"router": RouterSums(router.losses + sums.losses, sent, router.lost + sums.lost)}

    def feed_forward(self, x_bsd: jax.Array) -> jax.Array:
        """The mixture in decoding, where experts have no capacity."""
        return self.mlp(x_bsd, limited=False)[0]
