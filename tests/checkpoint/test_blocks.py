"""Arrays in blocks: cut to fill an array, restored under any sharding, and every byte read and hashed once."""

import math
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.checkpoint import flips_found
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.checkpoint import Checkpoints, Store, array_files, blocks, manifest
from jaxpar.errors import JaxparError

SPEC = Checkpoints(keep_last=9)
SPECS = [(), ("x",), ("x", "y"), (None, "y"), (("x", "y", "z"),), (None, None, "z")]


def sharding(spec):
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    return NamedSharding(mesh, PartitionSpec(*spec))


def numbers(dtype, shape):
    return np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)


def state(spec):
    kinds = {"float": np.float32, "half": jnp.bfloat16, "eight": jnp.float8_e4m3fn, "whole": np.int32, "bool": np.bool_}
    arrays = {name: jax.device_put(numbers(kind, (8, 4, 6)), sharding(spec)) for name, kind in kinds.items()}
    arrays["keys"] = jax.device_put(jax.random.split(jax.random.key(1), (8, 4, 2)), sharding(spec))
    return arrays | {"one": jax.device_put(jnp.int32(7), sharding(())), "none": jnp.zeros((0, 3))}


def wanted(state):
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}


def bits(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()


def saved(folder, state):
    store = Store(folder, SPEC)
    store.save(1, state, {})
    store.finish()
    return store


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 4]),
    largest=st.integers(4, 40),
)
def test_boxes_fill_an_array_in_order_and_none_is_too_large(shape, itemsize, largest):
    numbered, seen = np.arange(math.prod(shape)).reshape(shape), []
    for start, size in blocks.cut_boxes(shape, itemsize, largest):
        assert 0 < math.prod(size) * itemsize <= largest
        seen += numbered[tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))].ravel().tolist()
    assert seen == list(range(math.prod(shape)))


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("before", SPECS)
def test_what_one_sharding_saves_any_other_restores_bit_for_bit(before, tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "cut_boxes", partial(blocks.cut_boxes, largest=40))
    was = state(before)
    store = saved(tmp_path, was)
    assert max(len(each) for each in manifest.read(store.path(1)).blocks.values()) > 8
    for after in SPECS:
        now, _ = store.restore(wanted(state(after)))
        assert {name: bits(x) for name, x in now.items()} == {name: bits(x) for name, x in was.items()}
        assert now["float"].sharding == sharding(after)


def test_every_byte_is_read_once_and_hashed_once_on_each_way(tmp_path, monkeypatch):
    hashed, read, preadv, digest = [], [], os.preadv, blocks.digest

    def counted(content):
        hashed.append(len(content))
        return digest(content)

    monkeypatch.setattr(blocks, "digest", counted)
    monkeypatch.setattr(array_files, "digest", counted)
    monkeypatch.setattr(os, "preadv", lambda *about: read.append(preadv(*about)) or read[-1])
    was = state(("x",))
    store = saved(tmp_path, was)
    size = sum(len(bits(x)) for x in was.values())
    assert sum(hashed) == size == (store.path(1) / "arrays" / "00000").stat().st_size
    store.restore(wanted(was))
    assert sum(hashed) == 2 * size
    assert sum(read) == size


def test_a_state_is_copied_before_the_next_step_takes_its_memory(tmp_path):
    was = state(("x",))
    kept = {name: bits(x) for name, x in was.items()}
    store = Store(tmp_path, SPEC)
    store.save(1, was, {})
    for leaf in was.values():
        leaf.delete()
    store.finish()
    now, _ = store.restore(wanted(state(())))
    assert {name: bits(x) for name, x in now.items()} == kept


def test_flipped_bytes_are_found_by_restoring(tmp_path):
    assert flips_found(tmp_path, 200) == 200


def test_blocks_that_do_not_fill_an_array_are_refused(tmp_path):
    folder = saved(tmp_path, state(())).path(1)
    made = manifest.read(folder)
    mine = made.blocks["float"]
    shapes = {name: (array.shape, array.bytes) for name, array in made.arrays.items()}
    assert blocks.find_misfit(shapes, made.blocks) == ""
    short = blocks.SavedBlock(0, mine[0].at, mine[0].bytes - 4, mine[0].start, mine[0].shape, mine[0].hash)
    for wrong in ((), mine * 2, (short,)):
        assert "float" in blocks.find_misfit(shapes, made.blocks | {"float": wrong})
    manifest._write_manifest(folder / manifest.NAME, manifest.replace(made, blocks=made.blocks | {"one": ()}))
    with pytest.raises(JaxparError, match="MANIFEST: the blocks of 'one' do not fill it"):
        manifest.read(folder)
