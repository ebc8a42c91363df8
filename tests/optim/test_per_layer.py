"""Layers of a stack are updated as layers apart are, by every optimizer of optax by name, on meshes too."""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairwise import some
from tiny import assert_same_arrays, models, train

import jaxpar as jp
from jaxpar.optim import optax_chain
from jaxpar.optim.optax_lookup import optimizers
from jaxpar.optim.optimizer import SETTINGS, Optimizer
from jaxpar.optim.wrappers import LAYERWISE, per_layer
from jaxpar.parallel.compose import as_blueprint

LAYERS, SCALES = 4, (0.1, 1.0, 3.0, 10.0)
NAMES = {"blocks/w": ("layers", "embed", "mlp"), "blocks/experts": ("layers", "expert", "embed", "mlp"),
         "blocks/scale": ("layers", "embed"), "head": ("embed", "vocab")}  # fmt: skip
# muon's are told by `jaxpar.optim.muon`; that of noise draws for arrays, not for layers
OTHERS = {"muon": "test_muon", "noisy_sgd": "another draw for another number of arrays"}


def trees(seed, factors):
    rng = np.random.default_rng(seed)
    each = np.asarray(factors, np.float32)
    stacked = {
        "blocks": {
            "w": rng.normal(size=(LAYERS, 8, 6)).astype(np.float32) * each[:, None, None],
            "experts": rng.normal(size=(LAYERS, 2, 8, 6)).astype(np.float32) * each[:, None, None, None],
            "scale": rng.normal(size=(LAYERS, 8)).astype(np.float32) * each[:, None],
        },
        "head": rng.normal(size=(8, 5)).astype(np.float32),
    }
    return jax.tree.map(jnp.asarray, stacked), apart(stacked)


def apart(stacked):
    """Returns the same parameters with an array for each layer and for each expert."""
    blocks = stacked["blocks"]
    layers = {
        str(i): {"w": blocks["w"][i], "scale": blocks["scale"][i]}
        | {f"experts{e}": blocks["experts"][i, e] for e in range(2)}
        for i in range(LAYERS)
    }
    return jax.tree.map(jnp.asarray, {"layers": layers, "head": stacked["head"]})


def ran(optimizer, params, grads, steps=3):
    state = optimizer.init(params)
    for step in range(steps):
        scaled = jax.tree.map(lambda g, step=step: g * (1 + step), grads)
        updates, state = optimizer.update(scaled, state, params, value=jnp.float32(1.5))
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*optimistic_adam")  # for its successor
@pytest.mark.parametrize(
    "name",
    some(
        sorted(optimizers().keys() - OTHERS.keys()),
        [
            "adamw",
            "ademamix",
            "amsgrad",
            "dowg",
            "optimistic_gradient_descent",
            "polyak_sgd",
            "schedule_free_sgd",
            "sgd",
            "sign_sgd",
            "signum",
            "simplified_ademamix",
        ],
        [
            "adabelief",
            "adagrad",
            "adam",
            "adamax",
            "adamaxw",
            "adan",
            "adopt",
            "cocob",
            "dadapt_adamw",
            "dog",
            "lamb",
            "lars",
            "lion",
            "madgrad",
            "momo",
            "momo_adam",
            "optimistic_adam",
            "optimistic_adam_v2",
            "prodigy",
            "radam",
            "rmsprop",
            "schedule_free_adamw",
            "yogi",
        ],
    ),
)
def test_stacked_layers_move_as_layers_apart(name):
    params, unstacked = trees(0, SCALES)
    grads, of_unstacked = trees(1, SCALES[::-1])
    decay = 0.1 if "weight_decay" in SETTINGS.get(name, {}).values() else 0.0
    spec = Optimizer(name=name, clip=0.0, learning_rate=0.1, decay="constant", weight_decay=decay)
    made = (optax_chain.build(spec, 10, names=names) for names in (lambda: NAMES, dict))
    stacked, wanted = (
        ran(optax.with_extra_args_support(optimizer), *given)
        for optimizer, given in zip(made, [(params, grads), (unstacked, of_unstacked)], strict=True)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), apart(stacked), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(LAYERWISE, ["lamb"], ["adafactor", "fromage", "lars", "novograd", "sm3"]))
