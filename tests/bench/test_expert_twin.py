"""The expert twin trains the same model as jaxpar: the same losses, from the same parameters."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from bench import expert

TINY = {"vocab": 64, "seq": 16, "layers": 2, "dim": 16, "heads": 4, "hidden": 32}


def fused(params):
    """Returns the parameters of a Decoder as the expert stores them."""
    named = {"/".join(str(getattr(key, "key", key)) for key in path): x for path, x in flat(params)}

    def get(name):
        return next(x for path, x in named.items() if name in path)

    norms = jnp.stack([get("norm_attention/scale"), get("norm_mlp/scale")], axis=1).reshape(-1, TINY["dim"])
    return {
        "table": get("embed"),
        "qkv": jnp.stack([get(f"attention/{name}") for name in ("query", "key", "value")], axis=2),
        "out": get("attention/out"),
        "gate_up": jnp.stack([get("mlp/gate"), get("mlp/up")], axis=2),
        "down": get("mlp/down"),
        "norms": jnp.concatenate([norms, next(x for path, x in named.items() if path.startswith("norm/"))[None]]),
        "head": get("head"),
    }


def batches(count):
    tokens = np.random.default_rng(0).integers(0, TINY["vocab"], (count, 16, TINY["seq"] + 1), dtype=np.int32)
    return [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in tokens]


def flat(params):
    return jax.tree_util.tree_flatten_with_path(params)[0]


def losses_of_expert(params, batches, sizes, **how):
    model, optimizer = expert.Llama(**TINY, **how), optax.adamw(1e-2)
    mesh = expert.make_mesh(jax.devices(), **sizes)
    places, moments = expert.shardings(model, optimizer, mesh)
    state = jax.device_put(params, places), jax.jit(optimizer.init, out_shardings=moments)(params)
    step, losses = expert.build(model, optimizer, mesh), []
    for batch in batches:
        state, metrics = step(state, batch["inputs"], batch["targets"])
        losses.append([float(x) for x in metrics])
    return losses


def losses_of_jaxpar(batches, sizes):
    def model(rngs):
        return jp.Decoder(jp.DecoderConfig(**TINY), rngs=rngs)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    layout = jp.compose(model, jp.Parallel(**sizes))
    state = jp.init_state(layout, optimizer)
    first = jax.tree.map(np.array, fused(state.params))  # copies: the step is given the state for good
    step, losses = jp.train_step(layout, jp.next_token_loss, optimizer), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return first, losses


@cache
def jaxpar():
    return losses_of_jaxpar(batches(4), {"data": 8})


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        pytest.param({"data": 8}, {"unrolled": False}, marks=pytest.mark.full),
        pytest.param({"fsdp": 8}, {"remat": True}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, {"remat": True, "unrolled": False}, marks=pytest.mark.full),
    ],
    ids=["data", "fsdp, remat", "tensor", "2x2x2, remat"],
)
def test_the_expert_twin_has_the_losses_and_gradient_norms_of_the_decoder(sizes, how):
    params, want = jaxpar()
    np.testing.assert_allclose(losses_of_expert(params, batches(4), sizes, **how), want, rtol=2e-5)
