"""A process's memory does not grow with its saves."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import memory_growth
import pytest

SHM = Path("/dev/shm")  # files in memory


@pytest.mark.slow
def test_no_object_of_a_save_outlives_it(tmp_path):
    """Blocks of Python's allocator: 286 stayed of each save while Orbax wrote them, as TensorStore leaks."""
    assert memory_growth.of_saves(tmp_path, 12, first=10, measured=sys.getallocatedblocks) < 120


@pytest.mark.full
@pytest.mark.skipif(not SHM.is_dir(), reason="2,000 saves wait minutes for a disk")
def test_resident_memory_is_flat_over_600_saves():
    """In a process with one arena of malloc's: by which thread each of many is filled, and how far, is chance."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        command, alone = [sys.executable, memory_growth.__file__, folder, "600"], os.environ | {"MALLOC_ARENA_MAX": "1"}
        said = subprocess.run(command, env=alone, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert float(said) < 4 * 1024  # 17.4 KiB while TensorStore leaked