def test_a_stack_taken_for_one_parameter_moves_otherwise(name):
    """So the test above can fail: optax's own, given the stack, is another."""
    (params, unstacked), (grads, of_unstacked) = trees(0, SCALES), trees(1, SCALES[::-1])
    own = optimizers()[name](0.1)
    one, other = apart(ran(own, params, grads)), ran(own, unstacked, of_unstacked)
    gaps = jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), one, other))
    assert max(gaps) > 1e-3


@pytest.mark.nightly
def test_lars_leaves_biases_and_norms_without_a_ratio():
    params, grads = (
        {"w": jnp.full((4, 4), 100.0), "bias": jnp.full(4, 100.0)},
        {"w": jnp.ones((4, 4)), "bias": jnp.ones(4)},
    )
    lars = optax_chain.build(
        Optimizer(name="lars", clip=0.0, learning_rate=1.0, decay="constant", weight_decay=0.0, beta1=0.0), 9
    )
    updates, _ = lars.update(grads, lars.init(params), params)
    np.testing.assert_allclose(updates["bias"], -1.0)
    assert float(jnp.abs(updates["w"]).max()) < 1.0


@pytest.mark.slow
def test_any_optax_chain_is_made_so():
    (params, unstacked), (grads, of_unstacked) = trees(0, SCALES), trees(1, SCALES[::-1])
    own = optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio(), optax.scale(-0.1))
    stacked = ran(per_layer(own, lambda: NAMES), params, grads)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), apart(stacked), ran(own, unstacked, of_unstacked)
    )


@functools.cache
def trained(name, sizes, zero):
    """Returns losses and state of three steps."""
    names = {path: leaf.names for path, leaf in as_blueprint(models()["annotated"]).leaves.items()}
    assert names["blocks/up/kernel"][0] == "layers"
    made = optax_chain.build(
        Optimizer(name=name, clip=0.0, learning_rate=0.01, decay="constant", arguments=ARGUMENTS.get(name, {})),
        9,
        names=lambda: names,
    )
    parallel = jp.Parallel(**dict(sizes), **({"zero": zero} if zero else {}))
    devices = jax.devices()[: math.prod(parallel.sizes.values())]
    return train(models()["annotated"], parallel, devices, chain=made, steps=3)[:2]


MESHES = {
    "2 x 2 x 2": ((("data", 2), ("fsdp", 2), ("tensor", 2)), 3),
    "ZeRO-1": ((("fsdp", 4),), 1),
    "ZeRO-2": ((("fsdp", 4),), 2),
    "ZeRO-3": ((("fsdp", 4),), 3),
}
OFTEN = ("adafactor",)
# acprop divides a gradient by the size of those before, which of its default 1e-16 is rounding where they were zero
ARGUMENTS = {"acprop": {"eps": 1e-2}}
NAMED = [
    pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.full)
    for name in sorted(optimizers().keys() - OTHERS.keys())
]


@pytest.mark.spread(0)
@pytest.mark.filterwarnings("ignore:.*FLOP of matmuls")  # galore's projections are whole on every device
@pytest.mark.filterwarnings("ignore:.*optimistic_adam")  # for its successor
@pytest.mark.parametrize("name", NAMED)
def test_meshes_and_stages_of_zero_train_as_one_device_does(name):
    """Prints a row of the table of all optimizers: `pytest -s -n 0 -m "" -k as_one_device_does`."""
    wanted, alone = trained(name, (), None)
    cells = []
    for mesh, (sizes, zero) in MESHES.items():
        losses, state = trained(name, sizes, zero)
        gap = max(abs(one / other - 1) for one, other in zip(losses, wanted, strict=True))
        cells.append(f"{mesh} {gap:.1e}")
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        assert_same_arrays(state.params, alone.params)
    print(f"\n{name:<24} relative difference of losses: {', '.join(cells)}")
