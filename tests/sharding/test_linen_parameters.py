"""Parameters of a Linen module: used where they are read, the plain dict of arrays to all else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import freeze, unfreeze

import jaxpar as jp
from jaxpar.sharding.linen_calls import Parameters

STORED = {"embed": {"table": 1.0}, "norm": {"a/scale": 2.0}, "bias": 3.0, "pair": (4.0, 5.0)}


def used(path, value) -> Any:
    return path, value


def parameters():
    return Parameters(STORED, used)


@pytest.mark.parametrize("read", [dict, freeze, unfreeze, lambda p: {**p}, dict.copy, lambda p: dict(p.items())])
def test_whatever_copies_parameters_reads_them(read):
    copied = read(parameters())
    assert copied["bias"] == ("bias", 3.0)
    assert copied["embed"]["table"] == ("embed/table", 1.0)


def test_a_parameter_is_used_by_its_path():
    read = parameters()
    assert read["norm"]["a/scale"] == read["norm"].get("a/scale") == ("norm/a/scale", 2.0)
    assert [*read.get("norm").values()] == [("norm/a/scale", 2.0)]
    assert read["pair"] == (("pair/0", 4.0), ("pair/1", 5.0))
    assert read.get("scale") is None
    assert "bias" in read


def test_parameters_have_the_leaves_and_paths_of_what_is_stored():
    flatten = jax.tree_util.tree_leaves_with_path
    assert flatten(parameters()) == flatten(STORED)
    doubled = jax.tree.map(lambda x: 2 * x, parameters())  # as a scan slices them: what is in it is read by its path
    assert doubled["embed"]["table"] == ("embed/table", 2.0)


class General(nn.Module):
    """Kernels of three dims, which Flax makes flat and then opens the box of."""

    partitioning: Any

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.DenseGeneral((4, 8), kernel_init=self.partitioning(init, ("embed", "heads", "kv")))(x)
        return nn.DenseGeneral(4, axis=(-2, -1), kernel_init=self.partitioning(init, ("heads", "kv", None)))(x)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "partitioning", [pytest.param(nn.with_partitioning, marks=pytest.mark.slow), nn.with_logical_partitioning]
)
def test_names_of_all_dims_of_a_kernel_that_flax_makes_flat_are_those_of_its_parameter(partitioning):
    model = jp.from_linen(General(partitioning), jnp.zeros((1, 16)))
    layout = jp.compose(model, jp.Parallel(data=4, tensor=2, rules={"heads": "tensor"}))
    assert "tensor" in layout.describe("DenseGeneral_0/kernel")
    step = jp.train_step(layout, lambda model, batch: (jnp.sum(model(batch["x"]) ** 2), 8), optax.sgd(0.1))
    _, metrics = step(jp.init_state(layout, step.optimizer), {"x": np.ones((8, 16), np.float32)})
    alone = model.init(jax.random.key(0))[0]
    by_hand = General(partitioning).apply({"params": alone}, np.ones((8, 16), np.float32))
    assert float(metrics["loss"]) == pytest.approx(float(jnp.sum(by_hand**2)) / 8, rel=1e-5)
