"""Channels of convolutions over `tensor`: in pairs as Megatron's matrices, found by use in models that name nothing."""

import re
from collections import Counter

import numpy as np
import optax
import pytest
from flax import linen as nn
from plain_loop import assert_alike, steps, train

import jaxpar as jp

OPTIMIZER = optax.sgd(0.1)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(8, (3, 3), name="row")(nn.relu(nn.Conv(32, (5, 5), name="column")(x)))


class Bottleneck(nn.Module):
    """The block of ResNet-50, with its stem and head."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3), use_bias=False, name="stem")(x))
        y = nn.relu(nn.GroupNorm(4)(nn.Conv(16, (1, 1), use_bias=False, name="reduce")(x)))
        y = nn.relu(nn.LayerNorm(reduction_axes=(1, 2))(nn.Conv(16, (3, 3), use_bias=False, name="middle")(y)))
        x = nn.relu(x + nn.Conv(32, (1, 1), use_bias=False, name="expand")(y))
        return nn.Dense(10, name="head")(x.mean(axis=(1, 2)))


class Inverted(nn.Module):
    """The block of MobileNet-v2: channels of a depthwise convolution lie between those of a pair."""

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.Conv(32, (1, 1), name="expand")(x))
        y = nn.relu(nn.Conv(32, (3, 3), feature_group_count=32, name="depthwise")(y))
        return x + nn.Conv(8, (1, 1), name="project")(y)


def loss(model, batch):
    outputs = model(batch["images"])
    if "labels" in batch:
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    else:
        losses = (outputs**2).mean(axis=(1, 2, 3))
    return losses.sum(), losses.size


def batch_of(channels, labels=False, rows=8):
    numbers = np.random.default_rng(0)
    batch = {"images": numbers.normal(size=(rows, 16, 16, channels)).astype(np.float32)}
    return batch | ({"labels": numbers.integers(0, 10, rows).astype(np.int32)} if labels else {})


def split_dims(model, batch, **sizes):
    """The dims that `tensor` splits, by parameter."""
    layout = jp.compose(jp.from_linen(model, batch["images"]), jp.Parallel(**sizes))
    return {
        path: [dim for dim, entry in enumerate(place.used) if entry == "tensor"]
        for path, place in layout.placements.items()
    }


def test_the_first_of_a_pair_is_split_by_outputs_and_the_second_by_inputs():
    assert split_dims(Pair(), batch_of(3), tensor=8) == {
        "column/kernel": [3], "column/bias": [0], "row/kernel": [2], "row/bias": [],
    }  # fmt: skip


def test_a_convolution_in_no_pair_is_split_by_outputs():
    dims = split_dims(Bottleneck(), batch_of(3, labels=True), tensor=4, data=2)
    kernels = {path.removesuffix("/kernel"): split for path, split in dims.items() if path.endswith("kernel")}
    assert kernels == {"stem": [3], "reduce": [3], "middle": [3], "expand": [2], "head": [0]}


def test_a_depthwise_convolution_is_split_with_its_neighbours():
    dims = split_dims(Inverted(), batch_of(8), tensor=8)
    assert dims["expand/kernel"] == dims["depthwise/kernel"] == [3]
    assert dims["project/kernel"] == [2]
    assert dims["depthwise/bias"] == [0]


def test_groups_of_several_channels_are_not_split_by_a_pair():
    class Grouped(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(8, (1, 1))(nn.Conv(32, (3, 3), feature_group_count=4, name="grouped")(x))

    dims = split_dims(Grouped(), batch_of(8), tensor=8)
    assert dims["grouped/kernel"] in ([], [3])


@pytest.mark.spread(3)
@pytest.mark.nightly
@pytest.mark.parametrize("model", [Pair(), Bottleneck(), Inverted()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize(
    "sizes",
    [{"tensor": 4, "data": 2}, {"tensor": 2, "fsdp": 2, "height": 2}, {"tensor": 8}],
    ids=lambda sizes: " x ".join(f"{axis} {size}" for axis, size in sizes.items()),
)
@pytest.mark.filterwarnings("ignore:.*times its share:UserWarning")  # pieces of few rows, and three input channels
def test_losses_and_parameters_are_those_of_flax_alone(model, sizes):
    batch = batch_of(8 if isinstance(model, Inverted) else 3, labels=isinstance(model, Bottleneck))
    blueprint = jp.from_linen(model, batch["images"])
    expected = train(blueprint, model, loss, OPTIMIZER, batch)
    layout = jp.compose(blueprint, jp.Parallel(**sizes))
    assert_alike(steps(layout, loss, OPTIMIZER, batch), expected)


@pytest.mark.nightly
def test_a_pair_is_one_all_reduce_forward_and_one_backward():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + Pair()(x)

    batch = batch_of(8, rows=2)
    model = jp.from_linen(nn.Sequential([Deep(), Deep()]), batch["images"])
    layout = jp.compose(model, jp.Parallel(tensor=8))
    step = jp.train_step(layout, loss, OPTIMIZER)
    step(jp.init_state(layout, OPTIMIZER, seed=0), batch)
    text = next(iter(step.programs.values())).as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = Counter(re.findall(rf"= (\w+\[2,16,16,\d+\])\S* ({kinds})(?:-start)?\(", text))
    assert found == {("f32[2,16,16,8]", "all-reduce"): 3}  # two forward, and one backward: the first images need none
