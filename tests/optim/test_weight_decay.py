"""Which weights are decayed: matrices, and of a stack of layers those of each layer alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import DIM, HIDDEN, VOCAB, batches, named, scanned, stack, token_loss

import jaxpar as jp
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.models import resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.parallel.compose import as_blueprint
from jaxpar.sharding.names import leaves_by_path, nest
from jaxpar.step.losses import next_token_loss

LAYERS = 3


class Layer(nnx.Module):
    """A layer with each kind of vector: norms, biases, those of heads, and one that is not called so."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.gain = nnx.Param(jnp.full(DIM, 0.5))

    def __call__(self, x):
        x = x + self.attention(self.norm(x)) * self.gain[...]
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, stacked, rngs):
        self.stacked = stacked
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = stack(rngs, LAYERS, Layer) if stacked else nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.stacked:
            x = scanned(lambda x, block: block(x), x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.embed.attend(x)


def unrolled(flat):
    """Returns the parameters of a stack under the paths of a list of layers."""
    return {
        path.replace("blocks/", f"blocks/{layer}/"): x[layer] if path.startswith("blocks/") else x
        for path, x in flat.items()
        for layer in range(LAYERS if path.startswith("blocks/") else 1)
    }


def job(text):
    return loads(
        f"mesh.simulate = 1\n{text}\n[model]\nname = 'decoder'\nlayers = 2\ndim = 16\nheads = 2\nuse_bias = true"
    )


def trained(made, *, stacked, begun=None):
    """Returns the parameters at first, and losses and parameters after some steps; by path, on the host."""
    model = as_blueprint(lambda rngs: Model(stacked, rngs))
    chain, layout = resolve_optimizer(made, model), jp.compose(model, jp.Parallel(), jax.devices()[:1])
    state, losses = jp.init_state(layout, chain), []
    if begun:
        assert begun.keys() == leaves_by_path(state.params).keys()
        state = replace(state, params=nest({tuple(path.split("/")): jnp.asarray(x) for path, x in begun.items()}))
    begun = {path: np.array(x) for path, x in leaves_by_path(state.params).items()}  # a step gives up what it is given
    step = jp.train_step(layout, token_loss, chain)
    for batch in batches(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return begun, losses, leaves_by_path(state.params)


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "name", [pytest.param("adamw", marks=pytest.mark.full), pytest.param("lion", marks=pytest.mark.slow)]
)
def test_a_stack_of_layers_is_decayed_as_the_layers_of_a_list_are(name):
    rate = "learning_rate = 0.01, arguments = { eps = 1e-4 }" if name == "adamw" else "learning_rate = 1e-3"
    made = job(f"optimizer = {{ name = '{name}', weight_decay = 0.1, decay = 'constant', {rate} }}")
    begun, losses, stacked = trained(made, stacked=True)
    _, wanted, listed = trained(made, stacked=False, begun=unrolled(begun))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for path, x in unrolled(stacked).items():
        np.testing.assert_allclose(x, listed[path], rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.nightly
def test_vectors_of_stacked_layers_are_not_decayed():
    made = job("optimizer = { weight_decay = 0.5, decay = 'constant' }")
    blueprint = as_blueprint(resolve_model(made, next_token_loss))
    params = nest({tuple(path.split("/")): jnp.ones(leaf.shape) for path, leaf in blueprint.leaves.items()})
    chain = resolve_optimizer(made, blueprint)
    zeros = jax.tree.map(jnp.zeros_like, params)
    after = leaves_by_path(optax.apply_updates(params, chain.update(zeros, chain.init(params), params)[0]))
    kept = {path for path, x in after.items() if (x == 1).all()}
    assert kept == {path for path in after if path.endswith(("bias", "scale"))}
    assert len(kept) == 10
    assert len(after) == 19
