"""Parameters of a Linen module: used where they are read, the plain dict of arrays to all else."""

from typing import Any

import jax
import pytest
from flax.core import freeze, unfreeze

from jaxpar.sharding.linen.parameters import Parameters

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
