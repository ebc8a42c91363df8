"""A process's memory does not grow with its saves."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import growth
import pytest
import tensorstore as ts
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxpar.checkpoint import leak

SHM = Path("/dev/shm")  # files in memory
IoDirection = tensorstore_utils.types.IoDirection
SPECS = [
    {"driver": "file", "path": "/runs/é'\"/000200.writing/"},
    {"driver": "file", "path": "relative"},
    {"driver": "file", "path": ""},
    {"driver": "file", "path": "/a/", "file_io_locking": {"mode": "non_atomic"}},
    {"driver": "file", "path": "/a/", "file_io_sync": False},
    {"driver": "file", "path": "/a/", "context": {"file_io_concurrency": {"limit": 3}}},
    {"driver": "memory", "path": "/a/../b"},
    {"driver": "ocdbt", "base": "file:///a/", "path": "b"},
    "file:///a/",
]


def whole(function):
    """Returns what was replaced: an earlier save in this process may have done that."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.slow
def test_outside_no_object_of_a_save_outlives_it(tmp_path):
    """Blocks of Python's allocator: 286 stayed of each save while TensorStore leaked what Orbax asks it."""
    assert growth.of_saves(tmp_path, 12, first=10, measured=sys.getallocatedblocks) < 120


@pytest.mark.full
@pytest.mark.skipif(not SHM.is_dir(), reason="2,000 saves wait minutes for a disk")
def test_outside_resident_memory_is_flat_over_600_saves():
    """In a process with one arena of malloc's: by which thread each of many is filled, and how far, is chance."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        command, alone = [sys.executable, growth.__file__, folder, "600"], os.environ | {"MALLOC_ARENA_MAX": "1"}
        said = subprocess.run(command, env=alone, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert float(said) < 4 * 1024  # 17.4 KiB while TensorStore leaked


@pytest.mark.parametrize("defaults", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_outside_where_an_array_lies_is_answered_as_tensorstore_does(spec, defaults):
    asked, answer = ts.KvStore.Spec(spec), leak.to_json_of(ts.KvStore.Spec)
    assert answer(asked, include_defaults=defaults) == whole(ts.KvStore.Spec.to_json)(asked, include_defaults=defaults)


@pytest.mark.parametrize("direction", IoDirection)
def test_outside_bytes_written_and_read_are_those_that_orbax_counts(tmp_path, direction):
    folder = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    folder.write("a", b"12345").result()
    assert folder.read("a").result().value == b"12345"
    orbax = whole(tensorstore_utils.get_tensorstore_raw_bytes)
    assert leak.raw_bytes_of(orbax)(direction) == orbax(direction) > 0
    assert leak.raw_bytes_of(orbax)() == orbax()


def test_outside_a_direction_that_is_not_known_is_left_to_orbax():
    assert leak.raw_bytes_of(lambda direction: -1)(SimpleNamespace(value="copy")) == -1


class Mended:
    """A `KvStore.Spec` that keeps no reference to its answers."""

    def __init__(self, spec):
        self.spec = spec

    def to_json(self):
        return {"driver": "file", "path": "".join(list(self.spec["path"]))}


def test_outside_a_tensorstore_that_leaks_nothing_is_left_alone(monkeypatch):
    before = Mended.to_json
    monkeypatch.setattr(ts.KvStore, "Spec", Mended)
    assert leak.stop.__wrapped__() == ()
    assert Mended.to_json is before
