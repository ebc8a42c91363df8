"""Convolutions split by examples, dense layers by features, in one declaration (Krizhevsky 2014, arXiv:1404.5997)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from plain_loop import assert_alike, steps, train

import jaxpar as jp
from jaxpar.models.convolutional import VGG, AlexNet
from jaxpar.models.settings.classifiers import AlexNetConfig, VGGConfig

OPTIMIZER = optax.sgd(0.1)


class Classifier(nn.Module):
    """A CNN whose dense layers have most of the parameters."""

    @nn.compact
    def __call__(self, x):
        for channels in (8, 16):
            x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["labels"])
    return losses.sum(), losses.size


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "examples"),
    [({"tensor": 8}, "tensor"), ({"data": 2, "tensor": 4}, ("data", "tensor")),
     ({"fsdp": 2, "tensor": 2, "height": 2}, ("fsdp", "tensor"))],
    ids=["tensor 8", "data 2 x tensor 4", "fsdp 2 x tensor 2 x height 2"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*times its share:UserWarning")  # pieces of few rows
def test_losses_and_parameters_are_those_of_flax_alone(sizes, examples):
    numbers = np.random.default_rng(0)
    batch = {
        "inputs": numbers.normal(size=(16, 16, 16, 3)).astype(np.float32),
        "labels": numbers.integers(0, 10, 16).astype(np.int32),
    }
    model = jp.from_linen(Classifier(), batch["inputs"])
    expected = train(model, Classifier(), loss, OPTIMIZER, batch)
    layout = jp.compose(model, jp.Parallel(**sizes, rules={"images": examples}))
    kernels = {path: place for path, place in layout.placements.items() if path.startswith("Conv")}
    assert not any("tensor" in str(place.used) for place in kernels.values())
    assert_alike(steps(layout, loss, OPTIMIZER, batch), expected)


@pytest.mark.slow
def test_a_model_without_convolutions_does_not_use_the_rule():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.relu(nn.Dense(8)(x.mean(axis=(1, 2)))))

    batch = {"inputs": np.ones((8, 4, 4, 3), np.float32), "labels": np.zeros(8, np.int32)}
    layout = jp.compose(jp.from_linen(Dense(), batch["inputs"]), jp.Parallel(tensor=8, rules={"images": "tensor"}))
    step = jp.train_step(layout, loss, OPTIMIZER)
    with pytest.raises(jp.JaxparError, match="images"):
        step(jp.init_state(layout, OPTIMIZER, seed=0), batch)


MODELS = {
    "AlexNet": (partial(AlexNet, AlexNetConfig(dropout=0.0)), 1024, 2_469_696, 256 * 36),
    "VGG-16": (partial(VGG, VGGConfig(dropout=0.0)), 256, 14_714_688, 512 * 49),
}


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("name", [pytest.param("AlexNet"), pytest.param("VGG-16", marks=pytest.mark.slow)])
def test_the_hybrid_sends_least_and_what_theory_says(name):
    """By bytes on the wire of one of 8 H100s in a step; N devices, B examples, float32."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    factory, examples, convolutional, features = MODELS[name]
    batch = {
        "inputs": jax.ShapeDtypeStruct((examples, 224, 224, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((examples,), jnp.int32),
    }
    model = jp.from_nnx(lambda *, rngs: factory(rngs=rngs), batch["inputs"])
    sent = {}
    for kind, sizes in {
        "data": {"data": 8}, "all split": {"tensor": 8}, "hybrid": {"tensor": 8, "rules": {"images": "tensor"}},
    }.items():  # fmt: skip
        layout = jp.compose(model, jp.Parallel(**sizes), jp.target_devices("h100:1x8"))
        report = jp.inspect(jp.train_step(layout, loss, OPTIMIZER), batch)
        sent[kind] = sum(entry.step_wire for entry in report.ledger)
    share, size = 7 / 8, 4
    dense = (features + 1) * 4096 + 4097 * 4096 + 4097 * 1000
    assert sent["data"] == pytest.approx(2 * share * size * (convolutional + dense), rel=0.002)
    gathered = 2 * share * size * examples * features  # examples before the dense layers; backward reduce-scattered
    between = 2 * share * size * examples * (4096 + 1000)  # outputs of the pair, and logits
    assert sent["hybrid"] == pytest.approx(2 * share * size * convolutional + gathered + between, rel=0.002)
    assert sent["hybrid"] < sent["data"] < sent["all split"]
