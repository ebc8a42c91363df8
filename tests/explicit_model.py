"""A language model in JAX's explicit-sharding style, as its author runs it: on a mesh with axes `fsdp` and `tp`.

And two that keep the mesh that they were made with, whose axes are `data` and `tp`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, auto_axes, reshard
from jax.sharding import PartitionSpec as P

VOCAB, DIM, HEADS, HIDDEN = 32, 16, 4, 32


@auto_axes
def positions(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


class Layer(nnx.Module):
    def __init__(self, rngs, say):
        def param(shape, *names):
            value = nnx.initializers.normal(0.1)(rngs.params(), shape, out_sharding=say(*names))
            return nnx.Param(value, out_sharding=names if say(*names) else None)

        self.say = say
        self.qkv = param((3, DIM, HEADS, DIM // HEADS), None, "fsdp", "tp", None)
        self.out = param((HEADS, DIM // HEADS, DIM), "tp", None, "fsdp")
        self.up = param((DIM, HIDDEN), "fsdp", "tp")
        self.down = nnx.Linear(HIDDEN, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x, at):
        heads, stream = self.say("fsdp", None, "tp", None), self.say("fsdp", None, None)
        q, k, v = jnp.einsum("btd,sdnh->sbtnh", x, self.qkv[...], out_sharding=self.say(None, "fsdp", None, "tp", None))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        scores = jnp.where(at[:, None, :, None] >= at[:, None, None, :], scores, -1e9)
        mixed = jnp.einsum("bnts,bsnh->btnh", nnx.softmax(scores), v, out_sharding=heads)
        x = x + jnp.einsum("btnh,nhd->btd", mixed, self.out[...], out_sharding=stream)
        hidden = nnx.gelu(jnp.dot(x, self.up[...], out_sharding=self.say("fsdp", None, "tp")))
        return x + self.down(hidden, out_sharding=stream)


class Explicit(nnx.Module):
    def __init__(self, rngs, say=P):
        self.table = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (VOCAB, DIM)))
        self.layers = nnx.List([Layer(rngs, say) for _ in range(2)])
        self.say = say

    def __call__(self, tokens):
        say = self.say
        x = self.table[...].at[tokens].get(out_sharding=say("fsdp", None, None))
        at = positions(tokens, out_sharding=say("fsdp", None) or P())
        for layer in self.layers:
            x = layer(x, at)
        if say("fsdp"):
            x = reshard(x, say("fsdp", None, None))
        return jnp.dot(x, self.table[...].T, out_sharding=say("fsdp", None, "tp"))


Plain = partial(Explicit, say=lambda *names: None)  # the author's own setting without shardings


def placed(x, mesh):
    """Returns activations where their author's mesh has them: by axes of it, or by names of dims."""
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None, "tp")))
    return nn.with_logical_constraint(x, ("activation_batch", "activation_length", "rows"), mesh=mesh)


class KeepsMesh(nnx.Module):
    def __init__(self, rngs, *, mesh):
        self.mesh, self.table = mesh, nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.down(placed(nnx.relu(self.up(self.table(tokens))), self.mesh))


class KeepsMeshInLinen(nn.Module):
    mesh: jax.sharding.Mesh

    @nn.compact
    def __call__(self, tokens):
        x = nn.relu(nn.Dense(HIDDEN)(nn.Embed(VOCAB, DIM)(tokens)))
        return nn.Dense(VOCAB)(placed(x, self.mesh))
