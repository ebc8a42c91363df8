"""Models of packages that others publish, installed and not copied: each trains as a plain optax loop does.

mamba2-jax    NNX: a state-space model; a tied head, `h @ embedding[:].T`; chunks of a sequence in 5-dim einsums
nano-moe-jax  Linen: a mixture of experts; the top two of a router, a loss of its own for the balance of the experts
"""

from functools import cache
from importlib import metadata

import numpy as np
import optax
import plain_loop
import pytest

import jaxpar as jp

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error:.*times its share:UserWarning")]
ROWS, SEQ, VOCAB = 8, 16, 64
TOKENS = np.random.default_rng(0).integers(0, VOCAB, [ROWS, SEQ]).astype(np.int32)
BATCH = {"tokens": TOKENS}
SGD = optax.sgd(0.1, 0.9)


def mamba2():
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    settings = Mamba2Config(
        vocab_size=VOCAB, hidden_size=32, state_size=16, head_dim=8, chunk_size=8, num_hidden_layers=2
    )
    model = lambda rngs: Mamba2ForCausalLM(settings, rngs=rngs)  # noqa: E731
    return model, model, lambda model, batch: model(batch["tokens"], labels=batch["tokens"])["loss"]


def moe():
    from nano_moe import NanoMoE, NanoMoEConfig

    settings = NanoMoEConfig(vocab_size=VOCAB, n_layers=2, n_heads=4, d_model=32, d_ff=64, block_size=SEQ)
    module = NanoMoE(settings)

    def loss(model, batch):
        logits, balance = model(batch["tokens"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:])
        return each.mean() + settings.aux_loss_coeff * balance

    return jp.from_linen(module, TOKENS[:1]), module, loss


MODELS = {"mamba2-jax": ("1.1.2", mamba2), "nano-moe-jax": ("0.1.0", moe)}


@cache
def plainly(name):
    """Returns the model as jaxpar takes it, its loss, and what a plain loop makes of it; skips where it is missing."""
    version, make = MODELS[name]
    found = {each.name: each.version for each in metadata.distributions()}.get(name)
    if found != version:
        pytest.skip(f"{name} {version} is not installed" + (f", but {found}" if found else ""))
    model, of, loss = make()
    return model, loss, plain_loop.train(model, of, loss, SGD, BATCH)


@plain_loop.each({name: name for name in MODELS}, zero_3=["mamba2-jax"])
def test_a_model_of_a_package_trains_as_a_plain_loop_does(name, layout):
    model, loss, reference = plainly(name)
    plain_loop.beside(reference, layout, model, loss, SGD, BATCH)
